"""The metric log: rows survive crashes, odd numbers and resumes."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.log import FILE_NAME, open_log, read_rows
from mugrpo_megatron.recipe.sections import TrackSection
from tests.hostile.faults import Disk, disk, failing

PLAIN = TrackSection(tensorboard=False)


@pytest.fixture(autouse=True)
def _same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a log's first row says takes a while to find out."""
    monkeypatch.setattr("mugrpo_megatron.observe.log.environment", dict)
    monkeypatch.setattr("mugrpo_megatron.observe.log.invocation", dict)


@given(value=st.floats())
@settings(max_examples=40)
def test_every_float_is_written_as_json_and_named_when_it_is_not_finite(
    value: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = tmp_path_factory.mktemp("run")
    with open_log(run, PLAIN) as log:
        log.update(0, 0, 0, {"loss": value, "lr": 0.5})
        assert len(read_rows(run / FILE_NAME)) == 2, "on disk before the log is closed"
    _, row = (json.loads(line, parse_constant=pytest.fail) for line in (run / FILE_NAME).read_text().splitlines())
    if row["loss"] is None:
        assert row["not_finite"] == {"loss": str(value)}
    else:
        assert row["loss"] == value
        assert "not_finite" not in row
    assert row["lr"] == 0.5


@given(cut=st.integers(min_value=0, max_value=200))
@settings(max_examples=15)
def test_log_reopened_after_a_torn_write_keeps_every_whole_row(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = tmp_path_factory.mktemp("run")
    with open_log(run, PLAIN) as log:
        log.event("first", "kept while its line is whole")
    whole = (run / FILE_NAME).read_bytes()
    last_line = whole.splitlines()[-1]
    (run / FILE_NAME).write_bytes(whole + last_line[: cut % len(last_line)])
    assert len(read_rows(run / FILE_NAME)) == 2
    with open_log(run, PLAIN) as log:
        log.event("second", "after the resume")
    rows = read_rows(run / FILE_NAME)
    assert [row["kind"] for row in rows] == ["process", "event", "process", "event"]
    assert [row["event"] for row in rows if row["kind"] == "event"] == ["first", "second"]


def test_phase_is_logged_with_its_metrics_even_when_it_fails(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError

    with open_log(tmp_path, PLAIN) as log:
        with log.phase("generate", stage=1) as metrics:
            metrics["tokens"] = 12
        with pytest.raises(RuntimeError), log.phase("optimize", stage=1):
            fail()
    _, generate, optimize = read_rows(tmp_path / FILE_NAME)
    assert (generate["phase"], generate["stage"], generate["tokens"]) == ("generate", 1, 12)
    assert generate["start"] <= generate["end"] <= optimize["start"] <= optimize["end"]


def test_undefined_names_are_errors_on_every_rank(tmp_path: Path) -> None:
    with open_log(tmp_path, PLAIN, write=False) as log:
        with pytest.raises(ValueError, match="unheard_of"):
            log.stage(0, {"unheard_of": 1.0})
        with pytest.raises(ValueError, match="lunch"), log.phase("lunch", 0):
            pass
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_of_a_resumed_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    section = TrackSection()
    with open_log(tmp_path, section) as log:
        for update in range(5):
            log.update(0, update, update, {"loss": 1.0})
    with open_log(tmp_path, section, updates_done=3) as log:
        log.update(0, 3, 3, {"loss": 2.0})
        with log.phase("save", 0):
            pass
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("update/loss")] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0)]
    assert events.Scalars("phase/save")[0].step == 0


