"""The study's tables and verdicts as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mugrpo_megatron.observe.metrics import PHASES
from run_scripts.study.grid import Cell, wanted
from run_scripts.study.results import CLOCK, COMPARED, CPU, WALL, Results, arrival, column
from run_scripts.study.stats import Mean, difference, mean_of

TIMED = tuple(phase for phase in PHASES if phase not in ("start", "eval"))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; columns after the first are right-aligned."""
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def percent(mean: Mean | None) -> str:
    """`63.1 ± 1.2` with the half-width of the 95 % interval; `–` where there is nothing."""
    if mean is None:
        return "–"
    return f"{100 * mean.value:.1f}" + ("" if mean.half is None else f" ± {100 * mean.half:.1f}")


def points(mean: Mean | None, digits: int = 1) -> str:
    """A difference of accuracies in points, with its sign."""
    if mean is None:
        return "–"
    return f"{100 * mean.value:+.{digits}f}" + ("" if mean.half is None else f" ± {100 * mean.half:.{digits}f}")


def coverage(results: Results) -> str:
    """Which cells were run with how many seeds, and which were not yet."""
    rows = []
    for part in results.grid.parts:
        for variant in part.variants:
            tried = len(results.tried(variant.name))
            seeds = len(results.tuned(variant.name))
            state = (
                "complete"
                if seeds >= part.seeds and results.is_tuned(variant.name)
                else "not run"
                if not tried
                else "partly"
            )
            rates, tuned = len(results.grid.rates), _rate_of(results, variant.name)
            rows.append([variant.title, part.title, f"{tried} of {rates}", tuned, f"{seeds} of {part.seeds}", state])
    return markdown(("Variant", "Part", "Rates tried", "Tuned rate", "Seeds", "State"), rows)


def size(results: Results) -> str:
    """How much processor time a cell takes, and the whole grid by that."""
    whole = len(list(wanted(results.grid, results.accuracies())))
    spent = [
        row["cpu_s"] + row["start_cpu_s"] + row["eval_cpu_s"]
        for row in results.of_kind("study")
        if row["cpu_s"] is not None
    ]
    if not spent:
        return f"The whole grid is {whole} cells."
    cell = mean_of(spent).value
    hours = whole * cell / 3600
    return (
        f"The whole grid is {whole} cells. One took {cell:.0f} processor seconds on average, start-up and evaluations\n"
        f"included: {hours:.1f} processor hours in all, by estimate {hours / 2:.1f} to {hours:.1f} on two quiet cores."
    )


def tuning(results: Results) -> str:
    """Final accuracy of the first seed at every rate, the tuned one in bold."""
    rows = []
    for variant in results.grid.variants().values():
        found = results.at_rates(variant.name)
        shown = {rate: f"{100 * accuracy:.1f}" for rate, accuracy in found.items()}
        if (best := results.rate(variant.name)) is not None:
            shown[best] = f"**{shown[best]}**"
        if found:
            rows.append([variant.title, str(variant.mu), *(shown.get(rate, "–") for rate in results.grid.all_rates())])
    return markdown(("Variant", "µ", *(_rate(rate) for rate in results.grid.all_rates())), rows)


def by_rate(results: Results, variants: Sequence[str]) -> str:
    """Final accuracy over the seeds that ran at each rate, not at the best alone."""
    known = results.grid.variants()
    rates = [rate for rate in results.grid.all_rates() if any(results.at(name, rate) for name in variants)]
    rows = [
        [known[name].title, str(known[name].mu), *(percent(seeds_mean(results, name, rate)) for rate in rates)]
        for name in variants
        if name in known and results.at_rates(name)
    ]
    return markdown(("Variant", "µ", *(_rate(rate) for rate in rates)), rows)


def seeds_mean(results: Results, variant: str, rate: float) -> Mean | None:
    """Final accuracy over the seeds that ran at a rate."""
    found = results.at(variant, rate)
    return mean_of(list(found.values())) if found else None


def vetoed(results: Results, variant: str, rate: float) -> str:
    """Percentage of response tokens that the veto took out, mean over the seeds that ran at a rate."""
    runs = [row for row in results.of_kind("study") if (row["variant"], row["rate"]) == (variant, rate)]
    return _share(runs, "vetoed")


