"""The learner offers a stage, waits for it, seals it, and gives up when nothing comes; the test plays the engines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mugrpo_megatron.data.prepare import Problems
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import write_json
from mugrpo_megatron.phases import prefetch
from mugrpo_megatron.phases.prefetch import next_is_offered, offer_next_stage, take_offered_stage
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.batch import Share, begin, mark_share, standing
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.prefetch import stage_origin
from mugrpo_megatron.run.record import MARK
from mugrpo_megatron.run.stopping import Stopped, StopRequest
from mugrpo_megatron.samples import Problem, Sample
from mugrpo_megatron.stages.store import StageStore
from tests.phases.bare import bare_run

FOUND = Problems([Problem("p", "1 + 1", "2", "p")], [], [])
START, OFFERED = Cursor(1, 0, 4), Cursor(0, 2, 2)


class Played:
    """A run of three stages of four updates of one group, whose learner stands where the test says."""

    def __init__(self, tmp_path: Path, patience: float = 60.0, prefetch: int = 2) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
        self.recipe = Recipe.model_validate(
            {
                "run": {"dir": str(tmp_path / "run")},
                "model": {"path": str(tmp_path / "model")},
                "schedule": {
                    "stages": 3,
                    "updates_per_stage": 4,
                    "prefetch": prefetch,
                    "prefetch_patience_s": patience,
                },
                "rollout": {"prompts_per_update": 1, "responses_per_prompt": 2},
                "eval": {"every_stages": 0},
            }
        )
        record = begin(self.recipe, FOUND).record
        self.saved: list[Cursor] = []
        self.run: Any = bare_run(self.recipe, RunDirectory(self.recipe.run.dir))
        self.run.record = record
        self.run.saver = SimpleNamespace(wait=lambda: None, save=self.saved.append, save_hf=self._save_hf)
        self.run.world.broadcast = lambda value: value
        self.run.world.gather = lambda value: [value]
        self.run.phase = lambda *_: nullcontext({})
        self.run.stage_store = lambda cursor: StageStore(
            self.run.directory.stage(cursor.stage),
            0,
            stage_origin(self.run.directory, record, cursor, self.recipe.schedule),
        )
        self.bars: list[tuple[int, int]] = []
        self.run.display.bar = self._bar
        self.offers: list[tuple[Cursor, Cursor]] = []

    def _save_hf(self, like: Path, out: Path, notes: dict[str, Any]) -> None:
        out.mkdir(exist_ok=True)
        (out / "model.safetensors").write_bytes(b"later")
        write_json(out / MARK, notes[MARK])
        found = notes[MARK]
        self.offers.append((Cursor(**found["cursor"]), Cursor(**found["samples"])))

    @contextmanager
    def _bar(self, title: str, total: int, unit: str) -> Any:
        done = [0]
        yield SimpleNamespace(advance=lambda units: done.append(units))
        self.bars.append((sum(done), total))

    def offer(self, cursor: Cursor, resumed: bool = False) -> None:
        offer_next_stage(self.run, SimpleNamespace(updates=4), cursor, resumed)  # type: ignore[arg-type]

    def take(self, cursor: Cursor = START) -> None:
        take_offered_stage(self.run, None, None, cursor)  # type: ignore[arg-type]

    def generate(self, *groups: int) -> None:
        """As the one share of the offered stage."""
        where = standing(self.run.directory, self.recipe)
        stage = self.run.directory.stage(where.cursor.stage)
        mark_share(stage, Share(0, 1), where, FOUND)
        store = StageStore(stage, 1, where.origin)
        ids, logprobs = np.arange(3, dtype=np.int32), -np.arange(3, dtype=np.float32)
        for group in groups:
            store.append([Sample(group, "p", ids, ids, logprobs, float(r), where.version, "stop") for r in range(2)])
        store.flush()


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What happens, one after the other, while the learner sleeps between two looks."""
    left: list[Callable[[], None]] = []
    monkeypatch.setattr(prefetch, "time", SimpleNamespace(sleep=lambda _: left.pop(0)(), monotonic=lambda: -len(left)))
    return left


