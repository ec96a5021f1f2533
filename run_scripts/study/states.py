"""What the results say about each cell: not begun, begun, or finished with an accuracy."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any

from run_scripts.study.grid import Cell, Grid


class State(Enum):
    MISSING = "missing"
    BEGUN = "begun"
    DONE = "done"


def state_of(directory: Path, updates: int) -> State:
    """DONE once the run has finished all `updates`: then it is never run again."""
    summary = _summary(directory)
    if summary and summary["updates"] >= updates:
        return State.DONE
    return State.BEGUN if (directory / "metrics.jsonl").exists() else State.MISSING


def minutes_of(directory: Path) -> float:
    """Wall-clock of a finished cell while it was alive."""
    return float(json.loads((directory / "summary.json").read_text(encoding="utf-8"))["seconds"]["total"]) / 60


def accuracies(grid: Grid, out: Path) -> dict[Cell, float]:
    """Final held-out accuracy of every finished cell below `out`, of the grid's variants alone."""
    found = {}
    for name, variant in grid.variants().items():
        for directory in sorted((out / name).glob("lr*-seed*")):
            summary = _summary(directory)
            if summary and summary["updates"] >= variant.updates:
                found[cell_of(directory)] = float(summary["accuracy_after"])
    return found


def cell_of(directory: Path) -> Cell:
    """The cell that a directory is named for."""
    rate, seed = directory.name.removeprefix("lr").split("-seed")
    return Cell(directory.parent.name, float(rate), int(seed))


def _summary(directory: Path) -> dict[str, Any] | None:
    path = directory / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