def part_table(results: Results, name: str, *, extra: Sequence[str] = (), against: str = "grpo") -> str:
    """Accuracy at the tuned rate, difference to `against` on the same seeds, and what the updates were like."""
    variants = results.grid.variants()
    own = [variant for part in results.grid.parts if part.name == name for variant in part.variants]
    rows = []
    for variant in (*(variants[one] for one in extra if one in variants), *own):
        runs = results.tuned(variant.name)
        if not runs:
            continue
        apart = difference(results.by_seed(variant.name), results.by_seed(against)) if variant.name != against else None
        rows.append(
            [
                variant.title,
                str(variant.mu),
                _rate_of(results, variant.name),
                str(len(runs)),
                percent(results.mean(variant.name)),
                points(apart),
                _share(runs, "vetoed"),
                _share(runs, "clipped"),
                _least(runs, "ess_min"),
                _least(runs, "entropy_last", "{:.2f}"),
            ]
        )
    if not rows:
        return "No cell of this part is done yet."
    head = ("Variant", "µ", "Rate", "Seeds", "Accuracy %", f"Against {variants[against].title}", "Vetoed %")
    return markdown((*head, "Clipped %", "Least ESS", "Entropy"), rows)


def clock_table(results: Results, unit: str = "s") -> str:
    """Seconds by phase of the first part's variants, means over their runs; `unit` "s" is wall-clock, "cpu_s" processor
    time of all processes."""
    rows = []
    for variant in results.grid.parts[0].variants:
        runs = results.timed(variant.name)
        if not runs or not column(runs, f"generate_{unit}"):
            continue
        phases = [f"{mean_of(column(runs, f'{name}_{unit}')).value:.1f}" for name in TIMED]
        total = _seconds(runs, "wall_s" if unit == "s" else unit)
        rows.append([variant.title, str(len(runs)), *phases, total, _share(runs, "others_share")])
    return markdown(("Variant", "Runs", *TIMED, "Total", "Machine used by others %"), rows)


def same_accuracy(results: Results) -> float | None:
    """The accuracy that GRPO and mu-GRPO both reach: the lower of their means, less half a point."""
    ends = [results.mean(name) for name in COMPARED]
    return None if None in ends else min(end.value for end in ends if end) - 0.005


def speed_table(results: Results) -> str:
    """Seconds to the same accuracy, and how many times less that is than GRPO's."""
    level = same_accuracy(results)
    if level is None:
        return "Not measured yet."
    base = {axis: results.seconds_to("grpo", level, axis) for axis in (WALL, CPU)}
    rows = []
    for variant in results.grid.parts[0].variants:
        runs = results.timed(variant.name)
        cells = []
        for axis in (WALL, CPU):
            times = results.seconds_to(variant.name, level, axis)
            cells.append(f"{mean_of(times).value:.1f}" if times else "never")
            ratio = mean_of(base[axis]).value / mean_of(times).value if times and base[axis] else None
            cells.append(f"{ratio:.2f}" if ratio else "–")
        reached = len(results.seconds_to(variant.name, level, WALL))
        rows.append([variant.title, f"{reached} of {len(runs)}", *cells])
    return markdown(("Variant", "Runs that reach it", "Wall s", "GRPO / this", "CPU s", "GRPO / this"), rows)


def edges(results: Results) -> str:
    """Which variants have their best rate at an end of the grid, in a sentence."""
    if not any(results.is_tuned(name) for name in results.grid.variants()):
        return "No variant is tuned yet."
    found = edge_variants(results)
    if not found:
        return "No tuned variant has its best rate at an end of the grid without having been tried beyond it."
    return f"Best at an end of the grid, so that a better rate may lie beyond: {', '.join(found)}."


def edge_variants(results: Results) -> list[str]:
    """Titles of variants whose best rate is an end of the grid, with that end.

    Not those that ran beyond it and were no better there.
    """
    ends = {results.grid.rates[0]: "lowest", results.grid.rates[-1]: "highest"}
    return [
        f"{variant.title} ({ends[rate]})"
        for variant in results.grid.variants().values()
        if results.is_tuned(variant.name)
        and (rate := results.rate(variant.name)) in ends
        and not _tried_beyond(results, variant.name, rate)
    ]


def _tried_beyond(results: Results, variant: str, rate: float) -> bool:
    """Whether the variant ran at a rate beyond the grid's end `rate` and was no better there."""
    tried = results.at_rates(variant)
    lowest = rate == results.grid.rates[0]
    beyond = [tried[one] for one in tried if (one < rate if lowest else one > rate)]
    return bool(beyond) and max(beyond) <= tried[rate]


