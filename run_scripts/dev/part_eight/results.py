"""Part eight's results: tables and claims of docs/study/part-eight.md, from its cells.

python -m run_scripts.dev.part_eight.results
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

from run_scripts.dev.part_eight.cells import Cell, Ends, Grid, best_way, load_grid, tuned_rate, tuning_mean, wanted
from run_scripts.dev.part_eight.rows import CELLS, CURVES, cell_of, mean_of_last_quarter, read_rows
from run_scripts.dev.study import FEWEST, STUDY, holm, interval, sign_flip, with_cells

PAGE = STUDY / "part-eight.md"
LARGE, EXPLORED = STUDY / "eight_large", STUDY / "eight_explored"
GRPO = "grpo_4"
MAY_BE_CHOSEN = ("grpo_16", "veto_16", "prefix_16", "grpo_64", "veto_64", "prefix_64")
"""The ways among which tuning chooses for claim 14; the best of `FORMS` at each µ comes to them."""
FORMS = ("decoupled", "decoupled_prefix", "decoupled_truncated")
"""The forms of method (d), without their µ."""
LEVEL = 0.05
CurvesOfSeeds = Mapping[tuple[int, str], Mapping[int, float]]
"""(Seed, warm start) -> update -> held-out accuracy as a share."""


@dataclass(frozen=True, slots=True)
class Results:
    """What has run of a grid."""

    grid: Grid
    ends: Ends
    curves: Mapping[tuple[str, float], CurvesOfSeeds]
    """Way and rate -> curves of its finished cells."""

    def tests(self, way: str) -> CurvesOfSeeds:
        """Curves of the way's test cells at its rate; none before the rate is known."""
        return self._at_rate(way, self.grid.test_seeds)

    def merit(self, way: str) -> float | None:
        """The way's mean figure of merit over the tuning seeds, in points: A(U) minus A(U / k) of GRPO.

        None until both have run on every tuning seed, at their rates.
        """
        own, grpo = self._at_rate(way, self.grid.tuning_seeds), self._at_rate(GRPO, self.grid.tuning_seeds)
        if {seed for seed, _ in own.keys() & grpo.keys()} != set(self.grid.tuning_seeds):
            return None
        return fmean(self._points(own, grpo, self.grid.ways[way].k))

    def gaps(self, way: str, other: str, speed_up: float = 1.0) -> list[float]:
        """A(U) of the way minus A(U / speed_up) of the other one in points, one for each warm start that both ran."""
        return self._points(self.tests(way), self.tests(other), speed_up)

    def _at_rate(self, way: str, seeds: Sequence[int]) -> CurvesOfSeeds:
        rate = tuned_rate(self.grid, self.ends, way)[1]
        curves = {} if rate is None else self.curves.get((way, rate), {})
        return {key: curve for key, curve in curves.items() if key[0] in seeds}

    def _points(self, own: CurvesOfSeeds, others: CurvesOfSeeds, speed_up: float) -> list[float]:
        last, earlier = self.grid.updates, self.grid.updates / speed_up
        return [
            100 * (mean_of_last_quarter(own[key], last) - mean_of_last_quarter(others[key], earlier))
            for key in sorted(own.keys() & others.keys())
        ]


@dataclass(frozen=True, slots=True)
class Claim:
    number: int
    margins: Sequence[float]
    """By how many points each seed is on the claim's side."""
    found: str
    """What the cells say, without a verdict."""
    asserted: str
    """What the test may show."""


