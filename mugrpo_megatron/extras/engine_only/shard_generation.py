"""Generation without a learner: one engine, started from weights on disk, samples one shard of a stage.

Such a process is a run with one rank, without a process group and without Megatron. Any number of them may run at once,
on machines that share the run directory, and each may be killed and started again.
"""

from __future__ import annotations

from contextlib import ExitStack

from mugrpo_megatron.cuda import finds_cuda
from mugrpo_megatron.data.prepare import Problems, prepare
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.launch import check_allocator
from mugrpo_megatron.engine.placement import EngineSlot
from mugrpo_megatron.extras.auxiliary.shard import ShardScoring
from mugrpo_megatron.extras.engine_only.shards import GenerationShard, NextStage, open_shard
from mugrpo_megatron.observe.log import MetricLog
from mugrpo_megatron.phases.generate import StagePart, sample
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.run.engine_spec import engine_spec
from mugrpo_megatron.run.inputs import editable_after_failure
from mugrpo_megatron.run.leader import make_leader, wait_for_engines
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.world import World
from mugrpo_megatron.stages.store import StageStore


def generate_shard(recipe: Recipe, shard: GenerationShard, stage: int | None, problems: Problems) -> str:
    """Sample and score the shard's groups that are not on disk; if the stage is sealed, have auxiliary models score it.

    Returns a sentence on what is done and what comes next. Groups go to disk as they are scored, and what auxiliary
    models compute goes there update by update: a killed process that is started again goes on. Raises UserError when
    `stage` is given and is not the run's next one, when another process generates the same shard, or when the shard was
    begun with other weights, problems or number of shards; EngineFailure after MOST_FAILURES failures in a row without
    a finished group; Stopped, with every scored group on disk, when asked to stop.
    """
    with open_shard(recipe, shard, stage, problems) as opened:
        following, directory, cursor = opened.stage, opened.directory, opened.stage.cursor
        world = World(engines=1, stop=opened.stop)
        run = Run(recipe, directory, world, MetricLog(), opened.display, following.record)
        if opened.missing:
            title = f"stage {cursor.stage}, shard {shard}"
            part = StagePart(cursor, opened.groups, f"shard {shard}", title)
            _generate(run, shard, following, opened.store, part, problems)
        after = f"once all shards have, `mugrpo seal {directory.path}`"
        sealed = StageStore(following.directory, origin=following.origin)
        if recipe.auxiliary.by_name and sealed.sealed:
            scoring = ShardScoring(run, sealed, cursor, _slot(shard))
            scoring.score()
            missing_columns = scoring.merge()
            after = (
                f"the stage still lacks {missing_columns}; run again the shards that have not finished theirs"
                if missing_columns
                else "the stage has all that auxiliary models compute; `mugrpo optimize` takes its updates"
            )
    return f"shard {shard} has all of its {len(opened.groups):,} groups; {after}"


def _generate(
    run: Run, shard: GenerationShard, stage: NextStage, store: StageStore, part: StagePart, problems: Problems
) -> None:
    """Sample and score in rounds, until all of the shard's groups are on disk."""
    recipe = run.recipe
    tokenizer = load_tokenizer(recipe.model.directory)
    prepared = prepare(recipe.data, recipe.reward, tokenizer, problems)
    log = run.directory.logs / f"engine-shard-{shard.writer:04d}.log"
    with ExitStack() as stack:
        stack.enter_context(editable_after_failure(run.directory.path))
        if finds_cuda():
            check_allocator()
        engine = Engine.start(engine_spec(recipe), stage.weights, log, _slot(shard), run.stop.poll)
        stack.callback(engine.stop)
        verifier = stack.enter_context(Verifier(recipe.reward))
        leader = make_leader(recipe, _slot(shard), engine, verifier, prepared)
        with run.display.waiting(f"waiting for the engine, see {log}"):
            wait_for_engines(leader, run.world)
        while part.groups - store.verified_groups():  # one round, unless the engine fails and is started again
            with leader.guarded():
                leader.restart_if_failed()
                engine.set_version(part.cursor.updates)
            sample(run, leader, store, part)


def _slot(shard: GenerationShard) -> EngineSlot:
    """The slot of an engine on this machine's first devices; the shard's number gives it a random stream of its own."""
    return EngineSlot(True, number=shard.number, engines=shard.of, local=0, local_engines=1, gpu=0)
