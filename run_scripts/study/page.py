"""Write docs/study.md, its pictures, and README's paragraph about the study, from the kept results in docs/study.

python -m run_scripts.study.page
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mugrpo_megatron.files.durable import write_text
from run_scripts.study import tables
from run_scripts.study.cells import Waiting
from run_scripts.study.findings import Finding, findings
from run_scripts.study.grid import GRID, load_grid
from run_scripts.study.plots import drawn, write_plots
from run_scripts.study.results import DOCS, Results, counted, differences, mean_of, points, read_results, scientific
from run_scripts.study.search import wanted
from run_scripts.study.short_tables import veto_table

TEMPLATE = Path(__file__).with_name("study.md.j2")
BEGIN, END = "<!-- study -->\n", "<!-- /study -->\n"
"""What README's paragraph stands between."""
ENOUGH = 2.56e-3
"""The sum of learning rates beyond which one stage gains little on the tuning seed."""
GUESS = (
    "We think the cause is how far one stage has to move the policy: from {greedy} % ({sampled} % when sampled) GRPO "
    "gains {gain} points here, while a stage of the paper's Figure 3 gains 3. This is a guess."
)


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
        chosen=results.chosen("schedule"),
        scientific=scientific,
        enough=ENOUGH,
        answer=answer(results),
        summary=items([*shares(results), *hot_ends(results)]),
        advice=advice(results, found),
        contrasts=tables.contrast_table(found, results.grid),
        pictures=drawn(results),
        noise=tables.noise(results),
        again=tables.ran_again(results),
        starts=[len(one.starts) for one in found],
        short_vetoes=veto_table(results.short),
        **_progress(results),
        **_figures(results),
    )
    return wrapped(re.sub(r"\n{3,}", "\n\n", page))


def wrapped(page: str, width: int = 120) -> str:
    """A Markdown page whose paragraphs and list items are filled; tables, pictures, headings and code are kept."""
    fill = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    blocks = []
    for block in page.strip().split("\n\n"):
        if block.startswith("- "):
            listed = re.split(r"\n(?=- )", block)
            blocks.append("\n".join(fill(" ".join(item.split()), subsequent_indent="  ") for item in listed))
        else:
            blocks.append(block if block.startswith(("|", "<", "#", "    ")) else fill(" ".join(block.split())))
    return "\n\n".join(blocks) + "\n"


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
            "holds": "`suffix_non_trigger` (H_κ); here it acts only at rates that are too high",
            "not shown": "`suffix_non_trigger` (H_κ); not shown to hold accuracy here",
            "open": "`suffix_non_trigger` (H_κ)",
        },
    }
    outcomes = {"clip": clip.verdict, "mu": schedule.verdict, "veto": veto.verdict}
    return {setting: by_verdict[setting][verdict] for setting, verdict in outcomes.items()}


def planned(results: Results) -> str:
    """How many cells the plan has; tuned cells without a rate yet count as one each."""
    cells = dict.fromkeys(wanted(results.grid, results.outcomes()))
    waits = any(isinstance(one, Waiting) for one in cells)
    return f"{'at least ' if waits else ''}{len(cells)}"


def answer(results: Results) -> str:
    """The plain sentence: mu-GRPO on one stage against GRPO, the paper's finding, and our guess why they differ."""
    cells = {name: results.column("tuned", name, "after") for name in ("veto", "grpo")}
    apart = differences(cells["veto"], cells["grpo"])
    if not apart:
        return "Claim 2, whether one stage ends below GRPO, is open."
    mean = 100 * mean_of(apart).value
    where = f"{abs(mean):.1f} points {'below' if mean < 0 else 'above'} GRPO"
    lead = (
        f"In our study mu-GRPO on one stage of {results.grid.updates} updates ends {where} "
        f"({tables.over_seeds(apart)}). The paper finds the two equal within -2.1 to +2.5 points."
    )
    if mean >= -1:
        return lead
    before = statistics.fmean(results.column("tuned", "veto", "before").values())
    sampled = statistics.fmean(results.column("tuned", "veto", "stage_reward").values())
    gain = statistics.fmean(differences(cells["grpo"], results.column("tuned", "grpo", "before")))
    guess = GUESS.format(greedy=f"{100 * before:.0f}", sampled=f"{100 * sampled:.0f}", gain=f"{100 * gain:.0f}")
    return f"{lead} {guess}"


