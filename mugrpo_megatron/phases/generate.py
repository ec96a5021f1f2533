"""Generation of a stage: the engines draw its prompts from one queue, the verifier scores, the stage is sealed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mugrpo_megatron.engine.launch import replayed_routers, training_sampling
from mugrpo_megatron.engine.wire import SampledGroup
from mugrpo_megatron.evaluation.scoring import Scorer
from mugrpo_megatron.observe.environment import device_memory_in_use
from mugrpo_megatron.phases.rounds import Outcome, Round, check_shared, open_round, report
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.leader import Leader
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.stage_groups import group_prompt, group_samples
from mugrpo_megatron.stages.store import StageStore

if TYPE_CHECKING:
    from mugrpo_megatron.learner.learner import Learner


@dataclass(frozen=True, slots=True)
class StagePart:
    """The groups of a stage that a run samples: all of them, or a shard's."""

    groups: frozenset[int]
    name: str
    """Its name in messages."""
    title: str
    """The title of its progress bar."""
    seals: bool
    """Whether the run seals the stage once it is complete."""


def whole_stage(run: Run, cursor: Cursor) -> StagePart:
    """All groups of the cursor's stage."""
    schedule = run.recipe.schedule
    count = cursor.stage_updates(schedule) * run.recipe.rollout.prompts_per_update
    return StagePart(frozenset(range(count)), "this stage", f"{cursor.title(schedule)}: generate", seals=True)


def sample(run: Run, leader: Leader | None, stage: StageStore, cursor: Cursor, part: StagePart | None = None) -> None:
    """Sample and score the groups that the cursor's stage lacks, and seal it once it is complete. Collective.

    Groups go to disk as they are scored. An engine that fails leaves its unfinished groups to the next round, after it
    was started again: the stage is then not sealed. Raises EngineFailure on every rank after MOST_FAILURES failures of
    one engine in a row without a finished group between them, and Stopped, with every scored group on disk, when the
    run was asked to stop. By default `part` is the whole stage.
    """
    recipe, part = run.recipe, part or whole_stage(run, cursor)
    # Rank 0 alone looks at the disk: a shared file system may show the ranks different states.
    missing = sorted(part.groups - stage.verified_groups()) if run.is_main else []
    scorer = Scorer(leader.verifier, leader.tokenizer) if leader else None
    to_samples = partial(group_samples, rollout=recipe.rollout, reward=recipe.reward, objective=recipe.objective)
    with run.phase("generate", cursor) as facts, run.display.bar(part.title, len(missing), "prompts") as bar:
        round = open_round(run, leader, missing, bar)
        for group in scorer.during(_sampled(run, leader, cursor, round)) if scorer and leader else ():
            stage.append(to_samples(group))
        if run.stop.requested:
            stage.flush()  # before the round ends: another rank may have died
        round.wait()
        facts["tokens"] = float(bar.tokens)
        facts["engine_memory"] = _record_loads(run, leader, cursor)
    with run.phase("score", cursor):
        # Scores that are still computed when the engine has finished; a verifier may be slower than the engine.
        for group in scorer.rest(run.stop.poll) if scorer else ():
            stage.append(to_samples(group))
        stage.flush()
        outcome = round.end(stage.own_groups)
        report(run, outcome.failures)
        if part.seals:
            _seal_if_complete(run, stage, part, outcome)
    if outcome.stopping:
        done = len(part.groups & stage.verified_groups())
        run.save_and_stop(cursor, f"{done} of {len(part.groups)} groups of {part.name} are on disk")


def _sampled(run: Run, leader: Leader, cursor: Cursor, round: Round) -> Iterator[SampledGroup]:
    """Yields the groups of the cursor's stage that this rank's engine finishes."""
    recipe = run.recipe
    routers = replayed_routers(recipe.learner, recipe.model)
    how = training_sampling(recipe.rollout, recipe.run, leader.tokenizer, routers)
    prompt_of = partial(group_prompt, recipe, leader.problems, cursor)
    for group in round.groups(prompt_of, recipe.rollout.responses_per_prompt, how):
        leader.progressed()
        yield group
        round.finished(sum(len(response.ids) for response in group.responses))


def _record_loads(run: Run, leader: Leader | None, cursor: Cursor) -> float:
    """Log the engines' loads during the generation that has just ended. Collective.

    Returns the bytes of the engine that holds most.
    """
    mine = None
    if leader:
        mine = leader.slot.number, device_memory_in_use() or leader.engine.memory, leader.engine.load_record.loads
    most = 0.0
    for engine, memory, loads in filter(None, run.world.gather(mine)):
        most = max(most, memory)
        for load in loads:
            run.log.engine(cursor.stage, engine, load.time, load.metrics())
    return most


def _seal_if_complete(run: Run, stage: StageStore, part: StagePart, outcome: Outcome[set[int]]) -> None:
    """The main rank seals the stage; every other rank waits until it sees that on the shared file system."""
    written = set().union(*outcome.results)
    check_shared(run.world, stage, not run.is_main or stage.wait_for(written, sealed=False))
    # One rank seals: engines write shards and manifests of their own, the sealed file has a single writer.
    if run.is_main and not outcome.stopping and stage.listed_groups() >= part.groups:
        per_update = run.recipe.rollout.prompts_per_update
        stage.seal(len(part.groups) // per_update, per_update)
    if run.world.broadcast(run.is_main and stage.sealed):
        check_shared(run.world, stage, stage.wait_for(set(), sealed=True))


def run_auxiliary_models(run: Run, learner: Learner, stage: StageStore, cursor: Cursor) -> None:
    """Have the recipe's auxiliary models compute the columns that the sealed stage lacks. Collective.

    The policy's engines sleep, and the learner is offloaded where there is something to compute; it stays so.
    """
    if run.recipe.auxiliary.by_name:
        from mugrpo_megatron.extras.auxiliary.phase import score_stage

        score_stage(run, learner, stage, cursor)
