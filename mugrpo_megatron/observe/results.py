"""The results of a run: held-out figures, summary.json, and the table at the end of training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from mugrpo_megatron.observe.health import health_warnings
from mugrpo_megatron.observe.metrics import PHASES
from mugrpo_megatron.observe.progress import duration, new_table
from mugrpo_megatron.observe.rundata import RunData, paper_seconds, read_run, seconds_by_phase
from mugrpo_megatron.recipe.scoring import MEAN

Row = Mapping[str, Any]

REPORTED_PHASES = ("sync", "generate", "score", "optimize")
"""Phases that `seconds` of summary.json always has, even with 0 seconds."""
FIGURES = ("before", "before_interval", "after", "interval")
"""Keys of a held-out set's figures in summary.json. For the mean over sets the measure precedes them, as in
`accuracy_before`."""


def measure_in(rows: Iterable[Row]) -> Literal["accuracy", "reward"]:
    """Returns what evaluation rows measure, `accuracy` or `reward`; `accuracy` without rows."""
    return "reward" if any(f"reward/{MEAN}" in row for row in rows) else "accuracy"


def sets_in(rows: Iterable[Row]) -> list[str]:
    """Returns the names of the held-out sets of the rows, in order."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [name for base, _, name in (key.partition("/") for key in keys) if base == "problems" and name]


def value_in(row: Row, name: str = MEAN) -> float | None:
    """Returns the accuracy or mean reward of a set in an evaluation row, by default the mean over sets; None if the row
    lacks it."""
    value = row.get(f"{measure_in([row])}/{name}")
    return None if value is None else float(value)


def interval_in(row: Row, name: str = MEAN) -> list[float] | None:
    """Returns the 95 % interval [low, high] of a set, by default of the mean over sets; None unless both ends are
    finite."""
    low, high = row.get(f"low/{name}"), row.get(f"high/{name}")
    return None if low is None or high is None else [float(low), float(high)]


def problems_in(row: Row) -> int:
    """Returns the number of problems in all held-out sets of an evaluation row."""
    return sum(int(row[f"problems/{name}"]) for name in sets_in([row]))


def format_value(value: float | None, measure: str) -> str:
    """Returns a held-out figure as text: accuracy in percent, mean reward as a number; "–" for None."""
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if measure == "accuracy" else f"{value:.4g}"


def format_difference(gain: float, measure: str) -> str:
    """Returns a gain as text: accuracy in percentage points, mean reward as a number."""
    return f"{100 * gain:+.1f} points" if measure == "accuracy" else f"{gain:+.4g}"


def format_interval(interval: Sequence[float] | None, measure: str) -> str:
    """Returns an interval as text; "" if there is no interval."""
    if interval is None:
        return ""
    low, high = (format_value(end, measure).removesuffix(" %") for end in interval)
    return f"{low} to {high}{' %' if measure == 'accuracy' else ''}"


def summarize(run_dir: Path) -> dict[str, Any]:
    """Returns the content of summary.json, computed from all rows of the run, also those before a resume.

    `accuracy_before` and `accuracy_after` are unweighted means over the held-out sets: before the run's first update,
    and at the last evaluation after it. They are None if there was no such evaluation. `accuracy_interval` is the 95 %
    interval [low, high] of `accuracy_after`, `accuracy_before_interval` that of `accuracy_before`. `sets` has for each
    set: before, before_interval, after, interval, problems, samples. `health_warnings` has name, text and remedy of
    each warning (observe/health.py). If the figures are mean rewards, `measure` is "reward" and keys begin with
    `reward_` instead of `accuracy_`.
    """
    return summary_of(read_run(run_dir))


def summary_of(run: RunData) -> dict[str, Any]:
    measure = measure_in(run.evals)
    seconds, clip_grad = seconds_by_phase(run.phases), run.setting("optimizer.clip_grad")
    phases = {name: seconds.get(name, 0.0) for name in PHASES if name in seconds or name in REPORTED_PHASES}
    return {
        "measure": measure,
        **{f"{measure}_{key}": value for key, value in _figures(run, MEAN).items()},
        "problems": problems_in(run.evals[-1]) if run.evals else None,
        "sets": {
            name: _figures(run, name) | {key: run.evals[-1].get(f"{key}/{name}") for key in ("problems", "samples")}
            for name in sets_in(run.evals)
        },
        "seconds": phases | {"total": run.seconds},
        "paper_seconds": paper_seconds(run.phases),
        "tokens": {
            "generated": round(sum(row.get("generated_tokens") or 0 for row in run.stages)),
            "trained": round(sum(row.get("tokens") or 0 for row in run.updates)),
        },
        "stages": len({row["stage"] for row in run.updates}),
        "updates": len(run.updates),
        "skipped_updates": sum(bool(row.get("skipped")) for row in run.updates),
        "seed": run.recipe.get("run", {}).get("seed", 0),
        "health_warnings": [asdict(entry) for entry in health_warnings(run.updates, run.stages, run.evals, clip_grad)],
    }


