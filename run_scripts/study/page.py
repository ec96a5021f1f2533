"""Write docs/study.md, its pictures, and README's paragraph about the study, from the kept results in docs/study.

python -m run_scripts.study.page
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mugrpo_megatron.files.durable import write_text
from run_scripts.study import tables
from run_scripts.study.cells import Waiting
from run_scripts.study.findings import Finding, findings
from run_scripts.study.grid import GRID, load_grid
from run_scripts.study.plots import AXIS, drawn, write_plots
from run_scripts.study.results import DOCS, Results, counted, differences, mean_of, points, read_results, scientific
from run_scripts.study.search import wanted
from run_scripts.study.short_tables import ends_without_veto, plain_table, threshold_gap, veto_table

TEMPLATE = Path(__file__).with_name("study.md.j2")
BEGIN, END = "<!-- study -->\n", "<!-- /study -->\n"
"""What README's paragraph stands between."""

QUESTIONS = {
    "tuned": "clip, veto and GRPO, each at its own rate (claims 1, 2)",
    "hot_pair": "the veto at a hot rate (claims 3, 4)",
    "schedule": "the chosen schedule and GRPO (claim 5)",
    "schedules": "all schedules, GRPO and one stage",
    "hot": "clip and scopes at a hot rate",
    "thresholds": "thresholds at the hot rate",
    "regime": "clip and scopes at one rate",
    "fresh": "GRPO at the regime rate",
    "long": "stages of 512 and 1,024, and GRPO, with 2,048 updates",
    "falling": "growth of 1.5 with a rate that falls in each stage",
}
"""Block -> what it is for, in the order in which blocks run."""

WORDS = {"holds": "Holds", "not shown": "Not shown", "open": "Open"}
"""Verdict -> how a sentence about it begins, in the order of a summary."""


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
    found = findings(results)
    page = environment.get_template(TEMPLATE.name).render(
        results=results,
        grid=results.grid,
        axis=AXIS,
        questions=QUESTIONS,
        chosen=results.chosen("schedule"),
        scientific=scientific,
        rate_of=tables.rate_of,
        methods_of=methods_of,
        advice=advice(results, found),
        verdicts=verdicts(results),
        remarks=remarks(results),
        findings=found,
        contrasts=tables.contrast_table(found, results.grid),
        pictures=drawn(results),
        noise=tables.noise(results),
        again=tables.ran_again(results),
        starts=tables.warm_starts(results),
        short_vetoes=veto_table(results.short),
        short_plain=plain_table(results.short),
        short_gap=partial(threshold_gap, results.short),
        short_ends=ends_without_veto(results.short, 5.6e-4),
        short_commits=", ".join(sorted({row["commit"] for row in results.short})),
        **_progress(results),
        **_figures(results),
    )
    return re.sub(r"\n{3,}", "\n\n", page)


def advice(results: Results, found: Sequence[Finding]) -> dict[str, str]:
    """What the page advises for clip, µ and veto, by the verdicts of claims 1, 5 and 3."""
    clip, veto, schedule = found[0], found[2], found[4]
    chosen = schedule.contrast.left
    title = results.grid.methods[chosen].title if chosen else ""
    by_verdict = {
        "clip": {
            "holds": "[0, 5], with its own tuned rate",
            "not shown": "try both: mu-GRPO is not shown to end above GRPO's clip",
            "open": "open: try both",
        },
        "mu": {
            "holds": f"{title}: less than 1 point below GRPO",
            "not shown": "4 if accuracy matters most, else several stages: one stage costs most",
            "open": "open: start with 128, and compare with 4",
        },
        "veto": {
            "holds": "`suffix_non_trigger` (H_κ), as in the paper; shown to help only at the hot rate",
            "not shown": "`suffix_non_trigger` (H_κ), as in the paper; not shown to hold accuracy here",
            "open": "`suffix_non_trigger` (H_κ), as in the paper",
        },
    }
    verdicts = {"clip": clip.verdict, "mu": schedule.verdict, "veto": veto.verdict}
    return {setting: by_verdict[setting][verdict] for setting, verdict in verdicts.items()}


def planned(results: Results) -> str:
    """How many cells the plan has; tuned cells without a rate yet count as one each."""
    cells = dict.fromkeys(wanted(results.grid, results.outcomes()))
    waits = any(isinstance(one, Waiting) for one in cells)
    return f"{'at least ' if waits else ''}{len(cells)}"


def seeds_of(results: Results, block: str) -> int:
    """Seeds at which every method of a block, and those beside them, have finished."""
    methods = methods_of(results, block)
    return len(results.complete(block, methods)) if methods else 0


def methods_of(results: Results, block: str) -> list[str]:
    """The methods of a block and those beside them, none while the block waits for the choice of the best."""
    own = results.grid.blocks[block]
    if own.best_of is None:
        return [*own.methods, *own.beside]
    chosen = results.chosen(block)
    return [chosen, *own.beside] if chosen else []


def verdicts(results: Results) -> list[str]:
    """Every claim in a sentence, those that hold first and open ones last."""
    found = sorted(enumerate(findings(results), 1), key=lambda one: list(WORDS).index(one[1].verdict))
    return [
        f"**{WORDS[one.verdict]}:** {one.contrast.claim} (claim {number}: {one.measured}{_opposite(one)})."
        for number, one in found
    ]


def remarks(results: Results) -> list[str]:
    """What makes claim 1's difference, where the veto was tried, what shorter stages cost, and how much has run."""
    decided = any(one.p is not None for one in findings(results))
    rest = (
        [*_shares(results), *_hot_ends(results), *_in_between(results), *_prices(results)]
        if decided
        else _gains(results)
    )
    return [*rest, f"{len(results.rows)} of {planned(results)} cells have finished."]


