"""Makes the table and the picture of docs/study/equal-time.md: the study's methods compared at equal time.

python -m run_scripts.dev.equal_time
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mugrpo_megatron.evaluation.estimators import mean_interval
from mugrpo_megatron.extras.comparison.equal_time import Curve, difference
from mugrpo_megatron.extras.plan.schedules import GRPO_UPDATES
from run_scripts.dev.part_eight.results import GRPO, read_results
from run_scripts.dev.part_eight.rows import CELLS, CURVES, read_rows
from run_scripts.dev.study import FEWEST, STUDY, interval, with_cells
from run_scripts.dev.svg import LIGHT, plain_axes, write_svg

PAGE, PICTURE = STUDY / "equal-time.md", STUDY / "equal-time.svg"
LATER = (1.53, 2.25)
"""The paper's mean and largest speed-up (Table 1): columns beside equal updates and the planned speed-up."""
LADDER = np.geomspace(1, 6, 181)
"""Speed-ups at which the picture is drawn and a break-even is searched."""
PLANNED = {16: 1.262, 32: 1.302, 64: 1.323, 128: 1.334, 256: 1.340}
"""µ -> mean planned speed-up of the paper's five recipes (docs/study/part-eight.md)."""
COLORS = ("red", "orange", "green", "blue", "violet", "ink")


@dataclass(frozen=True, slots=True)
class Way:
    """A method of the study, its cells, and the cells of GRPO with the same seeds. (A way is an objective with a
    schedule.)"""

    setting: str
    title: str
    mu: int
    cells: tuple[str, str, float]
    """Folder of docs/study, method, rate."""
    grpo: tuple[str, str, float]


SMALL, LARGE, MAIN = "small headroom", "large headroom", "512 updates, greedy"
EIGHT = "part eight, large"
_SMALL, _LARGE, _MAIN = ("seven_small", "grpo", 4e-5), ("seven_large", "grpo", 8e-5), ("", "grpo", 4e-5)
WAYS = (
    Way(SMALL, "1 stage, veto", 256, ("seven_small", "stage_veto", 2e-5), _SMALL),
    Way(SMALL, "1 stage, prefix", 256, ("seven_small", "stage_product", 2e-5), _SMALL),
    Way(SMALL, "4 stages, prefix", 64, ("seven_small", "four_product", 4e-5), _SMALL),
    Way(LARGE, "1 stage, veto", 256, ("seven_large", "stage_veto", 2e-5), _LARGE),
    Way(LARGE, "1 stage, prefix", 256, ("seven_large", "stage_product", 2e-5), _LARGE),
    Way(LARGE, "4 stages, veto", 64, ("seven_large", "four_veto", 2e-5), _LARGE),
    Way(LARGE, "8 stages, veto", 32, ("six_large", "eight", 2e-5), _LARGE),
    Way(LARGE, "4 stages, prefix", 64, ("seven_large", "four_product", 4e-5), _LARGE),
    Way(MAIN, "1 stage, veto", 512, ("", "veto", 1e-5), _MAIN),
    Way(MAIN, "8 stages, veto", 64, ("", "eight", 4e-5), _MAIN),
)
Curves = Mapping[Any, Curve]
"""Seed, in part eight with the warm start, -> the cell's curve over updates."""


def curves_of(folder: str, method: str, rate: float) -> Curves:
    """Seed -> curve of a method's first draw, without tuning seeds. A cell that equals another one has the other's
    curve."""
    twins = {
        int(row["seed"]): row["same_as"] or method
        for row in rows_of(folder, CELLS)
        if (row["method"], float(row["rate"]), row["repeat"]) == (method, rate, "0") and int(row["seed"]) < 100
    }
    points: dict[int, dict[float, float]] = defaultdict(dict)
    for row in rows_of(folder, CURVES):
        seed = int(row["seed"])
        if row["accuracy"] and (row["method"], float(row["rate"]), row["repeat"]) == (twins.get(seed), rate, "0"):
            points[seed][float(row["update"])] = float(row["accuracy"])
    return {seed: as_curve(curve) for seed, curve in points.items()}


def rows_of(folder: str, name: str) -> list[dict[str, str]]:
    return read_rows(STUDY / folder / name)


def as_curve(points: Mapping[Any, float]) -> Curve:
    at = sorted(points)
    return Curve(np.array(at), np.array([points[update] for update in at]), np.zeros(len(at)))


def gaps(way: Curves, grpo: Curves, speed_up: float) -> list[float]:
    """The gain over GRPO at equal time in points, for each seed: A(U) of the way minus A(U / speed-up) of GRPO."""
    seeds = sorted(way.keys() & grpo.keys())
    return [100 * difference(way[seed], way[seed].end, grpo[seed], way[seed].end / speed_up).value for seed in seeds]


def break_even(way: Curves, grpo: Curves) -> tuple[str, str, str]:
    """The speed-up at which the mean gap is 0, and the two at which an end of its 95 % interval is 0."""
    intervals = [mean_interval(gaps(way, grpo, speed_up)) for speed_up in LADDER]
    ends = [[value.value for value in intervals], [v.high for v in intervals], [v.low for v in intervals]]
    mean, low, high = (_first_above(end) for end in ends)
    return mean, low, high


