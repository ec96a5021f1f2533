"""A page that compares runs: their curves in the same panels, their figures in one table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.evaluation.estimators import Measure
from mugrpo_megatron.extras.comparison import equal_time_section
from mugrpo_megatron.files.durable import check_output, read_checksummed_json, write_text
from mugrpo_megatron.observe.progress import duration
from mugrpo_megatron.observe.results import format_interval, format_value, mean_of, measure_in, sets_in, summary_of
from mugrpo_megatron.observe.rundata import RunData, read_run
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.scoring import MEAN
from mugrpo_megatron.report.curves import Chart, Series, has_values, over_updates, with_interval
from mugrpo_megatron.report.drawing import axis_of, buckets_of
from mugrpo_megatron.report.page import PageSection, is_page, render
from mugrpo_megatron.report.tables import flat_settings, setting_text

BRAND = "mu-GRPO comparison"
"""Text that marks a page as a comparison; a file without this text is not replaced."""
COLORS = ("blue", "orange", "teal", "violet", "red", "yellow", "magenta", "grey")
"""Colours of the runs; with more runs they repeat."""
LEFT_OUT = {"run.dir"}
"""Settings that labels and differences leave out."""

WHEN_EVALUATED = {"eval.every_stages", "eval.every_updates"}
"""Settings of `[eval]` that say after which updates a run is evaluated."""

SHARED = ("objective.name", "schedule.stages", "schedule.updates_per_stage", "data.train", "model.path", "optimizer.lr")
"""Settings that the page's head shows if they have the same value in all runs."""

PANELS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("reward_mean", "Training reward", "Mean reward of each update's responses.", {}),
    ("ess", "Effective sample size", "(Σr)² / TΣr² of the token ratios; 1 on policy.", {"format": "percent"}),
    ("ratio_neg_mean", "E[ρ | A < 0]",
     "Mean importance ratio of tokens with negative advantage; it stays at 1 in the paper's stable runs.",
     {"rule": 1.0, "rule_label": "on policy", "unit": "π/β"}),
    ("clipped_fraction", "Clipped", "Share of response tokens that the clip holds.", {"format": "percent"}),
    ("vetoed_fraction", "Vetoed", "Share of response tokens that the veto or a mask drops.", {"format": "percent"}),
    ("kl_k3", "KL from the sampling policy", "KL(β‖π) per token, k3.", {"unit": "nats"}),
    ("entropy", "Entropy", "Mean entropy of the next-token distribution at response tokens.", {"unit": "nats"}),
    ("grad_norm", "Gradient norm", "Global norm before clipping.", {"scale": "log"}),
)  # fmt: skip
"""Metric, title, explanation and looks of the panels over updates."""

ALIKE = {"data": "training data", "reward": "reward", "eval": "evaluation"}
"""Recipe section in which compared runs should agree -> what a warning calls it if they do not."""