def with_summary(readme: str, results: Results) -> str:
    """README with the study's paragraphs replaced; ValueError if it has no place for them."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md needs a paragraph between {BEGIN.strip()} and {END.strip()}")
    seeds = results.grid.seeds
    lead = (
        f"Claims were planned before the runs, which take {results.grid.updates} updates. Their differences are "
        f"means over {seeds} seeds with 95 % intervals (Student's t), and the verdicts are one-sided tests at 5 %."
    )
    said = [*verdicts(results), *remarks(results)]
    items = [textwrap.fill(f"- {one}", 120, subsequent_indent="  ") for one in said]
    paragraph = "\n".join([textwrap.fill(lead, 120), "", *items])
    return f"{head}{begin}{paragraph}\n{end}{tail}"


def _progress(results: Results) -> dict[str, Any]:
    """What has run, and with which code."""
    return {
        "done": len(results.rows),
        "computed": sum(not row["same_as"] for row in results.rows),
        "planned": planned(results),
        "complete": {name: seeds_of(results, name) for name in results.grid.blocks},
        "minutes": statistics.median([row["seconds"] / 60 for row in results.rows]) if results.rows else None,
        "commits": ", ".join(sorted({one for row in results.rows for one in row["commit"].split()})),
    }


def _figures(results: Results) -> dict[str, Callable[..., str] | str]:
    """Tables and single figures, by the name that the template calls them."""
    made = (tables.accuracy_table, tables.measures_table, tables.price_table)
    single = (tables.gap, tables.collapsed, tables.value, tables.tuned_and_regime)
    return {
        **{one.__name__: partial(one, results) for one in (*made, *single)},
        "tuning": tables.tuning_table(results),
        "rate": lambda block, method: scientific(results.rate(block, method)),
    }


def _prices(results: Results) -> list[str]:
    """A sentence on the price of staleness, once a method has been compared with GRPO."""
    prices = []
    for name in AXIS[1:-1]:  # the last is claim 2
        after = results.column("schedules", name, "after")
        if apart := differences(after, results.column("schedules", AXIS[0], "after")):
            prices.append(f"µ={results.grid.methods[name].mu}: {tables.over_seeds(apart)}")
    lead = "Shorter stages minus GRPO, each at its tuned rate (exploratory):"
    return [f"{lead} {'; '.join(prices)}."] if prices else []


def _opposite(found: Finding) -> str:
    """What a verdict adds where the data point the other way."""
    if not found.opposite or found.verdict != "not shown":
        return ""
    accuracy = found.contrast.column == "after"
    return f", all of the interval below {100 * found.contrast.bound:g} points" if accuracy else ", all of it below"


def _shares(results: Results) -> list[str]:
    """A sentence on what of claim 1's difference the relaxed clip makes, and what the veto."""
    cells = {name: results.column("tuned", name, "after") for name in ("strict", "none", "veto")}
    if not all(cells.values()):
        return []
    clip, veto = (differences(cells[left], cells[right]) for left, right in (("none", "strict"), ("veto", "none")))
    idle = sum(bool(row["same_as"]) for row in results.of("tuned", "veto").values())
    return [
        f"The relaxed clip alone accounts for {points(mean_of(clip), 1)} points of claim 1's difference and the veto "
        f"for {points(mean_of(veto), 1)}: at {idle} of {counted(len(veto), 'seed')} no ratio fell below "
        f"{scientific(results.grid.trigger_ratio)}, so the veto had nothing to drop."
    ]


def _hot_ends(results: Results) -> list[str]:
    """A sentence on where the runs of claim 3 end, which their difference does not say."""
    rate, tuned = results.grid.blocks["hot_pair"].rate, results.rate("tuned", "veto")
    ends = {name: results.column("hot_pair", name, "after") for name in results.grid.blocks["hot_pair"].methods}
    if not all(ends.values()) or not rate or not tuned:
        return []
    before = statistics.fmean(results.column("hot_pair", "none", "before").values())
    none, veto = (f"{100 * statistics.fmean(after.values()):.1f} %" for after in ends.values())
    lost = [tables.collapsed(results, "hot_pair", name) for name in ends]
    return [
        f"The hot rate, {scientific(rate)}, is {rate / tuned:.3g} times mu-GRPO's tuned rate. Its runs start at "
        f"{100 * before:.1f} % and end, on average, at {none} without the veto and at {veto} with it; "
        f"{lost[0]} runs collapse without the veto, and {lost[1]} with it."
    ]


def _in_between(results: Results) -> list[str]:
    """A sentence on the veto at the regime rate, once both of its sides have a cell."""
    rate = results.grid.blocks["regime"].rate
    apart = differences(*(results.column("regime", name, "after") for name in ("veto", "none")))
    if not apart or not rate:
        return []
    return [
        f"At {scientific(rate)}, between the tuned and the hot rate, mu-GRPO minus the relaxed clip without a veto is "
        f"{tables.over_seeds(apart)} (exploratory)."
    ]


def _gains(results: Results) -> list[str]:
    """A sentence on the points gained at tuned rates, once a cell has finished there."""
    gains = []
    for name in results.grid.blocks["tuned"].methods:
        if after := results.column("tuned", name, "after"):
            gain = points(mean_of(differences(after, results.column("tuned", name, "before"))), 1)
            gains.append(f"{results.grid.methods[name].title} {gain} ({counted(len(after), 'seed')})")
    return [f"Points gained over the warm start, each at its tuned rate: {'; '.join(gains)}."] if gains else []


if __name__ == "__main__":
    sys.exit(main())
