"""Runs of one rank: one that shows and logs nothing, and one with a verifier and an engine that does as told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import numpy as np

from mugrpo_megatron.data.prompts import FittingPrompts
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.engine.launch import training_sampling
from mugrpo_megatron.engine.queue import LoadRecord
from mugrpo_megatron.engine.wire import SampledGroup, Sampling
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.observe.log import FILE_NAME, MetricLog, read_rows
from mugrpo_megatron.observe.progress import Display
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.run.checkpoints import Saver
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.engines import Engines
from mugrpo_megatron.run.leader import Leader
from mugrpo_megatron.run.record import RunRecord
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.stopping import AllStopped, StopRequest
from mugrpo_megatron.run.world import World
from mugrpo_megatron.samples import Problem, Prompt, Response
from mugrpo_megatron.weights.sync import WeightSync

TOKENIZER = build_arithmetic_tokenizer()


def response(text: str, version: int = 0, end: str = "stop") -> Response:
    ids = np.array(TOKENIZER.encode(text), dtype=np.int32)
    return Response(ids, np.zeros(len(ids), dtype=np.float32), end, version)


@dataclass
class Oracle:
    """An engine that gives these answers (prompt, n) -> responses; of the prompts that it takes the last one first."""

    answers: Callable[[Prompt, int], list[Response]]
    lives: list[int] = field(default_factory=list)
    """Groups that it finishes before it dies, one number for each of its lives; then it lives on."""
    running: bool = True
    asked: list[tuple[str, int, Sampling]] = field(default_factory=list)
    answering: Callable[[], None] = lambda: None
    memory: float = 0.0
    load_record: LoadRecord = field(default_factory=LoadRecord)

    @property
    def finished(self) -> int:
        """Groups, over all of its lives."""
        return len(self.asked)

    def generate_from(
        self, take: Callable[[int, int], list[Prompt]], n: int, sampling: Sampling
    ) -> Iterator[SampledGroup]:
        while prompts := take(0, 4):
            for prompt in reversed(prompts):
                if self.lives and not self.lives[0]:
                    self.lives.pop(0)
                    self.running = False
                    raise EngineFailure("it died")
                self.lives[:1] = [left - 1 for left in self.lives[:1]]
                self.asked.append((prompt.problem.source, n, sampling))
                self.answering()
                yield SampledGroup(prompt, self.answers(prompt, n))


@dataclass
class Stand:
    """The run and its engine."""

    run: Run
    engines: Engines
    engine: Oracle
    syncs: list[int] = field(default_factory=list)
    """Versions of the weights that went to the engine, where a test notes them."""

    @property
    def leader(self) -> Leader:
        assert self.engines.leader
        return self.engines.leader

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in read_rows(self.run.directory.path / FILE_NAME) if row["kind"] == kind]


def standing(
    path: Path, log: MetricLog, recipe: Recipe, engine: Oracle, verifier: Verifier, problems: Sequence[Problem]
) -> Stand:
    """In `path`; the problems are those of training and the held-out ones."""
    fitting = FittingPrompts(list(problems), [[1]] * len(problems), 0)
    prepared: Any = SimpleNamespace(train=fitting, held_out=fitting)
    slot: Any = SimpleNamespace(number=0)
    how = training_sampling(recipe.rollout, recipe.run, TOKENIZER, None)
    leader = Leader(
        engine=cast(Any, engine), slot=slot, verifier=verifier, tokenizer=TOKENIZER, problems=prepared, sampling=how
    )
    world = World(engines=1)
    run = Run(recipe, RunDirectory(path), world, log, Display(None, None), RunRecord("r"), cast(Saver, "saver"))
    return Stand(run, Engines(world, recipe.engine, cast(WeightSync, None), leader), engine)


def bare_run(recipe: Recipe, directory: RunDirectory) -> Any:
    return SimpleNamespace(
        recipe=recipe,
        directory=directory,
        record=RunRecord("r"),
        is_main=True,
        phase=lambda *_: nullcontext(),
        display=SimpleNamespace(bar=lambda *_: nullcontext(SimpleNamespace(advance=lambda: None))),
        world=SimpleNamespace(barrier=lambda: None, any_rank=lambda flag: flag),
        stop=StopRequest(),
        save_and_stop=_save_and_stop,
    )


def _save_and_stop(cursor: Cursor, also: str = "") -> NoReturn:
    raise AllStopped(also, 0, cursor)