def _first_above(values: Sequence[float]) -> str:
    """The least speed-up of the ladder at which the value is at least 0, as text."""
    found = next((speed_up for speed_up, gap in zip(LADDER, values, strict=True) if gap >= 0), None)
    return "above 6" if found is None else f"{found:.1f}"


@dataclass(frozen=True, slots=True)
class Compared:
    """A method at its rate, beside GRPO on the same warm starts."""

    setting: str
    title: str
    mu: int
    planned: float | None
    """Its planned speed-up over GRPO; None where none is planned."""
    own: Curves
    grpo: Curves

    @property
    def as_slow(self) -> bool:
        """Whether it has GRPO's own schedule, so that equal updates take equal time."""
        return self.mu == GRPO_UPDATES


def compared() -> list[Compared]:
    """The methods of part eight that have enough test cells, in the order of its grid, then those of older parts."""
    results, found = read_results(), []
    curves = {
        name: {start: as_curve(curve) for start, curve in results.tests(name).items()} for name in results.grid.ways
    }
    grpo = curves.pop(GRPO)
    for name, own in curves.items():
        if len(own.keys() & grpo.keys()) >= FEWEST:
            way = results.grid.ways[name]
            title = way.title.removesuffix(f", µ={way.mu}")
            found.append(Compared(EIGHT, title, way.mu, way.k, own, grpo))
    for older in WAYS:
        pair = curves_of(*older.cells), curves_of(*older.grpo)
        found.append(Compared(older.setting, older.title, older.mu, PLANNED.get(older.mu), *pair))
    return found


def table() -> str:
    """The table of all methods, with their gain over GRPO at equal time in points."""
    lines = [
        "| Setting | Method | µ | Seeds | k = 1 | planned k | at planned k | break-even k | "
        f"{' | '.join(f'k = {speed_up:g}' for speed_up in LATER)} |",
        "| --- | --- | --: | --: |" + " --: |" * (4 + len(LATER)),
    ]
    for one in compared():
        start = interval(gaps(one.own, one.grpo, 1.0))
        even, later = "–", ["–"] * len(LATER)
        if not one.as_slow:
            even = "{} ({} to {})".format(*break_even(one.own, one.grpo))
            later = [interval(gaps(one.own, one.grpo, speed_up)) for speed_up in LATER]
        there = f"{one.planned:.2f} | {interval(gaps(one.own, one.grpo, one.planned))}" if one.planned else "– | –"
        lines.append(
            f"| {one.setting} | {one.title} | {one.mu} | {len(one.own.keys() & one.grpo.keys())} | {start} | {there} | "
            f"{even} | {' | '.join(later)} |"
        )
    return "\n".join(lines).replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def draw(path: Path) -> Path:
    """Draw the gain over GRPO against the speed-up, a panel for each setting; a cross is a method's own planned
    speed-up. A method with GRPO's schedule is a point with its interval, just left of 1."""
    panels: dict[str, list[Compared]] = defaultdict(list)
    for one in compared():
        panels[one.setting].append(one)
    figure = Figure(figsize=(4.0 * len(panels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (setting, methods) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels.items(), strict=True):
        plain_axes(axes)
        axes.axhline(0, color=LIGHT["soft"], linewidth=1)
        for number, one in enumerate(methods):
            color, dashes = LIGHT[COLORS[number % len(COLORS)]], "-" if number < len(COLORS) else "--"
            label = f"µ={one.mu}: {one.title}"
            if one.as_slow:
                there = mean_interval(gaps(one.own, one.grpo, 1.0))
                error = [[there.value - there.low], [there.high - there.value]]
                axes.errorbar(1 - 0.03 * (number + 1), there.value, error, fmt="x", color=color, label=label)
                continue
            shown = LADDER[LADDER <= 3]
            intervals = [mean_interval(gaps(one.own, one.grpo, speed_up)) for speed_up in shown]
            axes.plot(shown, [value.value for value in intervals], dashes, color=color, linewidth=1.6, label=label)
            axes.fill_between(
                shown, [v.low for v in intervals], [v.high for v in intervals], color=color, alpha=0.1, linewidth=0
            )
            if one.planned:
                axes.plot(one.planned, np.mean(gaps(one.own, one.grpo, one.planned)), "x", color=color, markersize=7)
        axes.set_title(setting, loc="left", color=LIGHT["ink"], fontsize=11)
        axes.set_xlabel("k: GRPO's time / the method's, equal updates", color=LIGHT["soft"])
        low, high = axes.get_ylim()
        axes.set_ylim(low - 0.05 * len(methods) * (high - low), high)  # room for the legend
        axes.legend(fontsize=7, frameon=False, loc="lower right")
    figure.supylabel("points above GRPO at equal time; shaded: 95 % by seed", color=LIGHT["soft"], fontsize=10)
    return write_svg(figure, path)


if __name__ == "__main__":
    PAGE.write_text(with_cells(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")
    print(f"{PAGE}, {draw(PICTURE)}")
