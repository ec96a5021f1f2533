"""The metric log: writes its rows to metrics.jsonl and, if the recipe asks, their metrics to TensorBoard and Weights &
Biases."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mugrpo_megatron.errors import UserError, way_out
from mugrpo_megatron.files.durable import open_nofollow
from mugrpo_megatron.files.json_text import parse_json
from mugrpo_megatron.observe.environment import environment, invocation, missing_wandb_error
from mugrpo_megatron.observe.health import HealthMonitor
from mugrpo_megatron.observe.metrics import PHASES, Kind, Row, check_metrics, check_row, is_defined
from mugrpo_megatron.recipe.sections import TrackSection

Sink = Callable[[Row], None]

AXES = {"update": "update", "eval": "update", "stage": "stage", "phase": "stage", "engine": "time"}
"""Kind of a row -> the key that is the x axis of its curves in TensorBoard and Weights & Biases."""


@contextmanager
def _write_error_as_user_error(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into a UserError that names `path`, since the OSError of a full disk names no
    file."""
    try:
        yield
    except OSError as error:
        remedy = way_out(error, "correct this and run the same command again")
        reason = error.strerror or error
        raise UserError(f"{path} cannot be written ({reason}); all complete files are kept; {remedy}") from error


@contextmanager
def json_lines(path: Path) -> Iterator[Sink]:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Unbuffered, so that on a full disk the write of a row fails, and closing the file does not fail again.
    with open_nofollow(path, "a+b", buffering=0) as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)  # removes an incomplete row, which a crash may have left

        def sink(row: Row) -> None:
            if row["kind"] == "samples":
                return  # responses are not written here, since the stage's files hold them
            rest = memoryview((json.dumps(_finite(row)) + "\n").encode())
            with _write_error_as_user_error(path):
                while rest:
                    rest = rest[file.write(rest) :]

        yield sink


@contextmanager
def tensorboard(directory: Path, updates_done: int, later: Sequence[Row]) -> Iterator[Sink]:
    """Yield a sink that writes to TensorBoard.

    In a resumed run TensorBoard drops the points that earlier processes wrote from `updates_done` on. The rows `later`
    are written again, since the run will not repeat them.
    """
    from torch.utils.tensorboard import SummaryWriter  # half a second to import, and only the main rank needs it

    with _write_error_as_user_error(directory):
        writer = SummaryWriter(str(directory), purge_step=updates_done)

    def sink(row: Row) -> None:
        # `add_scalar` also raises an error that TensorBoard's writer thread had since the last row.
        with _write_error_as_user_error(directory):
            for name, value, step in _scalars(row):
                writer.add_scalar(name, value, step, walltime=row.get("time", row.get("end")))

    try:
        for row in later:
            sink(row)
        yield sink
    except BaseException:
        with suppress(OSError):  # an error of closing the file would hide the error of the block
            writer.close()
        raise
    with _write_error_as_user_error(directory):
        writer.close()


@contextmanager
def wandb_run(run_dir: Path, section: TrackSection, run_id: str, config: Mapping[str, Any]) -> Iterator[Sink]:
    """Yield a sink that writes to Weights & Biases, into the run `run_id` or, if that is empty, into a new one.

    `config` is the recipe, which is stored with the run. Raises UserError without the package wandb.
    """
    try:
        import wandb
    except ModuleNotFoundError:
        raise missing_wandb_error(section.wandb_project) from None
    resumed: dict[str, Any] = {"id": run_id, "resume": "allow"} if run_id else {}
    with wandb.init(
        project=section.wandb_project, name=run_dir.name, dir=str(run_dir), config=dict(config), **resumed
    ) as run:
        for kind, axis in AXES.items():
            run.define_metric(f"{kind}/*", step_metric=axis)

        def sink(row: Row) -> None:
            if row["kind"] == "samples":
                table = wandb.Table(
                    columns=list(row["samples"][0]), data=[list(sample.values()) for sample in row["samples"]]
                )
                run.log({"stage": row["stage"], "samples": table})
                return
            axes = {axis: row[axis] for axis in ("update", "stage", "time") if axis in row}
            run.log(axes | {name: value for name, value, _ in _scalars(row)})

        yield sink


def _scalars(row: Row) -> Iterator[tuple[str, float, int]]:
    """Yields (name, value, step) for each metric of a row, and for a phase only its seconds."""
    kind = row["kind"]
    if kind == "phase":
        yield f"phase/{row['phase']}", row["end"] - row["start"], row["stage"]
    elif kind == "engine":
        for name in (name for name in row if is_defined(kind, name)):
            yield f"engine/{row['engine']}/{name}", row[name], int(row["time"])
    elif kind in ("update", "stage", "eval"):
        step = row["update"] if "update" in row else row["stage"]
        for name in (name for name in row if is_defined(kind, name)):
            yield f"{kind}/{name}", row[name], step


