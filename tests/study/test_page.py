"""The published page is what the kept results say, and verdicts say no more than all seeds do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from run_scripts.study import page
from run_scripts.study.collect import CELL_COLUMNS, CURVE_COLUMNS
from run_scripts.study.grid import Cell, load_grid
from run_scripts.study.results import DOCS, Results, Row, cell_of, read_results

GRID = load_grid()
PUBLISHED = read_results(GRID)


def row(seed: int, method: str, rate: float, after: float, **changed: object) -> Row:
    numbers = dict.fromkeys(CELL_COLUMNS, 0.0)
    texts = {"stage": "s", "same_as": "", "commit": "c", "first_trigger": None}
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
        row(seed, method, rate, 0.5 + gains.get(method, 0.0), ratio_neg_late=1.0 + gains.get(method, 0.0))
        for seed, method, rate in cells
    ]
    return Results(GRID, [*tuning, *own], [])


def test_the_page_is_that_of_the_kept_results() -> None:
    """After a change of either, run `python -m run_scripts.study.page`."""
    assert (DOCS.parent / "study.md").read_text(encoding="utf-8") == page.text(PUBLISHED)


def test_the_kept_cells_are_cells_of_the_plan_and_share_their_seeds_stage() -> None:
    stages: dict[tuple[int, int], set[str]] = {}
    for one in PUBLISHED.rows:
        cell = cell_of(one)
        assert one["updates"] == GRID.updates
        assert one["commit"]
        assert PUBLISHED.curve(one)[-1]["update"] == GRID.updates
        assert PUBLISHED.curve(one)[-1]["accuracy"] == pytest.approx(one["after"], abs=1e-4)
        if GRID.shares_stage(cell.method):
            stages.setdefault((cell.seed, cell.repeat), set()).add(one["stage"])
    assert all(len(found) == 1 and "" not in found for found in stages.values())
    assert len({cell_of(one) for one in PUBLISHED.rows}) == len(PUBLISHED.rows)
    assert not PUBLISHED.rows or set(PUBLISHED.rows[0]) == set(CELL_COLUMNS)
    assert not PUBLISHED.curves or set(PUBLISHED.curves[0]) == set(CURVE_COLUMNS)


def test_verdicts_are_open_until_every_seed_has_run() -> None:
    whole = finished(veto=0.1)
    assert [one.verdict(GRID.seeds) for one in page.findings(whole)] == ["holds"] * 4
    missing = Cell(7, "veto", GRID.blocks["hot"].rate or 0.0)
    part = replace(whole, rows=[one for one in whole.rows if cell_of(one) != missing])
    assert [one.verdict(GRID.seeds) for one in page.findings(part)] == ["open"] * 4
    assert [len(one.values) for one in page.findings(part)] == [8, 8, 7, 7]


def test_a_verdict_is_that_of_the_corrected_test() -> None:
    found = page.findings(finished(veto=-0.005))
    assert [one.verdict(GRID.seeds) for one in found] == ["not shown", "holds", "not shown", "not shown"]
    assert found[1].p == pytest.approx(4 / 256)  # half a point below GRPO is less than one


def test_a_finished_study_is_written_without_gaps() -> None:
    whole = finished(veto=0.1, none=-0.4)
    text = page.text(whole)
    assert "open" not in text.partition("## Inside")[0].replace('"open"', "")
    assert "| 8 of 8 | 0.016 | holds |" in text
    assert "not measured yet" not in text
    assert page.collapsed(whole, "hot", "none") == "8 of 8"
    assert page.collapsed(whole, "hot", "veto") == "0 of 8"


def test_the_page_counts_what_is_left() -> None:
    nothing = Results(GRID, [], [])
    waiting = (8 + 8 + 1) * GRID.seeds + 4 * GRID.seeds + 4 * len(GRID.start) + GRID.noise.times
    assert page.planned(nothing) == f"at least {waiting}"
    assert page.summary(nothing).startswith("0 of at least")
    assert page.planned(finished()) == str(waiting - 4 * GRID.seeds + 4)  # tuned rates are the regime's; 4 more rates
