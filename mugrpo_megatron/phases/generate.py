"""Generation of a stage: the engines draw its prompts from one queue, the verifier scores, the stage is sealed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from mugrpo_megatron.engine.launch import replayed_routers, training_sampling
from mugrpo_megatron.engine.queue import PromptQueue
from mugrpo_megatron.engine.wire import SampledGroup
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.evaluation.scoring import Scorer
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.observe.environment import device_memory_in_use
from mugrpo_megatron.observe.log import MetricLog
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.phases.evaluate import evaluate_if_due
from mugrpo_megatron.phases.handover import (
    report_failures,
    sample_groups,
    shared_queue,
    show_totals,
    sync_weights,
)
from mugrpo_megatron.recipe.functions import load_function
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.leader import EngineLeader, Engines, sleep_engines
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.stage_groups import group_prompt, group_samples
from mugrpo_megatron.run.world import World
from mugrpo_megatron.samples import Prompt
from mugrpo_megatron.stages.store import StageStore

AUXILIARY_TURNS = "mugrpo_megatron.extras.auxiliary.phase:score_stage"
"""Entry point of the phase in which auxiliary models compute their columns, one at a time."""


@contextmanager
def open_generation(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> Iterator[Generation]:
    """Open the cursor's stage for generation; afterwards the learner has the devices again. Collective."""
    yield Generation(run, learner, engines, cursor, run.stage_store(cursor, engines.writer))
    learner.reload()


@dataclass(frozen=True)
class Generation:
    """The cursor's stage while the engines generate it. Every method is collective."""

    run: Run
    learner: Learner
    engines: Engines
    cursor: Cursor
    store: StageStore

    @property
    def sealed(self) -> bool:
        return self.store.sealed

    def sync_weights(self) -> None:
        """Send the learner's weights to the engines and give them the devices."""
        sync_weights(self.run, self.learner, self.engines, self.cursor)

    def evaluate_if_due(self) -> None:
        """Evaluate the weights that the engines have just received, where the recipe asks for it."""
        evaluate_if_due(self.run, self.learner, self.engines, self.cursor)

    def sample(self) -> None:
        """Sample and score the groups that the stage lacks, and seal it once it is complete.

        Groups go to disk as they are scored. An engine that fails leaves its unfinished groups to the next round, after
        the sync that restarts it: the stage is then not sealed. Raises EngineFailure on every rank after MOST_FAILURES
        failures of one engine in a row without a finished group between them, and Stopped, with every scored group on
        disk, when the run was asked to stop.
        """
        run, leader = self.run, self.engines.leader
        # Rank 0 alone looks at the disk: a shared file system may show the ranks different states.
        missing = sorted(set(self._groups) - self.store.verified_groups()) if run.is_main else []
        queue = shared_queue(run.world, missing)
        scorer = Scorer(leader.verifier, leader.tokenizer) if leader else None
        recipe = run.recipe
        to_samples = partial(group_samples, rollout=recipe.rollout, reward=recipe.reward, objective=recipe.objective)
        with (
            run.phase("generate", self.cursor) as facts,
            run.display.bar(f"{self.cursor.title(run.recipe.schedule)}: generate", queue.total, "prompts") as bar,
        ):
            if leader and scorer:
                for group in scorer.during(_sample_stage(run, leader, self.cursor, queue, bar)):
                    self.store.append(to_samples(group))
                if run.stop.requested:
                    self.store.flush()  # before the barrier: another rank may have died
            # Heartbeats instead of a collective: a long generation would exceed its timeout (ProcessGroupNCCL).
            run.world.barrier(lambda: show_totals(bar, queue, run.is_main))
            show_totals(bar, queue, run.is_main)
            facts["tokens"] = float(bar.tokens)
            memory = device_memory_in_use() or leader.engine.memory if leader else 0.0
            facts["engine_memory"] = max(run.world.gather(memory))
            _log_loads(run.world, run.log, leader, self.cursor)
        with run.phase("score", self.cursor):
            # Scores that are still computed when the engine has finished; a verifier may be slower than the engine.
            for group in scorer.rest(run.stop.poll) if scorer else ():
                self.store.append(to_samples(group))
            self.store.flush()
            run.world.barrier()
            stopping = any(run.world.any_rank(run.stop.requested))
            report_failures(run, leader)
            self._seal_if_complete(stopping)
        if stopping:
            done = f"{len(self.store.verified_groups())} of {len(self._groups)} groups of this stage are on disk; "
            raise run.stop.all_stopped(self.cursor, done)

    def _seal_if_complete(self, stopping: bool) -> None:
        """The main rank seals the stage; every other rank waits until it sees that on the shared file system."""
        run, store = self.run, self.store
        groups_of_writers = run.world.gather(store.own_groups)
        sees_all = not run.is_main or store.wait_for(set().union(*groups_of_writers), sealed=False)
        check_shared(run.world, store, sees_all)
        # One rank seals: engines write shards and manifests of their own, the sealed file has a single writer.
        if run.is_main and not stopping and store.listed_groups().issuperset(self._groups):
            store.seal(self.cursor.stage_updates(run.recipe.schedule), run.recipe.rollout.prompts_per_update)
        if any(run.world.any_rank(run.is_main and store.sealed)):
            check_shared(run.world, store, store.wait_for(set(), sealed=True))

    @property
    def _groups(self) -> range:
        recipe = self.run.recipe
        return range(self.cursor.stage_updates(recipe.schedule) * recipe.rollout.prompts_per_update)

    def sleep_engines(self) -> None:
        """Put the engines to sleep; the learner stays offloaded."""
        sleep_engines(self.run.world, self.engines)

    def run_auxiliary_models(self) -> None:
        """Have the recipe's auxiliary models compute the columns that the sealed stage lacks.

        The policy's engines sleep, and the learner is offloaded where there is something to compute; it stays so.
        """
        if self.run.recipe.auxiliary.by_name:
            load_function("auxiliary", AUXILIARY_TURNS)(self.run, self.learner, self.store, self.cursor)


