"""The report's tables: stages, summary, and the recipe as it was resolved."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from mugrpo_megatron.observe.log import Row
from mugrpo_megatron.observe.progress import duration
from mugrpo_megatron.observe.rundata import RunData, seconds_by_phase
from mugrpo_megatron.recipe import Recipe

STAGE_HEAD = (
    "Stage",
    "Updates",
    "Reward",
    "Length",
    "Vetoed",
    "Clipped",
    "ESS, last",
    "KL k3, last",
    "Generate",
    "Optimize",
)


def stage_table(run: RunData) -> dict[str, Any] | None:
    """Head and rows, one a stage: what was sampled, how stale training made it, what it took. None before an update."""
    stages = {row["stage"]: row for row in run.stages}
    phases = {stage: seconds_by_phase(rows) for stage, rows in _by_stage(sorted(run.phases, key=itemgetter("stage")))}
    rows = [
        _stage_row(stage, updates, stages.get(stage, {}), phases.get(stage, {}))
        for stage, updates in _by_stage(run.updates)
    ]
    return {"head": STAGE_HEAD, "rows": rows} if rows else None


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary as names and values."""
    return [
        ("Accuracy before", _accuracy(summary["accuracy_before"], summary["accuracy_before_interval"])),
        ("Accuracy after", _accuracy(summary["accuracy_after"], summary["accuracy_interval"])),
        ("Stages", f"{summary['stages']:,}"),
        ("Updates", f"{summary['updates']:,}"),
        *((f"Seconds, {name}", f"{value:,.1f}") for name, value in summary["seconds"].items()),
        *((f"Seconds, {name} of the paper", f"{value:,.1f}") for name, value in summary["paper_seconds"].items()),
        ("Tokens generated", f"{summary['tokens']['generated']:,}"),
        ("Tokens trained", f"{summary['tokens']['trained']:,}"),
        ("Seed", str(summary["seed"])),
    ]


def recipe_sections(run: RunData) -> list[dict[str, Any]]:
    """The recipe's sections with their keys; `changed` marks what differs from the defaults."""
    defaults = Recipe().model_dump(mode="json")
    return [
        {
            "name": section,
            "entries": [
                {"name": key, "value": _toml(value), "changed": defaults.get(section, {}).get(key) != value}
                for key, value in table.items()
            ],
        }
        for section, table in run.recipe.items()
    ]


def _by_stage(rows: Sequence[Row]) -> list[tuple[int, list[Row]]]:
    return [(stage, list(group)) for stage, group in groupby(rows, key=itemgetter("stage"))]


def _stage_row(stage: int, updates: Sequence[Row], sampled: Row, seconds: dict[str, float]) -> tuple[str, ...]:
    return (
        str(stage + 1),
        f"{len(updates):,}",
        _number(sampled.get("reward_mean", _mean(updates, "reward_mean"))),
        _number(sampled.get("response_length_mean")),
        _percent(_mean(updates, "vetoed_fraction")),
        _percent(_mean(updates, "clipped_fraction")),
        _percent(updates[-1].get("ess")),
        _number(updates[-1].get("kl_k3")),
        *(duration(seconds[name]) if name in seconds else "–" for name in ("generate", "optimize")),
    )


def _mean(rows: Iterable[Row], metric: str) -> float | None:
    values = [row[metric] for row in rows if row.get(metric) is not None]
    return statistics.fmean(values) if values else None


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _accuracy(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None or interval is None:
        return "–"
    return f"{100 * value:.1f} % ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})"


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
