"""The report's tables: stages, summary, and the resolved recipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from mugrpo_megatron.observe.metrics import Row, mean_in
from mugrpo_megatron.observe.progress import duration
from mugrpo_megatron.observe.results import format_interval, format_value, mean_of, measure_in, sets_in, value_in
from mugrpo_megatron.observe.rundata import RunData, seconds_by_phase
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.scoring import MEAN

STAGE_HEAD = (
    *("Stage", "Updates", "Reward", "Length", "Vetoed", "Clipped", "ESS, last", "KL k3, last"),
    *("Generate", "Optimize"),
)


def stage_table(run: RunData) -> dict[str, Any] | None:
    """The table of stages: rewards, lengths, shares vetoed and clipped, ESS and KL of the last update, times, and the
    held-out result after each stage's last update.

    It has `head` and `rows`; None for a run without an update.
    """
    names = sets_in(run.evals)
    names = [*names, MEAN] if len(names) > 1 else names
    evals, measure = {row["update"]: row for row in run.evals}, measure_in(run.evals)
    stages = {row["stage"]: row for row in run.stages}
    phases = {stage: seconds_by_phase(rows) for stage, rows in _by_stage(sorted(run.phases, key=itemgetter("stage")))}
    rows = [
        (
            *_stage_row(stage, updates, stages.get(stage, {}), phases.get(stage, {})),
            *(format_value(value_in(evals.get(updates[-1]["update"] + 1, {}), name), measure) for name in names),
        )
        for stage, updates in _by_stage(run.updates)
    ]
    return {"head": (*STAGE_HEAD, *(f"{name}, after" for name in names)), "rows": rows} if rows else None


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary as pairs of name and value."""
    return [
        *_gains(summary),
        ("Stages", f"{summary['stages']:,}"),
        ("Updates", f"{summary['updates']:,}"),
        *((f"Seconds, {name}", f"{value:,.1f}") for name, value in summary["seconds"].items()),
        *((f"Seconds, {name} of the paper", f"{value:,.1f}") for name, value in summary["paper_seconds"].items()),
        ("Tokens generated", f"{summary['tokens']['generated']:,}"),
        ("Tokens trained", f"{summary['tokens']['trained']:,}"),
        ("Seed", str(summary["seed"])),
    ]


def _gains(summary: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """Pairs of name and text: held-out results before and after, of each set, and with several sets of their mean."""
    measure, mean, sets = summary["measure"], mean_of(summary), summary["sets"]
    for when, interval in (("before", "before_interval"), ("after", "interval")):
        if len(sets) > 1:
            yield f"Mean {measure} {when}", _with_interval(mean[when], mean[interval], measure)
        for name, figures in sets.items():
            title = f"{name} {when}" if len(sets) > 1 else f"{measure.capitalize()} {when}"
            yield title, _with_interval(figures[when], figures[interval], measure)


def recipe_sections(run: RunData) -> list[dict[str, Any]]:
    """The recipe for the page: its sections with their keys and values. `changed` marks values that are not the
    default."""
    defaults = Recipe().model_dump(mode="json")
    return [
        {
            "name": section,
            "entries": [
                {"name": name, "value": setting_text(value), "changed": defaults.get(section, {}).get(name) != value}
                for name, value in flat_settings(table)
            ],
        }
        for section, table in run.recipe.items()
    ]


def _by_stage(rows: Sequence[Row]) -> list[tuple[int, list[Row]]]:
    return [(stage, list(group)) for stage, group in groupby(rows, key=itemgetter("stage"))]


def _stage_row(stage: int, updates: Sequence[Row], sampled: Row, seconds: dict[str, float]) -> tuple[str, ...]:
    return (
        str(stage),
        f"{len(updates):,}",
        _number(sampled.get("reward_mean", mean_in(updates, "reward_mean"))),
        _number(sampled.get("response_length_mean")),
        _percent(mean_in(updates, "vetoed_fraction")),
        _percent(mean_in(updates, "clipped_fraction")),
        _percent(updates[-1].get("ess")),
        _number(updates[-1].get("kl_k3")),
        *(duration(seconds[name]) if name in seconds else "–" for name in ("generate", "optimize")),
    )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _with_interval(value: float | None, interval: Sequence[float] | None, measure: str) -> str:
    if value is None or interval is None:
        return format_value(value, measure)
    return f"{format_value(value, measure)} ({format_interval(interval, measure).removesuffix(' %')})"


def flat_settings(table: dict[str, Any], within: str = "") -> Iterable[tuple[str, Any]]:
    """Yields (key, value) for all values in a table; a key in a table inside it has that table's name in front."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat_settings(value, f"{within}{key}.")
        else:
            yield f"{within}{key}", value


def setting_text(value: object) -> str:
    """A setting's value as text: true and false as in TOML, texts without quotes, numbers with 12 digits (0.1 + 0.2 is
    0.3)."""
    if isinstance(value, float):
        value = float(f"{value:.12g}")
    return str(value).lower() if isinstance(value, bool) else str(value)