def write_comparison(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write to `path` a page that compares the runs; returns `path`.

    Raises UserError when one is not a run directory, when two of them are the same, and when `path` exists and is not
    such a page.
    """
    if len({directory.resolve() for directory in run_dirs}) < len(run_dirs):
        raise UserError("the same run directory is named twice; name each run once")
    runs = [read_run(directory) for directory in run_dirs]
    check_output(
        path,
        f"--out {path}",
        own=is_page(path, BRAND),
        remedy="it is not a page that compares runs, so choose another path",
    )
    write_text(path.resolve(), comparison(runs))
    return path


def comparison(runs: Sequence[RunData]) -> str:
    labels = labels_of(runs)
    charts = [chart for chart in _charts(runs, labels) if chart.series]
    axes = {name: axis for number, run in enumerate(runs) for name, axis in _axes(number, run).items()}
    ends = equal_time_section.ends_of(runs) if len(runs) > 1 else None
    axes |= equal_time_section.axes(ends) if ends else {}
    equal = equal_time_section.section(ends, labels, COLORS) if ends else None
    drawing: dict[str, Any] = {
        "axes": axes,
        "boundaries": [],
        "begin": {},
        "heat": None,
        "end": {
            "u": max((run.updates[-1]["update"] + 1 for run in runs if run.updates), default=1),
            "t": max(run.seconds for run in runs),
        },
        "charts": [asdict(chart) for chart in [*(equal.charts if equal else ()), *charts]],
        "timeline": {"phases": [], "spans": [], "slices": []},
        "colors": {},
    }
    several = len(runs) > 2
    first, differing = _settings(runs[0].recipe), set(differences(runs))
    shared = {key: _value(first[key]) for key in SHARED if key in first and key not in differing}
    return render(
        name=" · ".join(run.path.resolve().name for run in runs) if len(runs) < 4 else f"{len(runs)} runs",
        brand=BRAND,
        progress=f"{len(runs)} runs",
        source=", ".join(str(run.path) for run in runs),
        drawing=drawing,
        facts=[{"before": f"{key} ", "value": value, "after": ""} for key, value in shared.items()],
        runs=_table(runs, labels),
        warnings=list(_warnings(runs)),
        sections=[
            *([equal] if equal else ()),
            PageSection("Curves", charts, "Whiskers are 95 % intervals." if several else ""),
        ],
    )


def labels_of(runs: Sequence[RunData]) -> list[str]:
    """A label for each run: its `distinguishing_settings`; the name of its directory if these are equal in any two."""
    labels = [", ".join(f"{_short(key)} {_setting(run, key)}" for key in distinguishing_settings(runs)) for run in runs]
    return labels if len(set(labels)) == len(labels) else [run.path.resolve().name for run in runs]


def _short(key: str) -> str:
    """A setting's name without its section; for a key called `name`, the section's name."""
    section, _, name = key.rpartition(".")
    return section if name == "name" else name


def distinguishing_settings(runs: Sequence[RunData]) -> list[str]:
    """The settings that label the runs. A setting of `differences` is chosen if it tells apart runs that the settings
    chosen before it do not."""
    chosen: list[str] = []

    def apart(keys: Sequence[str]) -> int:
        return len({tuple(_setting(run, key) for key in keys) for run in runs})

    for key in differences(runs):
        if apart([*chosen, key]) > apart(chosen):
            chosen.append(key)
    return chosen


def differences(runs: Sequence[RunData]) -> list[str]:
    """The settings in which the runs' recipes differ, as `section.key`, in the recipe's order."""
    flat = [_settings(run.recipe) for run in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    return [key for key in keys if key not in LEFT_OUT and len({str(settings.get(key)) for settings in flat}) > 1]


def _warnings(runs: Sequence[RunData]) -> Iterable[str]:
    """Yield a sentence for each difference between the runs that makes a comparison of their curves misleading."""
    differing = differences(runs)
    alike = WHEN_EVALUATED if _evaluated_after_the_same_updates(runs) else set()
    for section, name in ALIKE.items():
        if keys := [key for key in differing if key.startswith(f"{section}.") and key not in alike]:
            yield f"The runs differ in their {name} ({', '.join(keys)}): their curves do not compare one to one."
    for file, content, section, name in (
        ("data.json", "data", "data", "training problems"),
        ("user_files.json", "files", "reward", "reward functions"),
    ):
        differs = any(key.startswith(f"{section}.") for key in differing)
        if not differs and len(_contents(runs, file, content, section)) > 1:
            yield f"The runs' {name} differ, though their recipes name the same ones: a file was edited in between."
    if len({equal_time_section.evaluated_on(run) for run in runs if run.evals}) > 1:
        yield "The runs were evaluated on different problems: their held-out figures do not compare."


def _evaluated_after_the_same_updates(runs: Sequence[RunData]) -> bool:
    """Whether the runs were evaluated after the same updates, as far as all of them have come."""
    updates = [{int(row["update"]) for row in run.evals} for run in runs]
    last = min(max(found, default=0) for found in updates)
    return len({frozenset(update for update in found if update <= last) for found in updates}) == 1


def _contents(runs: Sequence[RunData], file: str, content: str, section: str) -> set[str]:
    """The distinct records, as JSON, of the runs' training problems or reward functions; runs without one are skipped.

    A record is the part of the value under `content` in the run's `file` that is about `section`.
    """
    records = set()
    for run in runs:
        with suppress(OSError, ValueError, AttributeError):
            record = read_checksummed_json(run.path / file, content)
            relevant = (
                record["train"] if section == "data" else {k: v for k, v in record.items() if k.startswith("reward.")}
            )
            records.add(json.dumps(relevant, sort_keys=True))
    return records


def _charts(runs: Sequence[RunData], labels: Sequence[str]) -> Iterable[Chart]:
    for measure in _measures(runs):  # accuracies and mean rewards have different scales, so a chart each
        yield Chart(
            f"held_out_{measure}",
            f"Held-out {measure}",
            "Unweighted mean of the held-out sets with its 95 % interval.",
            [curve for number, run in enumerate(runs) for curve in _evaluations(number, run, labels[number], measure)],
            format="percent" if measure == "accuracy" else "number",
            wide=True,
        )
    buckets = [buckets_of(run.updates)[1] for run in runs]
    for metric, title, explains, looks in PANELS:
        values = [over_updates(several, metric) for several in buckets]
        series = [
            Series(
                labels[number],
                COLORS[number % len(COLORS)],
                f"update{number}",
                curve_values,
                smooth=True,
                restarts=True,
            )
            for number, curve_values in enumerate(values)
            if has_values(curve_values)
        ]
        # Of several runs, a curve that is the same in all is left out, such as the rewards of branches of one stage.
        if len(runs) == 1 or any(curve_values != values[0] for curve_values in values):
            yield Chart(metric, title, explains, series, **looks)


def _measures(runs: Sequence[RunData]) -> list[Measure]:
    """Measures of the runs' held-out figures, in the order of the runs; `accuracy` if no run has any."""
    return list(dict.fromkeys(measure_in(run.evals) for run in runs if run.evals)) or ["accuracy"]


def _evaluations(number: int, run: RunData, label: str, measure: str) -> Iterable[Series]:
    names = sets_in(run.evals)
    name = MEAN if len(names) != 1 else names[0]
    curve = with_interval(run.evals, name, measure, label, COLORS[number % len(COLORS)], f"eval{number}")
    if has_values(curve.y):
        yield curve


def _axes(number: int, run: RunData) -> dict[str, dict[str, list[float]]]:
    firsts = [rows[0] for rows in buckets_of(run.updates)[1]]
    return {
        f"{name}{number}": {
            **axis_of([row["update"] for row in rows], [run.clock(row["time"]) for row in rows]),
            "starts": [row["update"] for row in run.stage_starts()],
        }
        for name, rows in (("update", firsts), ("eval", run.evals))
    }


def _table(runs: Sequence[RunData], labels: Sequence[str]) -> dict[str, Any]:
    """The table of the runs: for each a row with its colour, its distinguishing settings and its figures.

    `also` names the other settings in which the runs differ.
    """
    settings = distinguishing_settings(runs)
    rows = []
    for number, run in enumerate(runs):
        summary = summary_of(run)
        mean, measure, seconds = mean_of(summary), summary["measure"], summary["seconds"]
        after = format_value(mean["after"], measure)
        rows.append(
            {
                "color": COLORS[number % len(COLORS)],
                "name": run.path.resolve().name,
                "settings": [_setting(run, key) for key in settings],
                "figures": [
                    format_value(mean["before"], measure),
                    f"{after} ({format_interval(mean['interval'], measure)})" if mean["interval"] else after,
                    f"{summary['updates']:,}",
                    *(duration(seconds[name]) for name in ("total", "generate", "optimize")),
                ],
            }
        )
    measures = " or ".join(_measures(runs)).capitalize()
    figures = (f"{measures} before", "after (95 %)", "Updates", "Wall-clock", "generate", "optimize")
    also = [key for key in differences(runs) if key not in settings]
    return {"settings": settings, "figures": figures, "rows": rows, "also": ", ".join(also)}


def _settings(recipe: dict[str, Any]) -> dict[str, Any]:
    """Every setting by `section.key`; a setting that the run's version did not have gets its default."""
    return _defaults() | dict(flat_settings(recipe))


@cache
def _defaults() -> dict[str, Any]:
    return dict(flat_settings(Recipe().model_dump(mode="json")))


def _setting(run: RunData, key: str) -> str:
    return _value(_settings(run.recipe).get(key))


def _value(value: object) -> str:
    return "–" if value is None else setting_text(value)
