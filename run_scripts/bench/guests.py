"""KL to a teacher and accuracy of runs with and without it, as a table and a picture.

    python -m run_scripts.bench.guests OUT_DIR NAME=RUN_DIR...

Several runs of one NAME are repetitions. Writes OUT_DIR/guests.csv and OUT_DIR/guests.svg.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from mugrpo_megatron.observe.log import read_rows
from run_scripts.svg import LIGHT, write_svg

COLORS = ("grey", "blue", "orange", "green")
FIELDS = ("run", "repetition", "update", "kl_teacher", "accuracy")

Row = dict[str, str | float]


def rows_of(name: str, repetition: int, run_dir: Path) -> list[Row]:
    """For each evaluation of a run: its update, accuracy, and the KL of the stage that begins there, if one does."""
    log = read_rows(run_dir / "metrics.jsonl")
    kl = {row["stage"]: row["kl_teacher"] for row in log if row.get("phase") == "guest"}
    return [
        {
            "run": name,
            "repetition": repetition,
            "update": row["update"],
            "kl_teacher": kl.get(row["stage"], "") if row["age"] == 0 else "",
            "accuracy": row["accuracy/mean"],
        }
        for row in log
        if row["kind"] == "eval"
    ]


def draw(rows: list[Row], path: Path) -> None:
    """Means over repetitions, with every repetition as a thin line."""
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, field, title in zip(
        figure.subplots(1, 2),
        ("kl_teacher", "accuracy"),
        ("KL(policy | teacher), nats per token of a fresh stage", "held-out accuracy"),
        strict=True,
    ):
        _curves(axes, rows, field)
        axes.set_title(title, loc="left", fontsize=10, color=LIGHT["ink"])
        axes.set_xlabel("update", color=LIGHT["soft"])
        axes.tick_params(colors=LIGHT["soft"], length=0)
        axes.grid(axis="y", color=LIGHT["line"])
        axes.set_axisbelow(True)
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(side == "bottom")
            axes.spines[side].set_color(LIGHT["line"])
        if field == "accuracy":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        else:
            axes.set_ylim(bottom=0)
            axes.legend(facecolor=LIGHT["paper"], edgecolor="none", labelcolor=LIGHT["ink"], fontsize=9)
    write_svg(figure, path)


def _curves(axes: Axes, rows: list[Row], field: str) -> None:
    names = list(dict.fromkeys(str(row["run"]) for row in rows))
    for name, color in zip(names, COLORS, strict=False):
        values: dict[float, list[float]] = defaultdict(list)
        repetitions: dict[float, dict[float, float]] = defaultdict(dict)
        for row in rows:
            if row["run"] == name and row[field] != "":
                values[float(row["update"])].append(float(row[field]))
                repetitions[float(row["repetition"])][float(row["update"])] = float(row[field])
        for one in repetitions.values():
            axes.plot(list(one), list(one.values()), color=LIGHT[color], linewidth=0.7)
        places = sorted(values)
        means = [float(np.mean(values[place])) for place in places]
        axes.plot(places, means, color=LIGHT[color], linewidth=2, marker="o", markersize=4, label=name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN_DIR")
    options = parser.parse_args()
    rows: list[Row] = []
    seen: dict[str, int] = defaultdict(int)
    for one in options.runs:
        name, _, run_dir = one.partition("=")
        rows += rows_of(name, seen[name], Path(run_dir))
        seen[name] += 1
    with (options.out / "guests.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, options.out / "guests.svg")


if __name__ == "__main__":
    main()