def _finite(row: Row) -> Row:
    """Returns the row with None for NaN and infinities, which JSON cannot express; its `not_finite` has them as
    text."""
    values = {key: str(value) for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    return {**row, **dict.fromkeys(values), "not_finite": values} if values else row


FILE_NAME = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class MetricLog:
    """Makes the rows of metrics: checks the names in each row and passes the row to the sinks. Only the main rank has
    sinks."""

    sinks: tuple[Sink, ...] = ()
    clock: Callable[[], float] = time.time
    """Returns the Unix time that a new row gets."""
    evaluated: set[int] = field(default_factory=set)
    """Numbers of updates after which the run was evaluated, by this process or an earlier one."""

    def update(self, stage: int, update: int, age: int, metrics: Mapping[str, float]) -> None:
        """Log one optimizer update: the `update`-th of the run and the `age`-th of its stage, both counted from 0."""
        self._write("update", {"time": self.clock(), "stage": stage, "update": update, "age": age}, metrics)

    def stage(self, stage: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a stage's responses."""
        self._write("stage", {"time": self.clock(), "stage": stage}, metrics)

    def evaluation(self, stage: int, update: int, age: int, metrics: Mapping[str, float]) -> None:
        """Log an evaluation taken after `update` optimizer updates of the run, `age` of them in the stage."""
        self._write("eval", {"time": self.clock(), "stage": stage, "update": update, "age": age}, metrics)
        self.evaluated.add(update)

    def engine(self, stage: int, engine: int, time: float, metrics: Mapping[str, float]) -> None:
        """Log the load of an engine at `time` (Unix seconds), while it generated `stage`."""
        self._write("engine", {"time": time, "stage": stage, "engine": engine}, metrics)

    def samples(self, stage: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log some responses of a stage as a table (Weights & Biases only); all have the same keys."""
        for sink in self.sinks if samples else ():
            sink({"kind": "samples", "stage": stage, "samples": samples})

    def event(self, event: str, text: str) -> None:
        """Log an event: a short name and a sentence."""
        self._write("event", {"time": self.clock(), "event": event, "text": text}, {})

    @contextmanager
    def phase(self, phase: str, stage: int) -> Iterator[dict[str, float]]:
        """Time the block and log it as a phase, even if the block raises. Metrics that the block puts into the yielded
        dict are logged in the same row."""
        if phase not in PHASES:
            raise ValueError(f"undefined phase {phase}; define it in observe/metrics.py")
        metrics: dict[str, float] = {}
        start = self.clock()
        try:
            yield metrics
        finally:
            self._write("phase", {"phase": phase, "stage": stage, "start": start, "end": self.clock()}, metrics)

    def _write(self, kind: Kind, keys: Row, metrics: Mapping[str, float]) -> None:
        check_metrics(kind, metrics)
        row = {"kind": kind, **keys, **metrics}
        for sink in self.sinks:
            sink(row)


@contextmanager
def open_log(
    run_dir: Path,
    section: TrackSection,
    *,
    updates_done: int = 0,
    run_id: str = "",
    config: Mapping[str, Any] = MappingProxyType({}),
    write: bool = True,
    watch: HealthMonitor | None = None,
) -> Iterator[MetricLog]:
    """Open the run's metric log to append to it; `write` is true on the main rank alone.

    The TensorBoard curves of a resumed run continue at `updates_done`. Its Weights & Biases run is `run_id`, or a new
    one if that is empty. `watch` prints health warnings. Raises UserError if the log is damaged, or if the recipe asks
    for Weights & Biases and its package is not installed.
    """
    rows = read_rows(run_dir / FILE_NAME) if (run_dir / FILE_NAME).exists() else []
    evaluations = [row for row in rows if row["kind"] == "eval"]
    evaluated, clock = {row["update"] for row in evaluations}, steady_clock(rows)
    if not write:
        yield MetricLog((), clock, evaluated)
        return
    with ExitStack() as stack:
        sinks: list[Sink] = [stack.enter_context(json_lines(run_dir / FILE_NAME))]
        if section.tensorboard:
            # TensorBoard drops points from `updates_done` on. Two kinds of them are written again: evaluations made
            # after the checkpoint, which a resumed run does not repeat, and loads of engines, whose axis is seconds.
            later = [row for row in evaluations if row["update"] >= updates_done]
            later += [row for row in rows if row["kind"] == "engine"]
            sinks.append(stack.enter_context(tensorboard(run_dir / "tensorboard", updates_done, later)))
        if section.wandb_project is not None:
            sinks.append(stack.enter_context(wandb_run(run_dir, section, run_id, config)))
        if watch:
            for row in rows:
                watch.take(row)
            sinks.append(watch)
        for sink in sinks:
            sink({"kind": "process", "time": clock(), "environment": environment() | invocation()})
        yield MetricLog(tuple(sinks), clock, evaluated)


def steady_clock(rows: Sequence[Row]) -> Callable[[], float]:
    """Returns a clock of Unix time that starts after the run's last row and never goes back, even if the machine's
    does."""
    last = max((float(row["end"] if row["kind"] == "phase" else row["time"]) for row in rows), default=0.0)
    start = max(time.time(), last) - time.monotonic()
    return lambda: start + time.monotonic()


def read_rows(path: Path) -> list[Row]:
    """Returns the rows of a metrics.jsonl, without an incomplete last line. Every reader of the file calls this
    function.

    Raises UserError if the file is missing or unreadable, or if a line is not an object with the keys of its kind
    (`metrics.ROW_KEYS`).
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such file; name the directory of a run that has started") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check its permissions") from None
    rows = []
    # The last piece is left out: what follows the last newline is empty or an incomplete row.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = parse_json(line)
            check_row(row)
        except ValueError as error:  # UnicodeDecodeError is a ValueError
            raise UserError(f"{path}:{number}: not a row ({error}); delete the line to continue") from None
        rows.append(row)
    return rows
