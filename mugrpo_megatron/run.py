"""The parts of a run: opened so that their start-up overlaps, closed whatever happens."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.checkpoints import Saver, newest_cursor, open_saver, restore_newest
from mugrpo_megatron.data.ready import Ready, ready
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.errors import EngineFailure, UserError
from mugrpo_megatron.learner.build import build_learner
from mugrpo_megatron.learner.groups import shutdown
from mugrpo_megatron.learner.model import policy
from mugrpo_megatron.learner.state import Learner
from mugrpo_megatron.observe.log import MetricLog, open_log
from mugrpo_megatron.observe.progress import Display, open_display
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.checks import check_layout, read_model_config
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.rollout.engine import Engine
from mugrpo_megatron.rollout.store import StageStore
from mugrpo_megatron.rundir import RunDirectory, open_directory
from mugrpo_megatron.schedule import Cursor
from mugrpo_megatron.stopping import StopRequest, listening_for_sigterm
from mugrpo_megatron.weights.sync import Bridge, build_bridge

GENERATION_TIMEOUT = timedelta(days=7)


@dataclass
class Generator:
    """What only the rank that leads the engine has."""

    engine: Engine
    verifier: Verifier
    tokenizer: PreTrainedTokenizerBase
    problems: Ready
    failures_in_a_row: int = 0
    """Engine failures without a finished group between them."""


@dataclass(frozen=True)
class Run:
    """Everything that the phases of a run work with."""

    recipe: Recipe
    directory: RunDirectory
    learner: Learner
    bridge: Bridge
    generator: Generator | None
    """None on ranks that lead no engine."""
    cursor: Cursor
    """Where the newest complete checkpoint stands."""
    saver: Saver
    log: MetricLog
    display: Display
    stop: StopRequest
    patience: dist.ProcessGroup | None
    """All ranks, with a timeout long enough to wait while the leader generates; None in a world of one."""

    @property
    def leads(self) -> bool:
        """True on the one rank that writes files and talks."""
        return self.learner.ranks.rank == 0

    def stage_store(self, stage: int) -> StageStore:
        return StageStore(self.directory.stage(stage))

    def wait_for_leader(self) -> None:
        """All ranks leave together; a rank that dies is noticed by torchrun, which ends the others."""
        if self.patience:
            dist.barrier(group=self.patience)

    def any_rank(self, *flags: bool) -> list[bool]:
        """For each flag whether it is set on any rank: the same answers everywhere. Collective."""
        found = torch.tensor(flags, dtype=torch.int32)
        if self.patience:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.patience)
        return [bool(flag) for flag in found]

    def title(self, cursor: Cursor) -> str:
        return f"stage {cursor.stage + 1}/{self.recipe.schedule.stages}"


def rank_of_environment() -> int:
    """This process's rank as torchrun tells it, before any process group exists; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def open_run(recipe: Recipe, generates: bool = True) -> Iterator[Run]:
    """Check everything that can be checked on paper, start engine and learner side by side, resume.

    With `generates` false there is neither engine nor verifier, and no problems are read.
    Raises UserError before any process starts when the model, the data or the layout cannot work.
    """
    leads = rank_of_environment() == 0
    check_layout(recipe, read_model_config(recipe.model.path), int(os.environ.get("WORLD_SIZE", "1")))
    tokenizer = load_tokenizer(recipe.model.path)
    problems = ready(recipe.data, recipe.reward, tokenizer) if leads and generates else None
    with ExitStack() as stack:
        directory = stack.enter_context(open_directory(recipe)) if leads else RunDirectory(recipe.run.dir)
        done = newest_cursor(directory.checkpoints).updates_done(recipe.schedule)
        log = stack.enter_context(open_log(directory.path, recipe.track, updates_done=done, write=leads))
        display = stack.enter_context(open_display(show=leads))
        stop = stack.enter_context(listening_for_sigterm())
        with log.phase("start", 0):
            generator = _open_generator(recipe, directory, tokenizer, problems, stack) if problems else None
            learner = build_learner(recipe)
            stack.callback(shutdown)
            cursor = restore_newest(learner, directory.checkpoints, display.say if leads else lambda damage: None)
            saver = stack.enter_context(open_saver(learner, directory.checkpoints, recipe.checkpoint))
            chunks = [policy(chunk) for chunk in learner.chunks]
            bridge = build_bridge(chunks, learner.architecture, recipe.engine.bucket_bytes, recipe.engine.tensor)
            if generator:
                _wait_for_first_start(generator.engine, directory)
                if recipe.engine.between_stages == "sleep":
                    generator.engine.sleep()  # its share of the device is the learner's until the first sync
        for note in problems.notes if problems else ():
            display.say(note)
        patience = dist.new_group(backend="gloo", timeout=GENERATION_TIMEOUT) if learner.ranks.world > 1 else None
        yield Run(recipe, directory, learner, bridge, generator, cursor, saver, log, display, stop, patience)


def _open_generator(
    recipe: Recipe, directory: RunDirectory, tokenizer: PreTrainedTokenizerBase, problems: Ready, stack: ExitStack
) -> Generator:
    engine = Engine.start(recipe, recipe.model.path, directory.logs / "engine.log")
    stack.callback(engine.stop)
    verifier = stack.enter_context(Verifier(recipe.reward))
    return Generator(engine, verifier, tokenizer, problems)


def _wait_for_first_start(engine: Engine, directory: RunDirectory) -> None:
    """An engine that never came up is a matter of the recipe or the machine, not of the run: UserError."""
    try:
        engine.wait_ready()
    except EngineFailure as failure:
        errors = [line.strip() for line in str(failure).splitlines() if re.search(r"\w(Error|Exception): ", line)]
        cause = errors[-1] if errors else str(failure).splitlines()[0]
        raise UserError(
            f"the engine does not start ({cause}): check the recipe's engine section; "
            f"all that it said is in {directory.logs}/engine.log"
        ) from None
