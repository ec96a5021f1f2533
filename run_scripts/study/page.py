"""Write docs/study.md, its pictures, and README's paragraph about the study, from the kept results in docs/study.

python -m run_scripts.study.page
"""

from __future__ import annotations

import argparse
import statistics
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mugrpo_megatron.files.durable import write_text
from run_scripts.study.grid import GRID, Waiting, load_grid, wanted
from run_scripts.study.plots import write_plots
from run_scripts.study.results import (
    DOCS,
    Mean,
    Results,
    differences,
    holm,
    markdown,
    mean_of,
    outcome_of,
    percent,
    plain,
    points,
    read_results,
    sign_flip,
)

TEMPLATE = Path(__file__).with_name("study.md.j2")
BEGIN, END = "<!-- study -->\n", "<!-- /study -->\n"
"""What README's paragraph stands between."""
LEVEL = 0.05
"""Of all primary contrasts together."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """The claim that `left` minus `right` is above `bound`, in one block."""

    claim: str
    block: str
    left: str
    right: str
    bound: float = 0.0
    column: str = "after"


PRIMARY = (
    Contrast("mu-GRPO ends above the strict clip", "tuned", "veto", "strict"),
    Contrast("mu-GRPO ends less than 1 point below GRPO with µ=4", "tuned", "veto", "grpo", -0.01),
    Contrast("the veto holds accuracy", "hot", "veto", "none"),
    Contrast("the veto holds E[ρ given A < 0], last 64 updates", "hot", "veto", "none", 0.0, "ratio_neg_late"),
)
"""Those of docs/study/plan.md, in its order."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What the kept cells say of a contrast."""

    contrast: Contrast
    values: list[float]
    """left - right, seed by seed."""
    p: float | None
    """Corrected for all primary contrasts; None until every one has all its seeds."""

    def verdict(self, seeds: int) -> str:
        """It is "open" before all seeds have run; afterwards the corrected test decides."""
        if len(self.values) < seeds or self.p is None:
            return "open"
        return "holds" if self.p < LEVEL else "not shown"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=Path, default=GRID)
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the kept results are and pictures go")
    options = parser.parse_args(arguments)
    results = read_results(load_grid(options.grid), options.docs)
    write_plots(results, options.docs)
    page, readme = options.docs.parent / "study.md", options.docs.parents[1] / "README.md"
    write_text(page, text(results))
    write_text(readme, with_summary(readme.read_text(encoding="utf-8"), results))
    print(page)
    return 0


def text(results: Results) -> str:
    """The page: prose from study.md.j2, numbers from the results."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,
    )
    return environment.get_template(TEMPLATE.name).render(
        results=results,
        grid=results.grid,
        done=len(results.rows),
        computed=sum(not row["same_as"] for row in results.rows),
        planned=planned(results),
        seeds={name: seeds_of(results, name) for name in results.grid.blocks},
        contrasts=contrast_table(findings(results), results.grid.seeds),
        collapsed=lambda block, method: collapsed(results, block, method),
        gap=lambda block, left, right: gap(results, block, left, right),
        block_table=lambda block: block_table(results, block),
        measures_table=lambda block: measures_table(results, block),
        tuning=tuning_table(results),
        noise=noise(results),
        minutes=statistics.median([row["seconds"] / 60 for row in results.rows]) if results.rows else None,
        commits=", ".join(sorted({one for row in results.rows for one in row["commit"].split()})),
        summary=summary(results),
    )


def findings(results: Results) -> list[Finding]:
    """The primary contrasts on the seeds that both sides have; p values only when all of them are complete."""
    values = []
    for one in PRIMARY:
        sides = [results.column(one.block, name, one.column) for name in (one.left, one.right)]
        values.append(differences(*sides))
    if any(len(each) < results.grid.seeds for each in values):
        return list(map(Finding, PRIMARY, values, [None] * len(PRIMARY)))
    ps = holm([sign_flip(each, one.bound) for one, each in zip(PRIMARY, values, strict=True)])
    return list(map(Finding, PRIMARY, values, ps))


def contrast_table(found: Sequence[Finding], seeds: int) -> str:
    """Claim, rate, measured difference, corrected p, verdict."""
    rows = []
    for one in found:
        gap = mean_of(one.values) if one.values else None
        measured = points(gap, 1) if one.contrast.column == "after" else plain(gap)
        p = "–" if one.p is None else f"{one.p:.3f}"
        rows.append(
            [one.contrast.claim, one.contrast.block, measured, f"{len(one.values)} of {seeds}", p, one.verdict(seeds)]
        )
    return markdown(("Claim", "Rate", "Points, or ratio", "Seeds", "p, corrected", "Verdict"), rows)


def block_table(results: Results, block: str) -> str:
    """Accuracy of a block's methods: before, after, gain, against `none`, collapses, responses cut off."""
    rows = []
    for name in results.grid.blocks[block].methods:
        cells = results.of(block, name)
        if not cells:
            continue
        after = results.column(block, name, "after")
        apart = differences(after, results.column(block, "none", "after")) if name != "none" else []
        rows.append(
            [
                results.grid.methods[name].title,
                f"{results.rate(block, name):g}",
                str(len(cells)),
                percent(mean_of(list(results.column(block, name, "before").values()))),
                percent(mean_of(list(after.values()))),
                points(mean_of(apart), 1) if apart else "–",
                collapsed(results, block, name),
                percent(mean_of(list(results.column(block, name, "truncated_after").values()))),
            ]
        )
    if not rows:
        return "No cell has finished yet."
    head = ("Method", "Rate", "Seeds", "Before %", "After %", "Minus no veto, points", "Collapsed", "Cut off %")
    return markdown(head, rows)


