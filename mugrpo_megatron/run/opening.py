"""Opens the parts of a run, at the same time where that is possible, and closes them, also after an error or a stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from mugrpo_megatron.cuda import finds_cuda
from mugrpo_megatron.data.prepare import PreparedData, Problems, prepare
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.engine.launch import check_allocator, importing_host, sampling_note
from mugrpo_megatron.engine.placement import slot_of_environment
from mugrpo_megatron.engine.process import HostProcess
from mugrpo_megatron.learner.groups import named_phase, shutdown_after
from mugrpo_megatron.learner.learner import PARTS, Learner, build_learner
from mugrpo_megatron.observe.environment import rank_of_environment
from mugrpo_megatron.observe.health import HealthMonitor
from mugrpo_megatron.observe.log import MetricLog, open_log
from mugrpo_megatron.observe.progress import Display, open_display
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.policy import RolloutSection
from mugrpo_megatron.recipe.sections import ScheduleSection
from mugrpo_megatron.recipe.systems import sync_bucket_bytes
from mugrpo_megatron.run.checkpoints import check_stage_sealed, newest_cursor, open_saver, restore_newest
from mugrpo_megatron.run.connected import broadcast_failure, open_world
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory, open_directory, stage_origin
from mugrpo_megatron.run.engines import Engines, start_engines
from mugrpo_megatron.run.inputs import editable_after_failure, record_data
from mugrpo_megatron.run.leader import Launched, launch, loads_beside_learner
from mugrpo_megatron.run.record import RunRecord, read_record
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.stopping import StopRequest, handle_signals
from mugrpo_megatron.run.world import World
from mugrpo_megatron.stages.manifest import Origin, check_stage
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.weights.sync import WeightSync, build_weight_sync


@dataclass(frozen=True)
class RunFiles:
    """An open run directory, with the run's record, log, display and request to stop, before there is a learner."""

    directory: RunDirectory
    record: RunRecord | None
    """The run's record on the main rank; None on other ranks."""
    log: MetricLog
    display: Display
    stop: StopRequest


@contextmanager
def open_run(
    recipe: Recipe, problems: Problems | None, host: HostProcess | None = None, generates: bool = True
) -> Iterator[tuple[Run, Learner, Engines, Cursor]]:
    """Start engines and learner of a recipe, and resume its run where it stands. They are closed after the block.

    The recipe must have been checked by `checks.preflight.check_run`, which also reads the `problems` (on rank 0; None
    on others). `host` is the engine's process if it was started before (`engine.launch.prelaunch_host`). With
    `generates` false there is neither engine nor verifier. Yields the run, its learner, its engines and the cursor.
    """
    if generates and finds_cuda():
        check_allocator()
    prepared = None
    if generates and problems:
        prepared = prepare(recipe.data, recipe.reward, load_tokenizer(recipe.model.directory), problems)
    with open_files(recipe, problems) as files, ExitStack() as stack:
        directory, log = files.directory, files.log
        with log.phase("start", 0), files.stop.at_once("the run was still starting, nothing on disk was changed"):
            number = slot_of_environment(recipe.engine, finds_cuda()).engines if generates else 0
            launched = None
            if generates and loads_beside_learner(recipe.engine):
                launched = launch(recipe, directory.logs, files.stop.poll, stack, host)
            loading = ", the engine loads" if launched and launched.led else ""
            with files.display.waiting(f"building the learner{loading}"):
                learner = build_learner(recipe)
            world = join_world(learner, number, files.stop, stack)
            record = world.broadcast(files.record)  # not read by each rank: other nodes may see the new file late
            assert record
            cursor = restore_learner(learner, directory, record, log, files.display)
            saver = stack.enter_context(open_saver(learner, directory.checkpoints, recipe.checkpoint, record.id, log))
            weight_sync = weight_sync_of(learner)
            if generates and not launched:
                launched = launch_in_its_place(learner, world, directory, files.stop, stack)
            engines = Engines(world, recipe.engine, weight_sync)
            if launched:
                engines = start_engines(recipe, launched, world, weight_sync, prepared, files.display)
            learner.reload()
        print_notes(files, cursor, recipe.schedule, recipe.rollout, prepared)
        with broadcast_failure(learner.ranks):
            yield Run(recipe, directory, world, log, files.display, record, saver), learner, engines, cursor