def read_results(directory: Path = LARGE) -> Results:
    """The results of a grid, at large headroom by default. A curve counts when its cell stands in cells.csv."""
    cells = read_rows(directory / CELLS)
    curves: dict[tuple[str, float], dict[tuple[int, str], dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    finished = {(cell_of(row), row["warm_start"]) for row in cells}
    for row in read_rows(directory / CURVES):
        cell = cell_of(row)
        if (cell, row["warm_start"]) in finished:
            curve = curves[cell.way, cell.rate][cell.seed, row["warm_start"]]
            curve[int(row["update"])] = float(row["accuracy"])
    ends = {cell_of(row): float(row["end"]) for row in cells}
    return Results(load_grid(directory / "grid.toml"), ends, curves)


def rates_table(results: Results) -> str:
    """Mean ends of the tuning seeds, way by way and rate by rate; the rate that a way keeps is bold."""
    grid, ends = results.grid, results.ends
    means = {
        (name, rate): tuning_mean(grid, ends, name, rate)
        for name, rate in product(grid.ways, grid.ladder)
        if all(Cell(name, rate, seed) in ends for seed in grid.tuning_seeds)
    }
    rates = sorted({rate for _, rate in means})
    lines = [
        "| Way | " + " | ".join(f"{1e5 * rate:g}·10⁻⁵" for rate in rates) + " |",
        "| --- |" + " --: |" * len(rates),
    ]
    for name in dict.fromkeys(way for way, _ in means):
        kept = tuned_rate(grid, ends, name)[1]
        texts = [f"{100 * means[name, rate]:.1f}" if (name, rate) in means else "–" for rate in rates]
        marked = [f"**{text}**" if rate == kept else text for rate, text in zip(rates, texts, strict=True)]
        lines.append(f"| {grid.ways[name].title} | {' | '.join(marked)} |")
    return "\n".join(lines)


def tests_table(results: Results) -> str:
    """Test cells of every way that has enough of them, beside GRPO's of the same warm starts."""
    lines = [
        "| Way | Rate, 10⁻⁵ | Seeds | A(256), % | Points above GRPO, equal updates | k | equal time |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    for name, way in results.grid.ways.items():
        own = results.tests(name)
        if len(own) < FEWEST:
            continue
        rate = tuned_rate(results.grid, results.ends, name)[1] or 0.0
        end = fmean(mean_of_last_quarter(curve, results.grid.updates) for curve in own.values())
        paired = name != GRPO and len(results.gaps(name, GRPO)) >= FEWEST
        equal = interval(results.gaps(name, GRPO)) if paired else "–"
        timed = f"{way.k:.3f} | {interval(results.gaps(name, GRPO, way.k))}" if paired and way.k > 1 else "– | –"
        lines.append(f"| {way.title} | {1e5 * rate:g} | {len(own)} | {100 * end:.1f} | {equal} | {timed} |")
    return "\n".join(lines)


def merits(results: Results) -> Mapping[str, float]:
    """The ways that claim 14 may take and that are tuned, and their mean figures of merit on the tuning seeds; none
    until the form of method (d) that goes on is known."""
    form = best_way(results.grid, results.ends, [f"{name}_16" for name in FORMS])
    if form is None:
        return {}
    names = (*MAY_BE_CHOSEN, form, form.replace("_16", "_64"))
    return {name: merit for name in names if (merit := results.merit(name)) is not None}


def chosen(results: Results) -> str | None:
    """The way of claim 14: the one with the highest mean figure of merit on the tuning seeds; None until every way that
    may be chosen has been tuned."""
    known = merits(results)
    every = len(MAY_BE_CHOSEN) + 2  # with the form of method (d), at both µ
    return max(known, key=lambda name: known[name]) if len(known) == every else None


def choice_table(results: Results) -> str:
    """The figures of merit that are known, the highest first; the chosen way's is bold. Empty before the first."""
    known = merits(results)
    if not known:
        return ""
    lines = ["| Way | k | Points above GRPO at equal time |", "| --- | --: | --: |"]
    best = chosen(results)
    for name in sorted(known, key=lambda name: -known[name]):
        points = f"{known[name]:+.1f}"
        way = results.grid.ways[name]
        lines.append(f"| {way.title} | {way.k:.3f} | {f'**{points}**' if name == best else points} |")
    return "\n".join(lines)


def claims(results: Results) -> Iterator[Claim]:
    """Yield the claims for which at least three seeds have run."""
    below = results.gaps(GRPO, "veto_4")
    if len(below) >= FEWEST:
        text = f"at µ=4 the relaxed clip with the veto ends {interval(below, '')} points below GRPO's clip"
        yield Claim(12, below, text, "that it ends below")
    lost = results.gaps("prefix_4", "prefix_64")
    if len(lost) >= FEWEST:
        text = f"from µ=4 to µ=64 prefix weights lose {interval(lost, '')} points"
        yield Claim(13, [2 - points for points in lost], text, "that they lose less than 2")
    if best := chosen(results):
        way = results.grid.ways[best]
        above = results.gaps(best, GRPO, way.k)
        if len(above) >= FEWEST:
            text = (
                f"tuning chose {way.title}, which ends {interval(above)} points above GRPO at equal time (k = {way.k})"
            )
            yield Claim(14, above, text, "that it ends above")


def claim_lines(results: Results) -> str:
    """Each claim's figure, and its verdict as soon as all test seeds have run; a claim without one counts as p = 1."""
    seeds = len(results.grid.test_seeds)
    found = list(claims(results))
    whole = [len(claim.margins) == seeds for claim in found]
    chances = [sign_flip(claim.margins) if ran else 1.0 for claim, ran in zip(found, whole, strict=True)]
    corrected = holm([*chances, *[1.0] * (3 - len(found))])
    lines = []
    for claim, ran, chance, p in zip(found, whole, chances, corrected[: len(found)], strict=True):
        verdict = (
            f"{claim.asserted} is **{'shown' if p <= LEVEL else 'not shown'}**, p = {chance:.3f}, {p:.3f} after Holm"
            if ran
            else f"{len(claim.margins)} of {seeds} seeds have run, so it is not tested yet"
        )
        lines.append(f"- **Claim {claim.number}**: {claim.found}; {verdict}.")
    return "\n".join(lines)


def missing(results: Results, explored: Results) -> str:
    """The grid's cells that have not run, as far as finished cells decide which they are; empty when all have."""
    grid = results.grid
    cells = [cell for cell in wanted(grid, results.ends) if cell not in results.ends]
    parts = []
    for kind, seeds in (("test", grid.test_seeds), ("tuning", grid.tuning_seeds)):
        left = Counter(cell.way for cell in cells if cell.seed in seeds)
        parts += [f"{number} {kind} cells of {grid.ways[name].title}" for name, number in left.items()]
    if not explored.ends:
        parts.append("the exploration")
    return "; ".join(parts)


def text(results: Results, explored: Results) -> str:
    """What stands between the marks of the page: the results at large headroom, and those of the exploration."""
    ran = sum(cell.seed in results.grid.test_seeds for cell in results.ends)
    parts = [
        f"{len(results.ends) - ran} cells of tuning seeds and {ran} of test seeds have run. "
        "Mean A(256) of the\ntuning seeds 100 and 101 on the validation split, in percent; a way's rate is bold:",
        rates_table(results),
    ]
    if table := choice_table(results):
        parts += [
            "The choice for claim 14: mean figures of merit on the tuning seeds. The highest wins; it is bold once\n"
            "all are known:",
            table,
        ]
    if lines := claim_lines(results):
        parts += [
            "Test cells, with 95 % intervals by seed (Student's t):",
            tests_table(results),
            lines,
        ]
    if left := missing(results, explored):
        parts.append(f"Not run with large headroom: {left}.")
    if explored.ends:
        parts += ["Exploration, mean A(256) of the same tuning seeds, in percent:", rates_table(explored)]
    return "\n" + "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    new = text(read_results(), read_results(EXPLORED))
    PAGE.write_text(with_cells(PAGE.read_text(encoding="utf-8"), new), encoding="utf-8")
    print(PAGE)