def gap(results: Results, block: str, left: str, right: str) -> str:
    """The difference of two methods' final accuracies in a block."""
    found = differences(*(results.column(block, name, "after") for name in (left, right)))
    if not found:
        return "not measured yet"
    return f"{points(mean_of(found), 1)} points over {len(found)} seed{'s' if len(found) > 1 else ''}"


def collapsed(results: Results, block: str, method: str) -> str:
    """How many runs of a method collapsed, of how many."""
    rows = list(results.of(block, method).values())
    return f"{sum(outcome_of(row).collapsed for row in rows)} of {len(rows)}" if rows else "not measured yet"


def measures_table(results: Results, block: str) -> str:
    """What the updates of a block's methods measured, means over seeds."""
    rows = []
    for name in results.grid.blocks[block].methods:
        cells = list(results.of(block, name).values())
        if not cells:
            continue
        first = [row["first_trigger"] for row in cells if row["first_trigger"] is not None]
        rows.append(
            [
                results.grid.methods[name].title,
                *(_mean(cells, column, 100, 2) for column in ("clipped_early", "clipped_late")),
                *(_mean(cells, column, 1, 3) for column in ("ratio_neg_early", "ratio_neg_late")),
                f"{min(row['ratio_neg_min'] for row in cells):.1e}",
                f"{min(first)}" if first else "none",
                _mean(cells, "vetoed", 100, 2),
                f"{min(row['ess_min'] for row in cells):.1g}",
                _mean(cells, "entropy_late", 1, 3),
            ]
        )
    if not rows:
        return ""
    head = ("Method", "Clipped %, first 100", "Clipped %, last 64", "E[ρ, A < 0], first 100", "E[ρ, A < 0], last 64")
    return markdown((*head, "Least ρ, A < 0", "First trigger", "Vetoed %", "Least ESS", "Entropy"), rows)


def tuning_table(results: Results) -> str:
    """Validation accuracy at every rate that was tried, the tuned one in bold; empty before tuning."""
    seed, rows = results.grid.tuning_seed, []
    tried = sorted({row["rate"] for row in results.rows if row["seed"] == seed})
    for name, method in results.grid.methods.items():
        found = {row["rate"]: row["after"] for row in results.rows if (row["seed"], row["method"]) == (seed, name)}
        if found:
            best = results.tuned(name).rate
            shown = {rate: f"{'**' if rate == best else ''}{100 * found[rate]:.1f}" for rate in found}
            rows.append([method.title, *(shown.get(r, "–") + ("**" if r == best else "") for r in tried)])
    return markdown(("Method", *(f"{rate:g}" for rate in tried)), rows) if rows else ""


def noise(results: Results) -> Mean | None:
    """Final accuracy of the repeated cell over its runs; None before there are two."""
    again = results.grid.noise
    rate = results.grid.blocks[again.block].rate
    key = (again.seed, again.method, rate)
    ends = [row["after"] for row in results.rows if (row["seed"], row["method"], row["rate"]) == key]
    return mean_of(ends) if len(ends) > 1 else None


def planned(results: Results) -> str:
    """How many cells the plan has; tuned cells without a rate yet count as one each."""
    cells = dict.fromkeys(wanted(results.grid, results.outcomes()))
    waits = any(isinstance(one, Waiting) for one in cells)
    return f"{'at least ' if waits else ''}{len(cells)}"


def seeds_of(results: Results, block: str) -> int:
    """Seeds at which every method of a block has finished."""
    return len(results.complete(block, results.grid.blocks[block].methods))


def summary(results: Results) -> str:
    """The study in a few sentences, for the top of the page and for README."""
    complete = seeds_of(results, "regime")
    lines = [
        f"{len(results.rows)} of {planned(results)} cells have finished, and at the regime rate {complete} of "
        f"{results.grid.seeds} seeds."
    ]
    found = findings(results)
    verdicts = {one.verdict(results.grid.seeds) for one in found}
    if verdicts == {"open"}:
        lines.append("So all four verdicts are open.")
    else:
        lines += [f"{one.contrast.claim}: {one.verdict(results.grid.seeds)}." for one in found]
    gains = []
    for name in ("none", "veto", "strict"):
        if after := results.column("regime", name, "after"):
            gain = points(mean_of(differences(after, results.column("regime", name, "before"))), 1)
            over = f"{len(after)} seed{'s' if len(after) > 1 else ''}"
            gains.append(f"{results.grid.methods[name].title} {gain} ({over})")
    if gains:
        lines.append(f"Points gained over the warm start at the regime rate: {'; '.join(gains)}.")
    return " ".join(lines)


def with_summary(readme: str, results: Results) -> str:
    """README with the study's paragraph replaced; ValueError if it has no place for it."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md needs a paragraph between {BEGIN.strip()} and {END.strip()}")
    return f"{head}{begin}{textwrap.fill(summary(results), 120)}\n{end}{tail}"


def _mean(rows: Sequence[dict[str, float]], column: str, scale: float, digits: int) -> str:
    values = [row[column] for row in rows if row[column] is not None]
    return f"{scale * statistics.fmean(values):.{digits}f}" if values else "–"


if __name__ == "__main__":
    sys.exit(main())