@contextmanager
def open_files(recipe: Recipe, problems: Problems | None) -> Iterator[RunFiles]:
    """Open the run's directory and log (written by the main rank only), its display and its signal handlers."""
    is_main = rank_of_environment() == 0
    with ExitStack() as stack:
        directory = stack.enter_context(open_directory(recipe)) if is_main else RunDirectory(recipe.run.dir)
        record = read_record(directory.path) if is_main else None
        cursor = newest_cursor(directory.checkpoints)
        if is_main and problems:
            record_data(directory.path, problems)
        # Done here, so that a stage that cannot be used is refused before the learner is built, which takes minutes.
        if record:
            clean_current_stage(directory, stage_origin(directory, record, cursor), cursor)
        display = stack.enter_context(open_display(show=is_main))
        log = open_log(
            directory.path,
            recipe.track,
            updates_done=cursor.updates,
            run_id=record.id if record else "",
            config=recipe.model_dump(mode="json"),
            write=is_main,
            watch=HealthMonitor(display.say, recipe.optimizer.clip_grad),
        )
        with log as opened, handle_signals(is_main) as stop, editable_after_failure(directory.path):
            yield RunFiles(directory, record, opened, display, stop)


def clean_current_stage(directory: RunDirectory, origin: Origin, cursor: Cursor) -> None:
    """Check the stage at the cursor; if it is sealed, remove the shards (parts of the unsealed stage) that a killed
    process has left.

    Raises UserError when the stage is damaged or another run's, or when it is incomplete although updates were taken on
    it.
    """
    check_stage(directory.stage(cursor.stage), origin)
    check_stage_sealed(directory, cursor)
    if (stage := StageStore(directory.stage(cursor.stage), 0, origin)).sealed:
        stage.remove_shards()


def join_world(learner: Learner, engines: int, stop: StopRequest, stack: ExitStack) -> World:
    """Make the world of the ranks that the learner's process groups connect; `stack` destroys them. Collective."""
    # `stack` gets the process groups before the saver, so that it destroys them after the last save has ended.
    stack.enter_context(shutdown_after(learner.ranks))
    stack.enter_context(named_phase(learner.ranks))
    world = open_world(learner.ranks, learner.recipe.run.collective_timeout_s, engines, stop)
    stack.callback(stop.detach)
    return world


def launch_in_its_place(
    learner: Learner, world: World, directory: RunDirectory, stop: StopRequest, stack: ExitStack
) -> Launched:
    """Offload the learner, and launch this rank's engine on the device memory that this frees. Collective.

    The engine's process imports SGLang during the offload. Both take seconds: a first offload pins host memory (18 GB
    of a 1.5B model in 7 to 9 s on an H200's host).
    """
    recipe = learner.recipe
    host = stack.enter_context(importing_host(recipe.engine, recipe.model.directory, finds_cuda()))
    offload_learner(learner, world)
    return launch(recipe, directory.logs, stop.poll, stack, host)


def offload_learner(learner: Learner, world: World) -> None:
    """Offload the learner of every rank. Collective."""
    for part in PARTS:
        learner.offload(part)
    world.barrier()  # an engine may use the devices of several ranks, so it waits until all have freed their own


def print_notes(
    files: RunFiles, cursor: Cursor, schedule: ScheduleSection, rollout: RolloutSection, prepared: PreparedData | None
) -> None:
    """Print after how many updates the run continues, unless it is new, and notes on its data and its sampling."""
    if cursor != Cursor():
        total = schedule.total_updates
        files.display.say(f"{files.directory.path} continues after {cursor.updates:,} of {total:,} updates")
    for note in (*prepared.notes, sampling_note(rollout)) if prepared else ():
        if note:
            files.display.say(note)


def restore_learner(
    learner: Learner, directory: RunDirectory, record: RunRecord, log: MetricLog, display: Display
) -> Cursor:
    """Load the run's newest intact checkpoint into the learner, and return its cursor. Collective.

    Damaged checkpoints are printed and logged.
    """

    def report_damage(damage: str) -> None:
        display.say(damage)
        log.event("damaged_checkpoint", damage)

    return restore_newest(learner, directory.checkpoints, record, report_damage)


def weight_sync_of(learner: Learner) -> WeightSync:
    """Plan the sync of this learner's weights to the engines of its recipe. Collective."""
    engine = learner.recipe.engine
    return build_weight_sync(
        learner.models,
        learner.architecture,
        sync_bucket_bytes(finds_cuda()),
        engine.tensor,
        quantised=engine.quantization != "none",
        engine_nodes=engine.nodes,
        timeout_s=learner.recipe.run.collective_timeout_s,
    )