def test_the_next_stage_is_offered_once(tmp_path: Path) -> None:
    played = Played(tmp_path)
    for age in range(4):
        played.offer(Cursor(0, age, age), resumed=age == 0)
    assert played.offers == [(OFFERED, START)]
    for age in range(4):
        played.offer(Cursor(0, age, age), resumed=True)
    assert len(played.offers) == 1, "a run that repeats updates leaves the weights that have begun the stage"
    assert next_is_offered(played.run, START)
    (played.run.directory.hf / MARK).unlink()
    (played.run.directory.hf / "model.safetensors").unlink()
    played.run.directory.hf.rmdir()
    assert not next_is_offered(played.run, START)
    played.offer(Cursor(0, 3, 3))
    assert len(played.offers) == 1, "its place is past"
    played.offer(Cursor(0, 3, 3), resumed=True)
    assert played.offers[1:] == [(Cursor(0, 3, 3), START)], "as after a kill while hf/ was written"


def test_without_prefetch_nothing_is_offered_written_or_waited_for(tmp_path: Path) -> None:
    played = Played(tmp_path, prefetch=0)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for name in ("saver", "world", "phase", "stop"):
        setattr(played.run, name, None)  # none of them is touched
    for resumed in (False, True):
        for stage in range(3):
            for age in range(4):
                played.offer(Cursor(stage, age, 4 * stage + age), resumed)
            start = Cursor(stage, 0, 4 * stage)
            played.take(start)
            assert not next_is_offered(played.run, start)
    assert (played.offers, played.saved) == ([], [])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files


def test_the_learner_waits_for_the_groups_and_seals_them(tmp_path: Path, between: list[Callable[[], None]]) -> None:
    played = Played(tmp_path)
    played.take()
    assert not played.run.directory.stage(1).exists(), "no stage is offered, so the run generates it itself"
    played.offer(OFFERED)
    played.generate(0)
    between += [lambda: None, lambda: played.generate(2, 1), lambda: played.generate(3)]
    played.take()
    assert (between, played.bars) == ([], [(3, 3)])
    store = played.run.stage_store(START)
    assert store.sealed
    assert [sample.weight_version for sample in store.read_update(3)] == [2, 2]
    played.take()
    assert len(played.bars) == 1, "it is sealed"


def test_a_learner_that_nobody_serves_saves_and_ends(tmp_path: Path, between: list[Callable[[], None]]) -> None:
    played = Played(tmp_path, patience=2.0)
    played.offer(OFFERED)
    between += [lambda: None, lambda: None, lambda: played.generate(0), *[lambda: None] * 3]
    with pytest.raises(UserError, match=r"has 1 of 4 groups, and none has come for 2 s; the learner is saved: start"):
        played.take()
    assert (between, played.saved) == ([], [START])


def test_a_waiting_learner_stops_when_asked(tmp_path: Path, between: list[Callable[[], None]]) -> None:
    played = Played(tmp_path)
    played.offer(OFFERED)
    between.append(played.run.stop.ask)
    with pytest.raises(Stopped, match="stay there; the learner is saved at update 4"):
        played.take()
    assert played.saved == [START]
    played.run.stop = StopRequest()
    played.generate(0, 1, 2, 3)
    played.take()
    assert played.run.stage_store(START).sealed, "the same command continues it"


def test_shares_of_other_weights_are_not_sealed(tmp_path: Path, between: list[Callable[[], None]]) -> None:
    played = Played(tmp_path)
    played.offer(OFFERED)
    played.generate(0, 1, 2, 3)
    (played.run.directory.hf / "model.safetensors").write_bytes(b"other")
    with pytest.raises(UserError, match=r"other weights than .*; the learner is saved"):
        played.take()
    assert asdict(played.saved[0]) == asdict(START)
