"""The published page and README say what the kept results do, and verdicts say no more than all seeds do."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from run_scripts.study import page
from run_scripts.study.cells import Cell
from run_scripts.study.collect import CELL_COLUMNS, CURVE_COLUMNS
from run_scripts.study.findings import findings
from run_scripts.study.grid import load_grid
from run_scripts.study.results import DOCS, Results, Row, cell_of, differences, read_results, student_tail
from run_scripts.study.short_tables import BELOW
from run_scripts.study.tables import (
    collapsed,
    reading,
)

GRID = load_grid()
PUBLISHED = read_results(GRID)
README = (DOCS.parents[1] / "README.md").read_text(encoding="utf-8")


def row(seed: int, method: str, rate: float, after: float, **changed: object) -> Row:
    numbers = dict.fromkeys(CELL_COLUMNS, 0.0)
    texts = {"stage": "s", "same_as": "", "commit": "c", "first_trigger": None, "updates": 512}
    own = {"seed": seed, "repeat": 0, "method": method, "rate": rate, "problems": 500, "before": 0.45, "after": after}
    return numbers | texts | own | changed


def finished(**gains: float) -> Results:
    """Every cell of the study done, with a method's final accuracy at 0.5 plus its gain; tuning ends at 8e-5."""
    ladder = {rate: 0.6 - abs(GRID.ladder.index(rate) - 5) / 100 for rate in GRID.ladder}
    tuning = [row(GRID.tuning_seed, method, rate, after) for method in GRID.methods for rate, after in ladder.items()]
    rates = [block.rate for block in GRID.blocks.values() if block.rate]
    cells = dict.fromkeys(
        (seed, method, rate) for seed in range(GRID.seeds) for method in GRID.methods for rate in rates
    )
    own = [
        row(
            *(seed, method, rate, after := 0.5 + gains.get(method, 0.0)),
            ratio_neg_late=after + 0.5,
            repeat=repeat,
            warm_start=seed % 3,
        )
        for seed, method, rate in cells
        for repeat in (0, 1)
    ]
    short = {"seed": 0, "rate": 5.6e-4, "objective": "mu_grpo", "veto": "none", "threshold": None, "commit": "c"}
    short |= {"before": 0.5, "after": 0.4, "ratio_neg_min": 1e-5, **dict.fromkeys(BELOW, 0.0)}
    vetoed = [short | {"veto": "suffix_non_trigger", "threshold": threshold} for threshold in (1e-4, 0.1)]
    return Results(GRID, [*tuning, *own], [], [short, *vetoed])


def test_the_page_is_that_of_the_kept_results() -> None:
    """After a change of either, run `python -m run_scripts.study.page`."""
    assert (DOCS.parent / "study.md").read_text(encoding="utf-8") == page.text(PUBLISHED)


def test_the_kept_cells_are_cells_of_the_plan_and_share_their_seeds_warm_start_and_stage() -> None:
    """Those of the tuning seed may have another start: they are compared with cells of their own method only."""
    stages: dict[tuple[int, int], set[str]] = {}
    starts: dict[tuple[int, int], set[float]] = {}
    for one in PUBLISHED.rows:
        cell = cell_of(one)
        assert one["updates"] == GRID.methods[cell.method].updates
        assert one["commit"]
        assert PUBLISHED.curve(one)[-1]["update"] == one["updates"]
        assert PUBLISHED.curve(one)[-1]["accuracy"] == pytest.approx(one["after"], abs=1e-4)
        if cell.seed != GRID.tuning_seed:
            starts.setdefault((cell.seed, cell.repeat), set()).add(one["before"])
            if GRID.shares_stage(cell.method):
                stages.setdefault((cell.seed, cell.repeat), set()).add(one["stage"])
    assert all(len(found) == 1 for found in starts.values())
    assert all(len(found) == 1 and "" not in found for found in stages.values())
    assert len({cell_of(one) for one in PUBLISHED.rows}) == len(PUBLISHED.rows)
    assert not PUBLISHED.rows or set(PUBLISHED.rows[0]) == set(CELL_COLUMNS)
    assert not PUBLISHED.curves or set(PUBLISHED.curves[0]) == set(CURVE_COLUMNS)


def verdicts(results: Results) -> list[str]:
    return [one.verdict for one in findings(results)]


def test_verdicts_are_open_until_every_seed_has_run() -> None:
    whole = finished(veto=0.1, four=0.1)
    assert verdicts(whole) == ["holds"] * 5
    missing = Cell(7, "veto", GRID.blocks["hot"].rate or 0.0)
    part = replace(whole, rows=[one for one in whole.rows if cell_of(one) != missing])
    assert verdicts(part) == ["open"] * 4 + ["holds"]  # part two is a family of its own
    assert [len(one.values) for one in findings(part)] == [8, 8, 7, 7, 8]
    missing = Cell(7, "four", 8e-5)
    part = replace(whole, rows=[one for one in whole.rows if cell_of(one) != missing])
    assert verdicts(part) == ["holds"] * 4 + ["open"]


