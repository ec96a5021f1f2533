"""The study's tables of accuracies, and the paper's claims against them.

Comparisons at tuned rates have a verdict, which says no more than the intervals do. What was looked at after other
results were seen (`edge_table`) has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from run_scripts.study.grid import wanted
from run_scripts.study.results import Mean, Results, Row, column, difference, fisher_exact, mean_of

TOLERANCE = -0.01
"""mu-GRPO may end one point below GRPO. Our margin, chosen after the first cells."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Variants that share a budget: three objectives on stale responses, and GRPO on fresh ones."""

    title: str
    mu_grpo: str
    relaxed: str
    strict: str
    grpo: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The claim that `left` minus `right` is at least `bound`."""

    claim: str
    setting: str
    left: str
    right: str
    bound: float = 0.0


SETTINGS = (
    Setting("4 stages of 32", "mu_grpo", "relaxed", "strict", "grpo"),
    Setting("1 stage of 128", "mu_128", "relaxed_128", "strict_128", "grpo"),
    Setting("4 stages of 128", "long_mu_grpo", "long_relaxed", "long_strict", "long_grpo"),
)

PAPERS = (
    *(
        Comparison("mu-GRPO ends within 1 point of GRPO or above", one.title, one.mu_grpo, one.grpo, TOLERANCE)
        for one in SETTINGS
    ),
    *(Comparison("mu-GRPO ends above the strict clip", one.title, one.mu_grpo, one.strict) for one in SETTINGS),
    *(
        Comparison("mu-GRPO ends above the relaxed clip without veto", one.title, one.mu_grpo, one.relaxed)
        for one in SETTINGS
    ),
)

BEYOND = (
    Comparison("stages that end at ESS < 0.4 end above fixed ones", "2 stages of 64", "adaptive", "mu_064"),
    Comparison("leaving out groups of equal rewards ends above", "1 stage of 128", "leave_out", "mu_128"),
    Comparison("leaving out groups of equal rewards ends above", "1 stage of 96", "fewer_leave_out", "fewer_mu_grpo"),
    Comparison(
        "96 updates without such groups end within 1 point of 128 with them",
        "1 stage",
        "fewer_leave_out",
        "mu_128",
        TOLERANCE,
    ),
)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; columns after the first are right-aligned."""
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def percent(mean: Mean | None) -> str:
    """`63.1 ± 1.2` with the half-width of the 95 % interval; `–` without a value."""
    if mean is None:
        return "–"
    return f"{100 * mean.value:.1f}" + ("" if mean.half is None else f" ± {100 * mean.half:.1f}")


def points(mean: Mean | None, digits: int = 1) -> str:
    """A difference of accuracies in points, with its sign."""
    if mean is None:
        return "–"
    return f"{100 * mean.value:+.{digits}f}" + ("" if mean.half is None else f" ± {100 * mean.half:.{digits}f}")


def share(runs: Sequence[Row], name: str) -> str:
    """Mean of a column of fractions, in per cent."""
    values = column(runs, name)
    return f"{100 * mean_of(values).value:.1f}" if values else "–"


def coverage(results: Results) -> str:
    """Rates and seeds that were run for each variant."""
    rows = []
    for part in results.grid.parts:
        for variant in part.variants:
            tried = len(results.tried(variant.name))
            seeds = len(results.tuned(variant.name))
            complete = seeds >= part.seeds and results.is_tuned(variant.name)
            state = "complete" if complete else "partly" if tried else "not run"
            rates, tuned = len(results.grid.rates), _rate_of(results, variant.name)
            rows.append([variant.title, part.title, f"{tried} of {rates}", tuned, f"{seeds} of {part.seeds}", state])
    return markdown(("Variant", "Part", "Rates tried", "Tuned rate", "Seeds", "State"), rows)


def size(results: Results) -> str:
    """Processor time of a cell on average, and of the whole grid."""
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
    """Final accuracy at each rate, means over the seeds that ran there."""
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
    """Percentage of response tokens that the veto dropped, mean over the seeds that ran at a rate."""
    runs = [row for row in results.of_kind("study") if (row["variant"], row["rate"]) == (variant, rate)]
    return share(runs, "vetoed")


def part_table(results: Results, name: str, *, extra: Sequence[str] = (), against: str = "grpo") -> str:
    """Accuracy at the tuned rate, difference to `against` on the same seeds, and metrics of the updates."""
    variants = results.grid.variants()
    own = [variant for part in results.grid.parts if part.name == name for variant in part.variants]
    rows = []
    for variant in (*(variants[one] for one in extra if one in variants), *own):
        runs = results.tuned(variant.name)
        if not runs:
            continue
        gap = difference(results.by_seed(variant.name), results.by_seed(against)) if variant.name != against else None
        rows.append(
            [
                variant.title,
                str(variant.mu),
                _rate_of(results, variant.name),
                str(len(runs)),
                percent(results.mean(variant.name)),
                points(gap),
                share(runs, "vetoed"),
                share(runs, "clipped"),
                _least(runs, "ess_min"),
                _least(runs, "entropy_last", "{:.2f}"),
            ]
        )
    if not rows:
        return "No cell of this part is done yet."
    head = ("Variant", "µ", "Rate", "Seeds", "Accuracy %", f"Against {variants[against].title}", "Vetoed %")
    return markdown((*head, "Clipped %", "Least ESS", "Entropy"), rows)


