"""The parts of a run: opened so that their start-up overlaps, closed whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

from mugrpo_megatron.checks.preflight import check_run
from mugrpo_megatron.data.prepare import Problems, prepare
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.joined import JoinedEngine
from mugrpo_megatron.engine.launch import check_allocator, runs_on_cuda, sampling_note
from mugrpo_megatron.engine.placement import rank_of_environment, slot_of_environment
from mugrpo_megatron.engine.process import HostProcess
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner.groups import joined, named_phase
from mugrpo_megatron.learner.learner import PARTS, Learner, build_learner, offload, reload
from mugrpo_megatron.learner.model import policy
from mugrpo_megatron.observe.log import MetricLog, open_log
from mugrpo_megatron.observe.progress import Display, open_display
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.systems import BUCKET_BYTES
from mugrpo_megatron.run.checkpoints import Saver, check_stage_held, newest_cursor, open_saver, restore_newest
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.data import record_data
from mugrpo_megatron.run.directory import RunDirectory, open_directory
from mugrpo_megatron.run.generator import Generator, first_start_problem, start
from mugrpo_megatron.run.prefetch import stage_origin
from mugrpo_megatron.run.record import Record, read_record
from mugrpo_megatron.run.stopping import StopRequest, listening
from mugrpo_megatron.run.together import join, meet, sleep_joined
from mugrpo_megatron.run.world import World, open_world, telling_failures
from mugrpo_megatron.stages.manifest import check_stage
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.weights.sync import Bridge, build_bridge


@dataclass(frozen=True)
class Run:
    """What every phase needs: the recipe, where it writes, the other ranks, and a request to stop."""

    recipe: Recipe
    directory: RunDirectory
    world: World
    log: MetricLog
    display: Display
    saver: Saver
    record: Record

    @property
    def stop(self) -> StopRequest:
        """Whether the run was asked to stop."""
        return self.world.stop

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes metrics and checkpoints and prints."""
        return self.world.ranks.rank == 0

    @property
    def evaluates_every(self) -> int:
        """Updates between two evaluations inside a stage; 0 for none, as in a run without engines."""
        return self.recipe.eval.every_updates if self.world.engines else 0

    def stage_store(self, cursor: Cursor, writer: int = 0) -> StageStore:
        """The cursor's stage on disk; each rank that generates into it is a `writer` of its own."""
        replay = self.recipe.learner.routing_replay
        origin = stage_origin(self.directory, self.record, cursor, self.recipe.schedule)
        return StageStore(self.directory.stage(cursor.stage), writer, origin, replay)

    @contextmanager
    def phase(self, phase: str, cursor: Cursor) -> Iterator[dict[str, float]]:
        """`log.phase` that heartbeats and the errors of lost ranks name; `tokens` are logged as rates, too."""
        with self.log.phase(phase, cursor.stage) as facts:
            began = self.log.clock()
            with named_phase(self.world.ranks, f"{phase} of stage {cursor.stage}"):
                yield facts
            seconds = self.log.clock() - began
            if facts.get("tokens") and seconds > 0:
                facts["tokens_per_second"] = facts["tokens"] / seconds
                facts["tokens_per_second_per_device"] = facts["tokens"] / seconds / self.world.ranks.world

    def title(self, cursor: Cursor) -> str:
        return f"stage {cursor.stage + 1}/{self.recipe.schedule.stages}"


@dataclass(frozen=True)
class Engines:
    """What a rank needs to sync all engines and to run its own."""

    bridge: Bridge
    """Carries the learner's weights to the engines."""
    generator: Generator | None
    """None on a rank that leads no engine."""
    joined: JoinedEngine | None = None
    """What this rank runs of an engine that a rank of another node leads."""

    @property
    def own(self) -> Engine | JoinedEngine | None:
        """What this rank runs of an engine."""
        return self.generator.engine if self.generator else self.joined

    @property
    def writer(self) -> int:
        """This rank's writer number in a stage store: its engine's number."""
        return self.generator.slot.number if self.generator else 0