def test_a_verdict_is_that_of_the_corrected_test() -> None:
    found = findings(finished(veto=-0.005, four=-0.005))
    assert [one.verdict for one in found] == ["not shown", "holds", "not shown", "not shown", "holds"]
    assert found[1].p == pytest.approx(4 / 256)  # half a point below GRPO is less than one
    assert found[4].p == pytest.approx(1 / 256)  # a family of one test
    assert verdicts(finished(four=-0.01))[4] == "not shown"


def test_the_fifth_contrast_is_of_the_schedule_that_the_tuning_seed_chose() -> None:
    whole = finished(grow=0.1, four=-0.1)
    better = Cell(GRID.tuning_seed, "grow", 8e-5)
    rows = [{**one, "after": 0.9} if cell_of(one) == better else one for one in whole.rows]
    fifth = findings(replace(whole, rows=rows))[4]
    assert (fifth.contrast.left, fifth.contrast.right, fifth.verdict) == ("grow", "grpo", "holds")
    assert "with 8 stages that double" in fifth.contrast.claim
    untuned = [one for one in rows if cell_of(one) != replace(better, method="eight")]
    fifth = findings(replace(whole, rows=untuned))[4]
    assert (fifth.contrast.left, fifth.values, fifth.verdict) == (None, [], "open")


def test_a_finished_study_is_written_without_gaps() -> None:
    whole = finished(veto=0.1, four=0.1, none=-0.4)
    text = page.text(whole)
    assert "| 8 of 8 | 0.016 | +10.0 ± 0.0 points | 3 | – | holds if seeds count as independent |" in text  # no spread
    assert "not measured yet" not in text
    assert "has finished yet" not in text.partition("**The gap opens early.**")[0]
    assert collapsed(whole, "hot_pair", "none") == "8 of 8"
    assert collapsed(whole, "hot", "veto") == "0 of 3"


def test_a_claim_is_tested_over_warm_starts_too() -> None:
    """Eight seeds of three starts: every seed gains, but one start's seeds gain nearly nothing."""
    whole = finished()
    gain = {0: 0.001, 1: 0.1, 2: 0.4}
    rows = [
        one | {"warm_start": one["seed"] % 3, "after": one["after"] + gain[one["seed"] % 3] * (one["method"] == "veto")}
        for one in whole.rows
    ]
    first = findings(replace(whole, rows=rows))[0]
    assert first.starts == pytest.approx([0.001, 0.1, 0.4])
    assert first.verdict == "holds"
    assert first.depends_on_seeds
    assert reading(first) == "holds if seeds count as independent"
    again = [one | {"before": 0.55 if one["seed"] == 3 else one["before"]} for one in whole.rows]
    assert len(findings(replace(whole, rows=again))[0].starts) == 4, "a warm start that was made again is another"


def test_the_published_claims_over_warm_starts() -> None:
    """What an outside recomputation of the kept cells found: one-sided t, Holm over the first four."""
    found = findings(PUBLISHED)
    assert [len(one.starts) for one in found] == [5, 5, 5, 5, 3]
    assert [one.measured_by_start.split()[0] for one in found] == ["+11.9", "-9.2", "+8.2", "+0.049", "-4.0"]
    assert [one.p_starts for one in found[:3]] == pytest.approx([0.0051, 0.998, 0.0579], abs=5e-4)
    assert [one.depends_on_seeds for one in found] == [False, False, True, False, False]
    assert [one.opposite for one in found] == [False, True, False, False, False]


def test_students_tail_is_that_of_the_tables() -> None:
    for freedom, quantile in ((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (7, 2.365)):
        n = freedom + 1
        spread = [(-1.0) ** place for place in range(n - n % 2)] + [0.0] * (n % 2)
        half = statistics.stdev(spread) / n**0.5
        assert student_tail([one + quantile * half for one in spread]) == pytest.approx(0.025, abs=2e-5)
    assert student_tail([0.1]) is None
    assert student_tail([0.1, 0.1]) is None


def test_the_readme_says_of_the_study_what_its_csv_says() -> None:
    """After a change of either, run `python -m run_scripts.study.page`."""
    assert page.with_summary(README, PUBLISHED) == README


def test_the_readmes_table_has_the_studys_differences() -> None:
    first, second = findings(PUBLISHED)[:2]
    best = differences(PUBLISHED.column("falling", "mild_decay", "after"), PUBLISHED.column("falling", "grpo", "after"))
    points_of = [f"{abs(100 * statistics.fmean(values)):.1f}" for values in (second.values, best, first.values)]
    assert "{} points below on one stage, {} with the best schedule".format(*points_of[:2]) in README
    assert f"{points_of[2]} points below mu-GRPO, and it still learns" in README


def test_a_readme_without_a_place_for_the_study_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a paragraph between"):
        page.with_summary(README.replace(page.END, ""), PUBLISHED)