def edges(results: Results) -> str:
    """A sentence that names the variants whose best rate is an end of the grid."""
    if not any(results.is_tuned(name) for name in results.grid.variants()):
        return "No variant is tuned yet."
    found = edge_variants(results)
    if not found:
        return "No tuned variant has its best rate at an end of the grid without having been tried beyond it."
    return f"Best at an end of the grid, so that a better rate may lie beyond: {', '.join(found)}."


def edge_variants(results: Results) -> list[str]:
    """Titles of variants whose best rate is an end of the grid, with that end.

    Variants that ran beyond that end and were not better there are left out.
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
    """Whether the variant ran at a rate beyond the grid's end `rate` and was not better there."""
    tried = results.at_rates(variant)
    lowest = rate == results.grid.rates[0]
    beyond = [tried[one] for one in tried if (one < rate if lowest else one > rate)]
    return bool(beyond) and max(beyond) <= tried[rate]


def summary_table(results: Results) -> str:
    """Final accuracy at tuned rates by setting and objective."""
    known = results.grid.variants()
    rows = [
        (one.title, *(percent(results.mean(name)) for name in (one.grpo, one.mu_grpo, one.relaxed, one.strict)))
        for one in SETTINGS
        if one.mu_grpo in known
    ]
    return markdown(("Stages and µ", "GRPO, µ=4", "mu-GRPO", "relaxed clip, no veto", "strict clip"), rows)


def claims_table(results: Results) -> str:
    """Final accuracy at tuned rates: claim, setting, measured difference, verdict."""
    known = results.grid.variants()
    rows = [_compared(results, one) for one in (*PAPERS, *BEYOND) if one.left in known]
    return markdown(("Claim", "Setting", "Measured", "Verdict"), rows)


def _compared(results: Results, one: Comparison) -> tuple[str, ...]:
    gap = difference(results.by_seed(one.left), results.by_seed(one.right))
    return one.claim, one.setting, _seeds(gap), verdict(gap, one.bound)


def verdict(gap: Mean | None, bound: float) -> str:
    """Whether the interval of a difference lies above `bound`, below it, or on both sides."""
    if gap is None:
        return "not measured"
    if gap.low is None or gap.high is None:
        return "open (one seed)"
    return "holds" if gap.low >= bound else "does not hold" if gap.high < bound else "open"


def edge_table(results: Results, before: float) -> str:
    """Every rate above the tuned ones at which a setting ran with and without the veto; none is selected.

    `before`: the warm start's accuracy; a run that ends below it is lost. p is Fisher's exact test, two-sided, of lost
    runs without and with the veto.
    """
    known, rows = results.grid.variants(), []
    for one in SETTINGS:
        for rate in (rate for rate in results.grid.all_rates() if rate > max(results.grid.rates)):
            ends = [results.at(name, rate) for name in (one.relaxed, one.mu_grpo, one.strict) if name in known]
            if len(ends) < 3 or not (ends[0] and ends[1]):
                continue
            lost = [(sum(end < before for end in each.values()), len(each)) for each in ends[:2]]
            shown = [percent(mean_of(list(each.values()))) if each else "–" for each in ends]
            counts = [f"{k} of {n}" for k, n in lost]
            p = f"{fisher_exact(*lost):.2f}" if min(n for _, n in lost) > 1 else "–"
            rows.append((one.title, f"{rate:g}", *shown, *counts, p, points(difference(ends[1], ends[0]))))
    head = ("Setting", "Rate", "No veto %", "With veto %", "Strict clip %")
    return markdown((*head, "Lost, no veto", "Lost, veto", "p", "Veto's gain, points"), rows)


def _seeds(gap: Mean | None) -> str:
    return "–" if gap is None else f"{points(gap, 2)} points over {gap.n} seed{'s' if gap.n > 1 else ''}"


def _rate(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:g}"


def _rate_of(results: Results, variant: str) -> str:
    """The rate of a variant's row, with a star if the variant is not tuned yet."""
    return _rate(results.rate(variant)) + ("" if results.is_tuned(variant) or not results.tried(variant) else "\\*")


def _least(runs: Sequence[Row], name: str, form: str = "{:.3f}") -> str:
    values = column(runs, name)
    return form.format(mean_of(values).value) if values else "–"