def _figures(run: RunData, name: str) -> dict[str, Any]:
    """Returns a set's figures before the first update and at the last evaluation after it. A figure is None if there
    was no such evaluation."""
    start = run.updates[0]["update"] if run.updates else 0
    before = next((row for row in run.evals if row["update"] <= start), {})
    after = next((row for row in reversed(run.evals) if row["update"] > start), {})
    values = (value_in(before, name), interval_in(before, name), value_in(after, name), interval_in(after, name))
    return dict(zip(FIGURES, values, strict=True))


def mean_of(summary: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of the mean over sets in a summary, under the same keys (FIGURES) as the figures of a set."""
    return {key: summary[f"{summary['measure']}_{key}"] for key in FIGURES}


def summary_table(summary: dict[str, Any]) -> Table:
    """Returns the table at the end of training: held-out figures, wall-clock by phase, tokens, rates."""
    seconds, tokens, measure = summary["seconds"], summary["tokens"], summary["measure"]
    table = new_table("Run summary", "", ">", "", show_header=False)
    mean, sets = mean_of(summary), summary["sets"]
    if mean["before"] is not None:
        table.add_row(f"{measure} before", *_figure(mean["before"], mean["before_interval"], measure))
    if mean["after"] is not None:
        table.add_row(f"{measure} after", *_figure(mean["after"], mean["interval"], measure))
        of = f" of {len(sets)} sets, unweighted" if len(sets) > 1 else ""
        table.add_row("gain", _gain(mean, measure), f"{summary['problems']:,} held-out problems{of}")
    table.add_section()
    for name, figures in sets.items() if len(sets) > 1 else ():
        before, after = (format_value(figures[when], measure) for when in ("before", "after"))
        size = f"{figures['problems']:,} problems x {figures['samples']}" if figures["problems"] else ""
        interval = format_interval(figures["interval"], measure)
        table.add_row(name, f"{before} → {after}", f"{interval}, {size}".strip(", "))
    table.add_section()
    for phase in (name for name in PHASES if seconds.get(name)):
        table.add_row(phase, duration(seconds[phase]), f"{100 * seconds[phase] / seconds['total']:.0f} %")
    between = seconds["total"] - sum(seconds.get(phase, 0.0) for phase in PHASES)
    if between >= 0.5:
        table.add_row("between phases", duration(between), f"{100 * between / seconds['total']:.0f} %")
    table.add_row("total", Text(duration(seconds["total"]), style="bold"), _steps(summary))
    for name, value in summary.get("paper_seconds", {}).items():
        table.add_row(name, duration(value), "as the paper counts")
    table.add_section()
    table.add_row("tokens generated", f"{tokens['generated']:,}", _rate(tokens["generated"], seconds["generate"]))
    table.add_row("tokens trained", f"{tokens['trained']:,}", _rate(tokens["trained"], seconds["optimize"]))
    return table


def _gain(mean: dict[str, Any], measure: str) -> Text:
    if mean["before"] is None:
        return Text("not known: not evaluated before the first update", style="dim")
    gain = mean["after"] - mean["before"]
    return Text(
        format_difference(gain, measure), style="bold green" if gain > 0 else "bold red" if gain < 0 else "bold"
    )


def _figure(value: float, interval: list[float] | None, measure: str) -> tuple[Text, str]:
    return Text(format_value(value, measure), style="bold"), format_interval(interval, measure)


def _steps(summary: dict[str, Any]) -> str:
    skipped = f", {summary['skipped_updates']} skipped" if summary.get("skipped_updates") else ""
    return f"{summary['updates']:,} updates in {summary['stages']:,} stages{skipped}, seed {summary['seed']}"


def _rate(tokens: float, seconds: float) -> str:
    return f"{tokens / seconds:,.0f} tokens/s" if seconds else ""
