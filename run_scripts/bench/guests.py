"""A larger teacher on the bundled task `chain`: KL to it and accuracy of runs with and without it, three seeds each.

    python -m run_scripts.bench.guests OUT_DIR [--docs docs]

Trains what OUT_DIR lacks: a student, a teacher of 2.3 times its parameters, and from the student a run of each seed and
kind, by run_scripts/recipes/chain_teacher.toml. The same command continues after Ctrl-C. Then writes guests.csv and
guests.svg of the runs that have ended.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from mugrpo_megatron.observe.log import read_rows
from run_scripts.svg import LIGHT, write_svg

RECIPE = Path(__file__).parents[1] / "recipes/chain_teacher.toml"
SEEDS = range(3)
SMALLER = {"sft.layers": 3, "sft.hidden": 96}
"""The student, which stops at the recipe's accuracy."""
LARGER = {"sft.target_accuracy": 0.88}
"""The teacher has the recipe's 4 layers of 128."""
KINDS: Mapping[str, Mapping[str, object]] = {
    "no teacher": {"objective.teacher_coef": 0.0},
    "teacher": {},
}
PATIENT = {"engine.request_timeout_s": 3600}
"""The machine may be busy with other work."""
COLORS = ("grey", "blue")
FIELDS = ("run", "repetition", "update", "kl_teacher", "accuracy")

Row = dict[str, str | float]


def mugrpo(command: str, settings: Mapping[str, object]) -> None:
    """Run `mugrpo COMMAND` with the recipe; CalledProcessError when it fails."""
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    subprocess.run([sys.executable, "-m", "mugrpo_megatron", command, str(RECIPE), *sets], check=True)


def run_of(out: Path, kind: str, seed: int) -> Path:
    return out / f"{kind.replace(' ', '-')}-{seed}"


def train_missing(out: Path) -> None:
    """The two models, then the runs, seed after seed; `mugrpo` keeps what is there."""
    student, teacher = out / "student", out / "larger-teacher"
    mugrpo("sft", {"sft.output": student, **SMALLER})
    mugrpo("sft", {"sft.output": teacher, **LARGER})
    models = {"model.path": student / "hf", "guest.solver.model": teacher / "hf", **PATIENT}
    for seed in SEEDS:
        for kind, settings in KINDS.items():
            run_dir = run_of(out, kind, seed)
            if not (run_dir / "summary.json").exists():
                mugrpo("train", {"run.dir": run_dir, "run.seed": seed, **models, **settings})


def collected(out: Path) -> list[Row]:
    """The rows of every run that has ended, kind by kind."""
    runs = [(kind, seed, run_of(out, kind, seed)) for kind in KINDS for seed in SEEDS]
    return [row for kind, seed, path in runs if (path / "summary.json").exists() for row in rows_of(kind, seed, path)]


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
    parser.add_argument("out", type=Path, help="where the models and the runs go")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where guests.csv and guests.svg go")
    parser.add_argument("--collect", action="store_true", help="train nothing")
    options = parser.parse_args()
    if not options.collect:
        train_missing(options.out.resolve())
    rows = collected(options.out)
    with (options.docs / "guests.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, options.docs / "guests.svg")


if __name__ == "__main__":
    main()
