"""Generation without a learner: one engine, started from weights on disk, samples one shard of a stage.

No process group, no Megatron: any number of such processes may run at once, on machines that share the run directory,
and each may be killed and started again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

from mugrpo_megatron.cuda import finds_cuda
from mugrpo_megatron.data.prepare import Problems, prepare
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.engine.client import MOST_FAILURES, Engine, first_start_problem
from mugrpo_megatron.engine.launch import check_allocator, replayed_routers, training_sampling
from mugrpo_megatron.engine.placement import EngineSlot
from mugrpo_megatron.engine.wire import SampledGroup
from mugrpo_megatron.errors import EngineFailure, EngineStopped, UserError
from mugrpo_megatron.evaluation.scoring import ScoredGroup, Scorer
from mugrpo_megatron.extras.auxiliary.shard import ShardScoring
from mugrpo_megatron.extras.engine_only.shards import GenerationShard, NextStage, begin, mark_shard
from mugrpo_megatron.observe.progress import Display, open_display
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.run.directory import RunDirectory, file_lock
from mugrpo_megatron.run.engine_spec import engine_spec
from mugrpo_megatron.run.inputs import editable_after_failure
from mugrpo_megatron.run.stage_groups import group_prompt, group_samples
from mugrpo_megatron.run.stopping import StopRequest, handle_signals
from mugrpo_megatron.stages.manifest import check_stage
from mugrpo_megatron.stages.store import StageStore


def generate_shard(recipe: Recipe, shard: GenerationShard, stage: int | None, problems: Problems) -> str:
    """Sample and score what the stage lacks of the shard; once the stage is sealed, have auxiliary models score it.

    Returns a sentence on what is done and what comes next. Groups go to disk as they are scored, and so does what
    auxiliary models compute of an update: a process that was killed continues where it was. Raises UserError when
    `stage` is given and is not the run's next one, when another process generates the same shard, or when the shard was
    begun with other weights; EngineFailure after MOST_FAILURES failures in a row without a finished group; Stopped,
    with every scored group on disk, when asked to stop.
    """
    following = begin(recipe, problems)
    directory, cursor = RunDirectory(recipe.run.dir), following.cursor
    if stage not in (None, cursor.stage):
        raise UserError(f"{directory.path} is at stage {cursor.stage}, not at stage {stage}; omit --stage")
    with (
        file_lock(directory.path / ".lock", shared=True, wait=True),  # shared by shards, not by learners
        file_lock(directory.logs / f"shard-{shard.writer:04d}.lock"),
        handle_signals(is_main=True) as stop,
        open_display() as display,
    ):
        store = StageStore(following.directory, shard.writer, following.origin)
        groups = shard.groups(cursor.stage_updates(recipe.schedule) * recipe.rollout.prompts_per_update)
        if not store.sealed and (missing := groups - store.verified_groups()):
            check_stage(store.directory, following.origin)
            mark_shard(shard, following, problems)
            _generate(recipe, shard, following, store, sorted(missing), problems, display, stop)
            if stop.requested:
                finished = len(groups & store.verified_groups())
                raise stop.stopped(f"{finished} of {len(groups)} groups of shard {shard} are on disk")
        after = f"once all shards have, `mugrpo seal {directory.path}`"
        sealed = StageStore(following.directory, origin=following.origin)
        if recipe.auxiliary.by_name and sealed.sealed:
            scoring = ShardScoring(recipe, sealed, cursor.stage, _slot(shard), display, stop)
            scoring.score()
            missing_columns = scoring.merge()
            after = (
                f"of other shards the stage lacks {missing_columns}; run them again"
                if missing_columns
                else "the stage has all that auxiliary models compute; `mugrpo optimize` takes its updates"
            )
    return f"shard {shard} has all of its {len(groups):,} groups; {after}"


def _generate(
    recipe: Recipe,
    shard: GenerationShard,
    stage: NextStage,
    store: StageStore,
    missing: list[int],
    problems: Problems,
    display: Display,
    stop: StopRequest,
) -> None:
    tokenizer = load_tokenizer(recipe.model.directory)
    prepared = prepare(recipe.data, recipe.reward, tokenizer, problems)
    log = RunDirectory(recipe.run.dir).logs / f"engine-shard-{shard.writer:04d}.log"
    settings = training_sampling(recipe.rollout, recipe.run, tokenizer, replayed_routers(recipe.learner, recipe.model))
    n = recipe.rollout.responses_per_prompt
    with ExitStack() as stack:
        stack.enter_context(editable_after_failure(recipe.run.dir))
        if finds_cuda():
            check_allocator()
        engine = Engine.start(engine_spec(recipe), stage.weights, log, _slot(shard), stop.poll)
        stack.callback(engine.stop)
        verifier = stack.enter_context(Verifier(recipe.reward))
        with display.waiting(f"waiting for the engine, see {log}"):
            if problem := first_start_problem(engine):
                raise UserError(problem)
        failures = 0
        with display.bar(f"stage {stage.cursor.stage}, shard {shard}", len(missing), "prompts") as bar:

            def store_group(group: ScoredGroup) -> None:
                store.append(group_samples(group, recipe.rollout, recipe.reward, recipe.objective))
                missing.remove(group.prompt.index)
                bar.advance(tokens=group.tokens)

            while missing and not stop.poll():
                before, failure = len(missing), None
                scorer = Scorer(verifier, tokenizer)
                try:
                    engine.wait_ready()
                    engine.set_version(stage.cursor.updates)
                    prompts = (group_prompt(recipe, prepared, stage.cursor, group) for group in tuple(missing))
                    with closing(engine.generate(prompts, n, settings)) as groups:
                        for group in scorer.during(_until(groups, stop)):
                            store_group(group)
                except EngineFailure as error:
                    failure = error
                for group in scorer.rest(stop.poll):
                    store_group(group)
                store.flush()
                if failure and not isinstance(failure, EngineStopped):
                    failures = failures + 1 if len(missing) == before else 1
                    if failures >= MOST_FAILURES:
                        raise failure
                    display.say(f"{failure}\nThe engine is restarted for what is missing.")
                    engine.restart()


def _until(groups: Iterator[SampledGroup], stop: StopRequest) -> Iterator[SampledGroup]:
    """The groups until the process is asked to stop."""
    for group in groups:
        yield group
        if stop.poll():
            return


def _slot(shard: GenerationShard) -> EngineSlot:
    """This machine's first devices; the shard's number gives the engine its own random stream."""
    return EngineSlot(True, number=shard.number, engines=shard.of, local=0, local_engines=1, gpu=0)
