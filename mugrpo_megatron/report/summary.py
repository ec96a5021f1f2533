"""The summary of a run: summary.json, and the table that training ends with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import ROUNDED
from rich.table import Table
from rich.text import Text

from mugrpo_megatron.observe.log import Row
from mugrpo_megatron.observe.metrics import PHASES
from mugrpo_megatron.observe.paper import paper_seconds
from mugrpo_megatron.observe.progress import duration
from mugrpo_megatron.recipe.scoring import MEAN
from mugrpo_megatron.report.evaluations import (
    between,
    difference,
    interval_in,
    measure_in,
    problems_in,
    sets_in,
    shown,
    value_in,
)
from mugrpo_megatron.report.rundata import RunData, read_run, seconds_by_phase

REPORTED_PHASES = ("sync", "generate", "score", "optimize")
"""Phases that `seconds` always has, even with 0 seconds."""
FIGURES = ("before", "before_interval", "after", "interval")
"""Figures of each held-out set, and of the mean of the sets."""


def summarize(run_dir: Path) -> dict[str, Any]:
    """The content of summary.json, from all rows that the run has logged, resumes included.

    `accuracy_before` and `accuracy_after` are unweighted means over the held-out sets, before the run's first update
    and at its last evaluation; None where there was none.
    `accuracy_interval` is the 95 % interval [low, high] of `accuracy_after`, `accuracy_before_interval` that of
    `accuracy_before`. `sets` has the same of each set: before, before_interval, after, interval, problems, samples.
    Where the figures are mean rewards, `measure` is "reward" and keys begin with `reward_` instead of `accuracy_`.
    """
    return summary_of(read_run(run_dir))


def summary_of(run: RunData) -> dict[str, Any]:
    """`summarize` for a run that has been read."""
    measure = measure_in(run.evals)
    taken = seconds_by_phase(run.phases)
    phases = {name: taken.get(name, 0.0) for name in PHASES if name in taken or name in REPORTED_PHASES}
    return {
        "measure": measure,
        **{f"{measure}_{key}": value for key, value in _gain(run.evals, run.updates, MEAN).items()},
        "problems": problems_in(run.evals[-1]) if run.evals else None,
        "sets": {name: _gain(run.evals, run.updates, name) | _size(run.evals[-1], name) for name in sets_in(run.evals)},
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
    }


def _gain(evals: Sequence[Row], updates: Sequence[Row], name: str) -> dict[str, Any]:
    """A set's figures, or the mean's, before the first update, if they were measured, and at the last evaluation."""
    if not evals:
        return dict.fromkeys(FIGURES)
    first, last = evals[0], evals[-1]
    known = not updates or first["update"] <= updates[0]["update"]
    before = (value_in(first, name), interval_in(first, name)) if known else (None, None)
    return dict(zip(FIGURES, (*before, value_in(last, name), interval_in(last, name)), strict=True))


def _size(row: Row, name: str) -> dict[str, int | None]:
    return {"problems": row.get(f"problems/{name}"), "samples": row.get(f"samples/{name}")}


def mean_of(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary's mean over the sets, with the keys of one set: before, before_interval, after, interval."""
    return {key: summary[f"{summary['measure']}_{key}"] for key in FIGURES}


def summary_table(summary: dict[str, Any]) -> Table:
    """The table that training ends with: held-out figures before and after, wall-clock by phase, tokens, rates."""
    seconds, tokens, measure = summary["seconds"], summary["tokens"], summary["measure"]
    table = Table(box=ROUNDED, show_header=False, title_style="bold", padding=(0, 1), title="Run summary")
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    mean, sets = mean_of(summary), summary["sets"]
    if mean["after"] is not None:
        if mean["before"] is not None:
            table.add_row(f"{measure} before", *_figure(mean["before"], mean["before_interval"], measure))
        table.add_row(f"{measure} after", *_figure(mean["after"], mean["interval"], measure))
        of = f" of {len(sets)} sets, unweighted" if len(sets) > 1 else ""
        table.add_row("gain", _gained(mean, measure), f"{summary['problems']:,} held-out problems{of}")
        table.add_section()
        for name, one in sets.items() if len(sets) > 1 else ():
            before, after = (shown(one[when], measure) for when in ("before", "after"))
            size = f"{one['problems']:,} problems x {one['samples']}" if one["problems"] else ""
            table.add_row(name, f"{before} → {after}", f"{between(one['interval'], measure)}, {size}".strip(", "))
        if len(sets) > 1:
            table.add_section()
    for phase in (name for name in PHASES if seconds.get(name)):
        table.add_row(phase, duration(seconds[phase]), f"{100 * seconds[phase] / seconds['total']:.0f} %")
    table.add_row("total", Text(duration(seconds["total"]), style="bold"), _steps(summary))
    for name, taken in summary.get("paper_seconds", {}).items():
        table.add_row(name, duration(taken), "as the paper counts")
    table.add_section()
    table.add_row("tokens generated", f"{tokens['generated']:,}", _rate(tokens["generated"], seconds["generate"]))
    table.add_row("tokens trained", f"{tokens['trained']:,}", _rate(tokens["trained"], seconds["optimize"]))
    return table


def _gained(mean: dict[str, Any], measure: str) -> Text:
    if mean["before"] is None:
        return Text("not known: not evaluated before the first update", style="dim")
    gain = mean["after"] - mean["before"]
    return Text(difference(gain, measure), style="bold green" if gain > 0 else "bold red" if gain < 0 else "bold")


def _figure(value: float, interval: list[float] | None, measure: str) -> tuple[Text, str]:
    return Text(shown(value, measure), style="bold"), between(interval, measure)


def _steps(summary: dict[str, Any]) -> str:
    skipped = f", {summary['skipped_updates']} skipped" if summary.get("skipped_updates") else ""
    return f"{summary['updates']:,} updates in {summary['stages']:,} stages{skipped}, seed {summary['seed']}"


def _rate(tokens: float, seconds: float) -> str:
    return f"{tokens / seconds:,.0f} tokens/s" if seconds else ""