def with_summary(readme: str, results: Results) -> str:
    """README with the study's paragraphs replaced; ValueError if it has no place for them."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md needs a paragraph between {BEGIN.strip()} and {END.strip()}")
    said = items([*schedules(results), *shares(results)])
    paragraph = f"{textwrap.fill(answer(results), 120)}\n\n{said}".rstrip()
    return f"{head}{begin}{paragraph}\n{end}{tail}"


def items(sentences: Sequence[str]) -> str:
    """A Markdown list."""
    return "\n".join(textwrap.fill(f"- {one}", 120, subsequent_indent="  ") for one in sentences)


def schedules(results: Results) -> list[str]:
    """A sentence on the schedules that come closest to GRPO: the best one explored, and the one of claim 5."""
    best = {
        (block, name): differences(results.column(block, name, "after"), results.column(block, "grpo", "after"))
        for block in ("schedules", "falling")
        for name in results.grid.blocks[block].methods
    }
    best = {entry: apart for entry, apart in best.items() if apart}
    if not best:
        return []
    (_, name), apart = max(best.items(), key=lambda one: statistics.fmean(one[1]))
    said = f"Closest to GRPO: {results.grid.methods[name].title}, {tables.over_seeds(apart)} (exploratory)."
    fifth = findings(results)[4]
    if fifth.contrast.left and fifth.values and fifth.contrast.left != name:
        title = results.grid.methods[fifth.contrast.left].title
        said += f" Claim 5, the schedule that tuning chose: {title}, {tables.over_seeds(fifth.values)}."
    return [said]


def shares(results: Results) -> list[str]:
    """A sentence on what of claim 1's difference the relaxed clip makes, and what the veto."""
    cells = {name: results.column("tuned", name, "after") for name in ("strict", "none", "veto")}
    if not all(cells.values()):
        return []
    clip, veto = (differences(cells[left], cells[right]) for left, right in (("none", "strict"), ("veto", "none")))
    idle = sum(bool(row["same_as"]) for row in results.of("tuned", "veto").values())
    return [
        "On one stage, each at its tuned learning rate, the relaxed clip is worth "
        f"{points(mean_of(clip), 1)} points over GRPO's clip and the veto {points(mean_of(veto), 1)} more: at "
        f"{idle} of {counted(len(veto), 'seed')} no ratio fell below {scientific(results.grid.trigger_ratio)}, so the "
        "veto had nothing to drop."
    ]


def hot_ends(results: Results) -> list[str]:
    """A sentence on where the runs of claim 3 end, which their difference does not say."""
    rate, tuned = results.grid.blocks["hot_pair"].rate, results.rate("tuned", "veto")
    ends = {name: results.column("hot_pair", name, "after") for name in results.grid.blocks["hot_pair"].methods}
    if not all(ends.values()) or not rate or not tuned:
        return []
    before = statistics.fmean(results.column("hot_pair", "none", "before").values())
    none, veto = (f"{100 * statistics.fmean(after.values()):.1f} %" for after in ends.values())
    apart = mean_of(differences(ends["veto"], ends["none"]))
    return [
        f"At {scientific(rate)}, {rate / tuned:.3g} times mu-GRPO's tuned rate, the veto is worth {points(apart, 1)} "
        f"points, but both end far below the start: from {100 * before:.1f} %, {veto} with it and {none} without."
    ]


def _progress(results: Results) -> dict[str, Any]:
    """What has run, and with which code."""
    return {
        "done": len(results.rows),
        "computed": sum(not row["same_as"] for row in results.rows),
        "planned": planned(results),
        "minutes": statistics.median([row["seconds"] / 60 for row in results.rows]) if results.rows else None,
        "commits": len({one for row in results.rows for one in row["commit"].split()}),
    }


def _figures(results: Results) -> dict[str, Any]:
    """Tables and single figures, by the name that the template calls them."""
    made = (tables.accuracy_table, tables.price_table, tables.measures_table, tables.ruin_table, tables.gains_table)
    more = (tables.displacement_table, tables.gap, tables.collapsed, tables.value, tables.clipped_tokens)
    return {
        **{one.__name__: partial(one, results) for one in (*made, *more)},
        "first_draw": tables.first_draw(results),
        "first_draw_gap": tables.first_draw_gap(results),
        "rate": lambda block, method: scientific(results.rate(block, method)),
    }


if __name__ == "__main__":
    sys.exit(main())