@contextmanager
def open_run(
    recipe: Recipe, generates: bool = True, found: Problems | None = None, ahead: HostProcess | None = None
) -> Iterator[tuple[Run, Learner, Engines, Cursor]]:
    """Check what can be checked before anything starts, start engines and learner, resume at the newest checkpoint.

    On CPU both load in parallel. A GPU may not hold both: there the learner loads first and is then offloaded.
    With `generates` false there is neither engine nor verifier, and no problems are read; `found` are the problems if
    `check_run` has read them before, `ahead` the engine's process if it was started before (`engine.ahead`).
    Raises UserError before any process starts when the model, the data or the layout cannot work.
    """
    is_main = rank_of_environment() == 0
    if found is None:  # read on rank 0 of a run that generates
        recipe, found = check_run(recipe, generates=generates)
    cuda = runs_on_cuda(recipe)
    if cuda and generates:
        check_allocator()
    slot = slot_of_environment(recipe.engine, cuda) if generates else None
    tokenizer = load_tokenizer(recipe.model.directory)
    problems = prepare(recipe.data, recipe.reward, tokenizer, found) if is_main and generates else None
    with ExitStack() as stack:
        directory = stack.enter_context(open_directory(recipe)) if is_main else RunDirectory(recipe.run.dir)
        record = read_record(directory.path) if is_main else None
        standing = newest_cursor(directory.checkpoints)
        if is_main and found:
            record_data(directory.path, found)
        if record:
            origin = stage_origin(directory, record, standing, recipe.schedule)
            check_stage(directory.stage(standing.stage), origin)
            check_stage_held(directory, standing)
            if (stage := StageStore(directory.stage(standing.stage), 0, origin)).sealed:
                stage.remove_merged()
        tracked = open_log(
            directory.path,
            recipe.track,
            updates_done=standing.updates,
            run_id=record.id if record else "",
            config=recipe.model_dump(mode="json"),
            write=is_main,
        )
        log = stack.enter_context(tracked)
        display = stack.enter_context(open_display(show=is_main))
        stop = stack.enter_context(listening(is_main))
        with log.phase("start", 0), stop.at_once("the run was still starting, and what it has on disk is as it was"):
            leads = slot if slot and slot.leads_engine else None
            early = leads is not None and not cuda and recipe.engine.nodes == 1
            equipment = start(recipe, directory.logs, leads, stack, stop.heard, ahead) if leads and early else None
            with display.waiting(f"building the learner{', the engine loads' if equipment else ''}"):
                learner = build_learner(recipe)
            stack.enter_context(joined(learner.ranks))
            stack.enter_context(named_phase(learner.ranks))
            world = open_world(learner.ranks, recipe.run.collective_timeout_s, slot.engines if slot else 0, stop)
            stack.callback(stop.leave)
            record = world.broadcast(record)
            assert record is not None

            cursor = restore(learner, directory, record, log, display)
            saver = stack.enter_context(open_saver(learner, directory.checkpoints, recipe.checkpoint, record.id))
            bridge = bridge_of(learner)
            read = world.broadcast(problems)
            if slot and (cuda or recipe.engine.nodes > 1):
                for part in PARTS:
                    offload(learner, part)
                world.barrier()  # an engine spans several ranks' devices; all must have offloaded first
                equipment = start(recipe, directory.logs, leads, stack, stop.heard) if leads else None
            generator = Generator(*equipment, tokenizer, read) if equipment and read else None
            engines = Engines(bridge, generator, join(recipe, directory.logs, slot, stack) if slot else None)
            if slot and recipe.engine.nodes > 1:
                meet(world, engines.own)
            with display.waiting(f"waiting for the engine, see {directory.logs}") if generates else nullcontext():
                first_start(generator, world)
            hand_over(engines, learner, world)
        if cursor != Cursor():
            total = recipe.schedule.total_updates
            display.say(f"{directory.path} continues after {cursor.updates:,} of {total:,} updates")
        for note in problems.notes if problems else ():
            display.say(note)
        if note := sampling_note(recipe) if problems else "":
            display.say(note)
        run = Run(recipe, directory, world, log, display, saver, record)
        with telling_failures(learner.ranks):
            yield run, learner, engines, cursor


def restore(learner: Learner, directory: RunDirectory, record: Record, log: MetricLog, display: Display) -> Cursor:
    """Load the run's newest intact checkpoint into the learner; tells and logs what is damaged. Collective."""

    def tell(damage: str) -> None:
        display.say(damage)
        log.event("damaged_checkpoint", damage)

    return restore_newest(learner, directory.checkpoints, record, tell)


def bridge_of(learner: Learner) -> Bridge:
    """The bridge from this learner to the engines. Collective."""
    chunks = [policy(chunk) for chunk in learner.chunks]
    engine = learner.recipe.engine
    return build_bridge(
        chunks,
        learner.architecture,
        BUCKET_BYTES,
        engine.tensor,
        quantised=engine.quantization != "none",
        engine_nodes=engine.nodes,
        timeout_s=learner.recipe.run.collective_timeout_s,
    )


def hand_over(engines: Engines, learner: Learner, world: World) -> None:
    """After the engines' first start: give the devices to the learner until the first sync. Collective."""
    engine = learner.recipe.engine
    gives = runs_on_cuda(learner.recipe) or engine.between_stages == "sleep"
    if engines.generator and gives:
        engines.generator.engine.sleep()
    sleep_joined(world, engines.joined if gives else None, engine.nodes)
    reload(learner)


def first_start(generator: Generator | None, world: World) -> None:
    """Wait for every engine of the world; UserError on every rank when one of them does not start."""
    problem = first_start_problem(generator.engine) if generator else ""
    world.barrier()
    for rank, found in enumerate(world.gather(problem)):
        if found:
            where = f"rank {rank}: " if world.ranks.world > 1 else ""
            raise UserError(f"{where}{found}")
