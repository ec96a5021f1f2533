"""Generates a stage: the engines draw its prompts from one queue, the verifier scores, and the stage is sealed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mugrpo_megatron.engine.wire import SampledGroup
from mugrpo_megatron.evaluation.scoring import Scorer
from mugrpo_megatron.observe.environment import device_memory_in_use
from mugrpo_megatron.phases.rounds import check_shared, open_round, report
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.leader import Leader
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.stage_groups import group_prompt, group_samples
from mugrpo_megatron.stages.store import StageStore

if TYPE_CHECKING:
    from mugrpo_megatron.learner.learner import Learner


@dataclass(frozen=True, slots=True)
class StagePart:
    """The groups of the cursor's stage that the ranks of this run sample together: all of the stage's groups, or with
    `--shard` those of one job."""

    cursor: Cursor
    groups: frozenset[int]
    name: str
    """What messages call the part."""
    title: str
    """Title of the part's progress bar."""


def whole_stage(recipe: Recipe, cursor: Cursor) -> StagePart:
    """The part that consists of all groups of the cursor's stage."""
    count = cursor.updates_sampled(recipe.schedule) * recipe.rollout.prompts_per_update
    return StagePart(cursor, frozenset(range(count)), "this stage", f"{cursor.title(recipe.schedule)}: generate")


def sample(run: Run, leader: Leader | None, stage: StageStore, part: StagePart) -> None:
    """Sample and score the groups of the part that the stage still lacks. Collective.

    Groups are written as they are scored. If an engine fails, the groups that it has not finished are left to the next
    call, before which the caller restarts the engine. Raises EngineFailure on every rank after MOST_FAILURES failures
    of one engine in a row without a finished group between them, and Stopped, with every scored group on disk, when the
    run was asked to stop.
    """
    recipe, cursor = run.recipe, part.cursor
    # Rank 0 alone looks at the disk: a shared file system may show the ranks different states.
    missing = sorted(part.groups - stage.verified_groups()) if run.is_main else []
    sink = ScoredGroups(stage, leader, recipe) if leader else None
    with run.phase("generate", cursor) as facts, run.display.bar(part.title, len(missing), "prompts") as bar:
        round = open_round(run, leader, missing, bar)
        if sink and leader:
            prompt_of = partial(group_prompt, recipe, leader.problems, cursor)
            sink.take(round.groups(prompt_of, recipe.rollout.responses_per_prompt, leader.sampling))
        if run.stop.requested:
            stage.flush()  # before `round.end`, since that fails if another rank has died
        outcome = round.end(_load(run, leader))
        facts |= {"tokens": float(bar.tokens), "engine_memory": max(memory for _, memory, _ in outcome.results)}
        for engine, _, loads in outcome.results:
            for unix_s, metrics in loads:
                run.log.engine(cursor.stage, engine, unix_s, metrics)
    with run.phase("score", cursor):
        # The verifier may be slower than the engine, so some of the sampled groups may not be scored yet.
        if sink:
            sink.take_rest(run.stop.poll)
        stage.flush()
        run.world.barrier()
        stopping = run.world.any_rank(run.stop.requested)
    report(run, outcome.failures)
    if stopping:
        done = len(part.groups & stage.verified_groups())
        run.save_and_stop(cursor, f"{done} of {len(part.groups)} groups of {part.name} are on disk")


class ScoredGroups:
    """Takes groups from an engine, has them scored while the engine goes on, and appends them to the stage."""

    def __init__(self, stage: StageStore, leader: Leader, recipe: Recipe) -> None:
        self._stage, self._scorer = stage, Scorer(leader.verifier, leader.tokenizer)
        self._to_samples = partial(
            group_samples, rollout=recipe.rollout, reward=recipe.reward, objective=recipe.objective
        )

    def take(self, groups: Iterable[SampledGroup]) -> None:
        """Submit every group to the verifier, and append those whose scores are ready."""
        for group in self._scorer.during(groups):
            self._stage.append(self._to_samples(group))

    def take_rest(self, stopping: Callable[[], bool]) -> None:
        """Wait for the scores that are still pending, and append their groups.

        Once `stopping()` is true, groups that are not scored yet are dropped.
        """
        for group in self._scorer.rest(stopping):
            self._stage.append(self._to_samples(group))


def _load(run: Run, leader: Leader | None) -> tuple[int, float, list[tuple[float, dict[str, float]]]]:
    """Returns the number of this rank's engine, the bytes of its memory, and the load that was measured in the last
    generation.

    The load is a list of (time, metrics). Times are Unix seconds by the log's clock, which never runs backward, even if
    the machine's clock is set back. A rank that leads no engine returns 0, 0 bytes and an empty list.
    """
    if leader is None:
        return 0, 0.0, []
    engine = leader.engine
    offset = run.log.clock() - time.monotonic()
    loads = [(load.at + offset, load.metrics()) for load in engine.load_record.loads]
    return leader.slot.number, device_memory_in_use() or engine.memory, loads


def seal_if_complete(run: Run, stage: StageStore, part: StagePart) -> None:
    """Seal the stage if all groups of `part`, which must be the whole stage, are on disk. Collective.

    The main rank seals; every other rank waits until it sees the seal on the shared file system. Raises UserError on
    every rank if a rank does not see what others have written.
    """
    with run.phase("score", part.cursor):
        written = set().union(*run.world.gather(stage.own_groups))
        check_shared(run.world, stage, not run.is_main or stage.wait_for(written, sealed=False))
        # Each engine's leader writes a shard and a manifest of its own, but the seal has a single writer.
        if run.is_main and stage.listed_groups() >= part.groups:
            per_update = run.recipe.rollout.prompts_per_update
            stage.seal(len(part.groups) // per_update, per_update)
        if run.world.broadcast(run.is_main and stage.sealed):
            check_shared(run.world, stage, stage.wait_for(set(), sealed=True))


def run_auxiliary_models(run: Run, learner: Learner, stage: StageStore, cursor: Cursor) -> None:
    """Have the recipe's auxiliary models compute the columns that the sealed stage lacks. Collective.

    The policy's engines sleep meanwhile. If there is something to compute, the learner is offloaded, and is not
    reloaded here.
    """
    if run.recipe.auxiliary.by_name:
        from mugrpo_megatron.extras.auxiliary.phase import score_stage

        score_stage(run, learner, stage, cursor)