def machine_note(results: Results) -> str:
    """How far the machine was shared while the seconds were taken."""
    runs = [row for variant in results.grid.parts[0].variants for row in results.timed(variant.name)]
    if runs and all(row["kind"] == CLOCK for row in runs):
        most = max(row["others_share"] or 0.0 for row in runs)
        return (
            "These seconds come from runs of their own, one at a time (`python -m run_scripts.study.run --clock N`).\n"
            f"Other work used at most {100 * most:.0f} % of the processor time that was used meanwhile."
        )
    return (
        "**Wall-clock of this round was taken on a shared machine**: other work used most of its processor time while\n"
        "these cells ran, some of them two at a time. Their seconds compare with nothing, processor time only\n"
        "roughly. `python -m run_scripts.study.run --clock 3` takes wall-clock again on a quiet machine and replaces\n"
        "it here."
    )


def trl_table(runs: Sequence[Mapping[str, Any]], results: Results | None = None) -> str:
    """Runs of the TRL bench; with `results`, next to the study's own at the same rates, seed 0."""
    sides = [(run["side"], run["rate"], run["points"]) for run in runs]
    for rate in sorted({run["rate"] for run in runs}):
        for name in COMPARED:
            key = f"study/{Cell(name, rate, 0).name}"
            if results and key in results.curves:
                sides.append((f"ours, {results.grid.variants()[name].title}", rate, results.curves[key]["evals"]))
    rows = []
    for side, rate, points_ in sorted(sides, key=lambda side: side[1]):
        first, *_, last = points_
        rows.append([side, f"{rate:g}", f"{100 * first[3]:.1f}", f"{100 * last[3]:.1f}", *_tenths(last[1:3])])
    return markdown(("Side", "Rate", "Before %", "After %", "Wall s", "CPU s"), rows)


def trl_clock_table(runs: Sequence[Mapping[str, Any]], goal: float) -> str:
    """Runs of the TRL bench that nothing disturbed: when each came to the accuracy `goal`."""
    rows = []
    for run in sorted(runs, key=lambda run: run["points"][-1][WALL]):
        last = run["points"][-1]
        to_goal = [arrival(run["points"], goal, axis) for axis in (WALL, CPU)]
        rows.append([run["side"], f"{100 * last[3]:.1f}", *_tenths(last[1:3]), *_tenths(to_goal)])
    title = f"{100 * goal:.0f} %"
    return markdown(("Side", "After %", "Wall s", "CPU s", f"Wall s to {title}", f"CPU s to {title}"), rows)


def trl_gap(runs: Sequence[Mapping[str, Any]], results: Results) -> float | None:
    """Points between TRL's final accuracy and that of our GRPO at the same rate, the widest; None without a pair."""
    ours = {run["rate"]: run["points"][-1][3] for run in runs if run["side"].startswith("ours, grpo")}
    ours = {cell.rate: a for cell, a in results.accuracies().items() if (cell.variant, cell.seed) == ("grpo", 0)} | ours
    theirs = {run["rate"]: run["points"][-1][3] for run in runs if run["side"].startswith("TRL")}
    return max((100 * abs(ours[rate] - theirs[rate]) for rate in ours.keys() & theirs.keys()), default=None)


def cpu_spread(runs: Sequence[Mapping[str, Any]], results: Results) -> tuple[float, float] | None:
    """Least and most processor seconds that the same work took: our GRPO at any rate; None with fewer than two runs."""
    seconds = [run["points"][-1][2] for run in runs if run["side"].startswith("ours, grpo")]
    seconds += column((row for row in results.of_kind("study") if row["variant"] == "grpo"), "cpu_s")
    return (min(seconds), max(seconds)) if len(seconds) > 1 else None


def _tenths(times: Sequence[float | None]) -> list[str]:
    return ["–" if seconds is None else f"{seconds:.1f}" for seconds in times]


def _rate(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:g}"


def _rate_of(results: Results, variant: str) -> str:
    """The rate that a variant's row stands for, with a star while it is only the best so far."""
    return _rate(results.rate(variant)) + ("" if results.is_tuned(variant) or not results.tried(variant) else "\\*")


def _share(runs: Sequence[dict[str, float]], name: str) -> str:
    values = column(runs, name)
    return f"{100 * mean_of(values).value:.1f}" if values else "–"


def _least(runs: Sequence[dict[str, float]], name: str, form: str = "{:.3f}") -> str:
    values = column(runs, name)
    return form.format(mean_of(values).value) if values else "–"


def _seconds(runs: Sequence[dict[str, float]], name: str) -> str:
    values = column(runs, name)
    if not values:
        return "–"
    mean = mean_of(values)
    return f"{mean.value:.1f}" + ("" if mean.half is None else f" ± {mean.half:.1f}")
