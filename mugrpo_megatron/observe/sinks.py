"""Where the rows of the metric log go: metrics.jsonl, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.metrics import defined
from mugrpo_megatron.recipe.sections import TrackSection

Row = dict[str, Any]
Sink = Callable[[Row], None]


AXES = {"update": "update", "eval": "update", "stage": "stage", "phase": "stage", "engine": "time"}
"""Kind of a row -> what its curves are drawn over."""


@contextmanager
def _refusal_told(path: Path) -> Iterator[None]:
    """Raise UserError when the block cannot write `path`; the errors of a full disk name no file."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); all complete files are kept; free some space and run the "
            "same command again"
        ) from error


@contextmanager
def json_lines(path: Path) -> Iterator[Sink]:
    path.parent.mkdir(parents=True, exist_ok=True)
    _drop_torn_line(path)
    with path.open("ab", buffering=0) as file:  # a full disk is told at its row, not again when the file is closed

        def sink(row: Row) -> None:
            if row["kind"] == "samples":
                return  # the stage has them
            left = memoryview((json.dumps(_finite(row)) + "\n").encode())
            with _refusal_told(path):
                while left:
                    left = left[file.write(left) :]

        yield sink


@contextmanager
def tensorboard(directory: Path, updates_done: int, kept: Sequence[Row]) -> Iterator[Sink]:
    """Curves that continue at `updates_done`: later points are dropped, except the rows `kept`."""
    from torch.utils.tensorboard import SummaryWriter  # half a second to import, and only the main rank needs it

    with _refusal_told(directory):
        writer = SummaryWriter(str(directory), purge_step=updates_done)

    def sink(row: Row) -> None:
        with _refusal_told(directory):  # what its thread was refused since the last row
            for name, value, step in _scalars(row):
                writer.add_scalar(name, value, step, walltime=row.get("time", row.get("end")))

    try:
        for row in kept:
            sink(row)
        yield sink
    except BaseException:
        with suppress(OSError):  # the block's own error matters more
            writer.close()
        raise
    with _refusal_told(directory):
        writer.close()


@contextmanager
def wandb_run(run_dir: Path, section: TrackSection, run_id: str, config: Mapping[str, Any]) -> Iterator[Sink]:
    """The run's curves in Weights & Biases; `config` is the recipe, by which runs are filtered there.

    Raises UserError when the package is not installed.
    """
    try:
        import wandb
    except ModuleNotFoundError:
        raise UserError(
            f'track.wandb_project = "{section.wandb_project}" needs the wandb package: '
            'pip install "mugrpo-megatron[wandb]", or remove the key'
        ) from None
    asked: dict[str, Any] = {"id": run_id, "resume": "allow"} if run_id else {}
    asked |= {"group": section.wandb_group} if section.wandb_group else {}
    asked |= {"tags": section.wandb_tags} if section.wandb_tags else {}
    with wandb.init(
        project=section.wandb_project, name=run_dir.name, dir=str(run_dir), config=dict(config), **asked
    ) as run:
        for kind, axis in AXES.items():
            run.define_metric(f"{kind}/*", step_metric=axis)

        def sink(row: Row) -> None:
            if row["kind"] == "samples":
                table = wandb.Table(
                    columns=list(row["samples"][0]), data=[list(one.values()) for one in row["samples"]]
                )
                run.log({"stage": row["stage"], "samples": table})
                return
            axes = {axis: row[axis] for axis in ("update", "stage", "time") if axis in row}
            run.log(axes | {name: value for name, value, _ in _scalars(row)})

        yield sink


def _scalars(row: Row) -> Iterator[tuple[str, float, int]]:
    """(name, value, step) of a row's metrics, and of a phase's seconds."""
    kind = row["kind"]
    if kind == "phase":
        yield f"phase/{row['phase']}", row["end"] - row["start"], row["stage"]
    elif kind == "engine":
        for name in (name for name in row if defined(kind, name)):
            yield f"engine/{row['engine']}/{name}", row[name], int(row["time"])
    elif kind in ("update", "stage", "eval"):
        step = row["update"] if "update" in row else row["stage"]
        for name in (name for name in row if defined(kind, name)):
            yield f"{kind}/{name}", row[name], step


def _finite(row: Row) -> Row:
    """The row with NaN and infinities, which JSON does not have, replaced by None and listed in `not_finite`."""
    bad = {key: str(value) for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    return {**row, **dict.fromkeys(bad), "not_finite": bad} if bad else row


def _drop_torn_line(path: Path) -> None:
    """Truncate a metrics.jsonl to its last complete line: a crash may have left half a row."""
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)
