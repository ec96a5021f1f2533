"""What steps of run_scripts/dev/bench/ten.py are predicted to measure, beside what they have measured.

python -m run_scripts.dev.bench.ten_table c.jsonl d.jsonl    # the table of README.md, with its last column
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from run_scripts.dev.bench.ten_learner import Row

OPEN = "–"
"""A figure that nothing has measured."""
TOLERANCE = 0.1
"""A figure that misses its prediction by a larger share is to be explained."""


@dataclass(frozen=True)
class Prediction:
    """A figure, the range that it is predicted to lie in, and how it follows from the rows of its step."""

    step: str
    figure: str
    low: float
    high: float
    of: Callable[[Sequence[Row]], float]
    """Raises LookupError where the rows that it needs are missing."""

    @property
    def predicted(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"

    def measured(self, rows: Sequence[Row]) -> str:
        """The figure of these rows, marked where it misses by more than TOLERANCE; OPEN without it."""
        try:
            value = self.of([row for row in rows if row.get("step") == self.step])
        except LookupError:
            return OPEN
        missed = not self.low * (1 - TOLERANCE) <= value <= self.high * (1 + TOLERANCE)
        return f"{value:.3g}{' (missed)' if missed else ''}"


def field(key: str, **wanted: object) -> Callable[[Sequence[Row]], float]:
    """`key` of the last row that has it and all of `wanted`."""

    def of(rows: Sequence[Row]) -> float:
        return [row[key] for row in rows if key in row and wanted.items() <= row.items()][-1]

    return of


def passed(rows: Sequence[Row]) -> float:
    """1 if the step passed, else 0."""
    return float([row["verdict"] for row in rows if "verdict" in row][-1] == "passed")


def clock(mu: int, *keys: str) -> Callable[[Sequence[Row]], float]:
    """Sum of seconds of the way `mu`."""
    return lambda rows: sum(field(key, mu=mu)(rows) for key in keys)


def a_stage(rows: Sequence[Row]) -> float:
    """Seconds of switch and sync in a stage of 4 updates."""
    return clock(4, "switch_s", "sync_s")(rows) / field("stages", mu=4)(rows)


def filled(rows: Sequence[Row]) -> float:
    """TB/s of the last cycle's fill."""
    return field("fill_bytes_per_s")(rows) / 1e12


def over_local(layers: str) -> Callable[[Sequence[Row]], float]:
    """Updates a second of a learner with `layers`, over those with local ones."""
    return lambda rows: field("update_s", layers="local")(rows) / field("update_s", layers=layers)(rows)


PREDICTIONS = (
    Prediction("clock", "16 updates in stages of µ = 4: generate, s", 29, 35, clock(4, "generate_s")),
    Prediction("clock", "of it tails: no prompt waits any more, s", 22, 28, clock(4, "tail_s")),
    Prediction("clock", "µ = 16: generate, s", 17, 19, clock(16, "generate_s")),
    Prediction("clock", "of it tails, s", 5.6, 7, clock(16, "tail_s")),
    Prediction("clock", "optimize, s", 14, 15, clock(4, "optimize_s")),
    Prediction("clock", "switch and sync, s a stage", 1.1, 1.1, a_stage),
    Prediction("clock", "µ = 4: all, s", 47, 54, clock(4, "total_s")),
    Prediction("clock", "µ = 16: all, s", 32, 35, clock(16, "total_s")),
    Prediction("clock", "their ratio", 1.45, 1.6, field("ratio")),
    Prediction("drift", "distance of engine and learner, syncs 1 to 15, nats", 0.02, 0.02, field("first_half_nats")),
    Prediction("drift", "syncs 16 to 30 over these", 0.95, 1.05, field("growth")),
    Prediction("resumed", "a killed and continued run has the weights of the unbroken one (1: yes)", 1, 1, passed),
    Prediction("fill", "bridge fill, TB/s of payload (was 0.15 to 0.31)", 0.5, 0.9, filled),
    Prediction("te", "wait for its compilation, which begins with the command, s", 0, 60, field("wait_s")),
    Prediction("te", "exit code of the tests with its layers", 0, 0, field("code")),
    Prediction("te", "its layers at 1.5B, updates/s over local ones", 0.95, 1.05, over_local("transformer_engine")),
    Prediction("te", "fp8 by blocks, over local ones", 1.0, 1.2, over_local("fp8_blockwise")),
    Prediction("asleep", "engines lost in 80 sleeps of four, as it is", 2, 8, field("failures", way="sleep")),
    Prediction("asleep", "engines lost with a backup of the weights", 0, 0, field("failures", way="backup")),
)  # fmt: skip


def table(rows: Sequence[Row], limits: dict[str, int]) -> list[str]:
    """Lines of a Markdown table; `limits` are seconds of a step."""
    lines = ["| Step | Limit, s | Figure | Predicted | Measured |", "| --- | --: | --- | --: | --: |"]
    last = ""
    for one in PREDICTIONS:
        step = f"`{one.step}` | {limits[one.step]}" if one.step != last else "|"
        lines.append(f"| {step} | {one.figure} | {one.predicted} | {one.measured(rows)} |")
        last = one.step
    return lines


def main() -> None:
    from run_scripts.dev.bench.ten import STEPS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    files = parser.parse_args().files
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    print("\n".join(table(rows, {name: step.limit_s for name, step in STEPS.items()})))


if __name__ == "__main__":
    main()
