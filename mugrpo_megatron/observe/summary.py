"""The figures that a run comes down to: summary.json and the table a command ends with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import ROUNDED
from rich.table import Table
from rich.text import Text

from mugrpo_megatron.observe.metrics import PHASES
from mugrpo_megatron.observe.paper import paper_seconds
from mugrpo_megatron.observe.progress import duration
from mugrpo_megatron.observe.rundata import RunData, read_run, seconds_by_phase

REPORTED_PHASES = ("sync", "generate", "score", "optimize")
"""Phases that `seconds` holds even where a run spent no time in them."""


def summarize(run_dir: Path) -> dict[str, Any]:
    """What summary.json holds, counted from the rows that the run has logged; a resumed run counts in full.

    Accuracies are None without an evaluation. `accuracy_interval` is the 95 % interval [low, high] of
    `accuracy_after`, `accuracy_before_interval` that of `accuracy_before`.
    """
    return summary_of(read_run(run_dir))


def summary_of(run: RunData) -> dict[str, Any]:
    """`summarize` for a run that is already read."""
    first, last = (run.evals[0], run.evals[-1]) if run.evals else (None, None)
    taken = seconds_by_phase(run.phases)
    phases = {name: taken.get(name, 0.0) for name in PHASES if name in taken or name in REPORTED_PHASES}
    return {
        "accuracy_before": first and first["accuracy"],
        "accuracy_before_interval": first and [first["low"], first["high"]],
        "accuracy_after": last and last["accuracy"],
        "accuracy_interval": last and [last["low"], last["high"]],
        "problems": last and last["problems"],
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


def summary_table(summary: dict[str, Any]) -> Table:
    """The table that training ends with: accuracy before and after, wall-clock by phase, tokens and their rates."""
    seconds, tokens = summary["seconds"], summary["tokens"]
    table = Table(box=ROUNDED, show_header=False, title_style="bold", padding=(0, 1), title="Run summary")
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    if summary["accuracy_before"] is not None:
        problems = f"{summary['problems']} held-out problems"
        table.add_row("accuracy before", *_accuracy(summary, "before"))
        table.add_row("accuracy after", *_accuracy(summary, "after"))
        gain = 100 * (summary["accuracy_after"] - summary["accuracy_before"])
        table.add_row("gain", Text(f"{gain:+.1f} points", style="bold green" if gain > 0 else "bold red"), problems)
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


def _accuracy(summary: dict[str, Any], when: str) -> tuple[Text, str]:
    interval = summary["accuracy_interval"] if when == "after" else summary.get("accuracy_before_interval")
    between = f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f} %" if interval else ""
    return Text(f"{100 * summary[f'accuracy_{when}']:.1f} %", style="bold"), between


def _steps(summary: dict[str, Any]) -> str:
    skipped = f", {summary['skipped_updates']} skipped" if summary.get("skipped_updates") else ""
    return f"{summary['updates']:,} updates in {summary['stages']:,} stages{skipped}, seed {summary['seed']}"


def _rate(tokens: float, seconds: float) -> str:
    return f"{tokens / seconds:,.0f} tokens/s" if seconds else ""