def _sample_stage(
    run: Run, leader: EngineLeader, cursor: Cursor, queue: PromptQueue, bar: Bar
) -> Iterator[SampledGroup]:
    """Yields the groups of the cursor's stage that this rank's engine finishes; one that fails leaves the queue."""
    recipe = run.recipe

    def take(waiting: int, slots: int) -> list[Prompt]:
        return [group_prompt(recipe, leader.problems, cursor, g) for g in queue.take(waiting, slots)]

    routers = replayed_routers(recipe.learner, recipe.model)
    how = training_sampling(recipe.rollout, recipe.run, leader.tokenizer, routers)
    for prompt, responses in sample_groups(leader, queue, take, recipe.rollout.responses_per_prompt, how, run.stop):
        leader.failures_in_a_row = 0
        yield SampledGroup(prompt, responses)
        queue.finished(sum(len(response.ids) for response in responses))
        show_totals(bar, queue, run.is_main)
    if not leader.engine.running:
        queue.leave()


def _log_loads(world: World, log: MetricLog, leader: EngineLeader | None, cursor: Cursor) -> None:
    """Log the engines' loads during the generation that has just ended. Collective."""
    mine = (leader.slot.number, leader.engine.load_record.loads) if leader else (0, [])
    for engine, loads in world.gather(mine):
        for load in loads:
            log.engine(cursor.stage, engine, load.time, load.metrics())


def check_shared(world: World, stage: StageStore, seen: bool) -> None:
    """UserError on every rank when one of them does not see what another has written. Collective."""
    blind = [rank for rank, sees in enumerate(world.gather(seen)) if not sees]
    if blind:
        raise UserError(
            f"rank {blind[0]} does not see what other ranks have written to {stage.directory}: put run.dir on a "
            "file system that all nodes share, under the same path"
        )