def test_a_full_disk_under_tensorboard_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread hears of it, and raises the same error at a later row and when it is closed."""
    monkeypatch.setattr(threading, "excepthook", lambda failure: None)
    with disk(tmp_path / "tensorboard", 1 << 13) as small:
        (small / "fill").write_bytes(bytes(4096))
        section = TrackSection(tensorboard=True)
        with pytest.raises(UserError, match=f"{small} cannot be written"), open_log(tmp_path, section) as log:  # noqa: PT012
            for update in range(2000):  # the thread is at most ten rows behind
                log.update(0, update, update, {"loss": 1.0})
    assert read_rows(tmp_path / FILE_NAME)[-1]["kind"] == "update"


def test_a_resumed_run_knows_what_it_has_evaluated_and_tensorboard_keeps_it(tmp_path: Path) -> None:
    """It resumes from a checkpoint before its last evaluations, which are neither repeated nor lost."""
    section = TrackSection()
    with open_log(tmp_path, section) as log:
        for update in (0, 3, 4):
            log.evaluation(0, update, update, {"accuracy/math500": update / 10, "accuracy/mean": update / 10})
        assert log.evaluated == {0, 3, 4}
    with open_log(tmp_path, section, updates_done=3) as log:
        assert log.evaluated == {0, 3, 4}
        log.evaluation(0, 6, 6, {"accuracy/math500": 0.6, "accuracy/mean": 0.6})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for tag in ("eval/accuracy/math500", "eval/accuracy/mean"):
        found = [(e.step, pytest.approx(e.value)) for e in events.Scalars(tag)]
        assert found == [(0, 0.0), (3, 0.3), (4, 0.4), (6, 0.6)]
    assert [row["update"] for row in read_rows(tmp_path / FILE_NAME) if row["kind"] == "eval"] == [0, 3, 4, 6]


def test_tensorboard_keeps_readings_of_engines_when_a_run_resumes(tmp_path: Path) -> None:
    """They are drawn over time, which TensorBoard takes for steps after the update at which the run resumes."""
    for began, updates_done in ((1_700_000_000.0, 0), (1_700_000_500.0, 8)):
        with open_log(tmp_path, TrackSection(), updates_done=updates_done) as log:
            log.engine(0, 0, began, {"running": 3.0})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("engine/0/running")] == [1_700_000_000, 1_700_000_500]


def test_a_tensorboard_or_wandb_that_cannot_be_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorboard").touch()
    monkeypatch.setitem(sys.modules, "wandb", None)
    for section, words in (
        (TrackSection(), "tensorboard cannot be written"),
        (TrackSection(tensorboard=False, wandb_project="p"), "pip install"),
    ):
        with pytest.raises(UserError, match=words), open_log(tmp_path, section):
            pass


def test_a_clock_that_goes_back_gives_no_negative_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour lost between two rows, another between a stop and its resume: no phase takes negative time."""
    now = time.time()
    for lost in (0, 3600, 7200):
        monkeypatch.setattr(time, "time", lambda lost=lost: now - lost)
        with open_log(tmp_path, PLAIN) as log, log.phase("optimize", 0):
            monkeypatch.setattr(time, "time", lambda lost=lost: now - lost - 3600)
            log.event("inside", "while the clock is wrong")
    times = [row["end"] if "end" in row else row["time"] for row in read_rows(tmp_path / FILE_NAME)]
    assert times == sorted(times)
    assert all(row["start"] <= row["end"] for row in read_rows(tmp_path / FILE_NAME) if row["kind"] == "phase")


class Curves:
    """A Weights & Biases run that remembers what it was given."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def __enter__(self) -> Curves:
        return self

    def __exit__(self, *_: object) -> None: ...

    def define_metric(self, *_: object, **__: object) -> None: ...

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], Curves]]:
    """What `wandb.init` was asked for, and the run that it gave."""
    asked: list[tuple[dict[str, Any], Curves]] = []

    def init(**how: Any) -> Curves:
        asked.append((how, Curves()))
        return asked[-1][1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Table=lambda columns, data: (columns, data)))
    return asked


def test_wandb_gets_the_runs_id_the_recipe_and_a_table_of_samples(
    tmp_path: Path, wandb: list[tuple[dict[str, Any], Curves]]
) -> None:
    """By its id a resumed run continues its curves, whatever its directory is called."""
    section = TrackSection(tensorboard=False, wandb_project="p")
    with open_log(tmp_path, section, run_id="0123", config={"optimizer": {"lr": 1e-6}}) as log:
        log.samples(2, [{"response": "4", "reward": 1.0}, {"response": "5", "reward": 0.0}])
        log.samples(2, [])
        log.engine(2, 1, 1_700_000_000.5, {"running": 7})
    ((how, run),) = wandb
    assert (how["id"], how["resume"], how["config"]) == ("0123", "allow", {"optimizer": {"lr": 1e-6}})
    table = (["response", "reward"], [["4", 1.0], ["5", 0.0]])
    assert {"stage": 2, "samples": table} in run.rows
    assert {"stage": 2, "time": 1_700_000_000.5, "engine/1/running": 7} in run.rows
    assert [row["kind"] for row in read_rows(tmp_path / FILE_NAME)] == ["process", "engine"]


def test_a_full_disk_is_one_sentence_and_leaves_whole_rows(tmp_path: Path) -> None:
    with open_log(tmp_path, PLAIN) as log:
        log.event("e", "t")
    before = read_rows(tmp_path / FILE_NAME)
    with (
        pytest.raises(UserError, match=r"metrics\.jsonl cannot be written \(No space"),
        failing(Disk("full", 1)),
        open_log(tmp_path, PLAIN) as log,
    ):
        log.event("e", "t")
    assert read_rows(tmp_path / FILE_NAME)[: len(before)] == before
    with open_log(tmp_path, PLAIN) as log:
        log.event("e", "t")
