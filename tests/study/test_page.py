"""The published page is what the kept results say, and verdicts say no more than all seeds do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from run_scripts.study import page
from run_scripts.study.cells import Cell
from run_scripts.study.collect import CELL_COLUMNS, CURVE_COLUMNS
from run_scripts.study.findings import findings
from run_scripts.study.grid import load_grid
from run_scripts.study.results import DOCS, Results, Row, cell_of, read_results
from run_scripts.study.short_tables import BELOW
from run_scripts.study.tables import accuracy_table, collapsed, price_table, ran_again, tuned_and_regime, warm_starts

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
        row(seed, method, rate, after := 0.5 + gains.get(method, 0.0), ratio_neg_late=after + 0.5, repeat=repeat)
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
    assert "open" not in text.partition("## The price")[0].replace('"open"', "")
    assert "| 8 of 8 | one | 0.016 | holds |" in text
    assert "| 8 of 8 | two | 0.004 | holds |" in text
    assert "not measured yet" not in text
    assert "has finished yet" not in text
    assert collapsed(whole, "hot_pair", "none") == "8 of 8"
    assert collapsed(whole, "hot", "veto") == "0 of 3"


def test_advice_follows_the_verdicts() -> None:
    def advised(results: Results) -> list[str]:
        rows = page.text(results).partition("## Advice")[2].splitlines()
        return [row.split(" | ")[1] for row in rows if row.startswith(("| clip", "| µ", "| `veto`"))]

    clip, mu, veto = advised(finished(veto=0.1, four=0.1))
    assert clip == "[0, 5], with its own tuned rate"
    assert veto.endswith("shown to help only at the hot rate")
    assert mu == "4 stages of 128: less than 1 point below GRPO"
    clip, mu, veto = advised(finished(four=-0.2))
    assert "not shown to end above GRPO's clip" in clip
    assert mu.startswith("4 if accuracy matters most")
    assert "not shown to hold accuracy" in veto
    clip, mu, veto = advised(Results(GRID, [], []))
    assert (clip, mu) == ("open: try both", "open: start with 128, and compare with 4")
    assert veto.endswith("as in the paper")


def test_a_page_without_cells_says_so_in_a_line_and_shows_no_empty_table() -> None:
    text = page.text(Results(GRID, [], []))
    assert text.count("No cell of this section has finished yet.") == 7
    assert "<img" not in text
    assert "\n\n\n" not in text
    tables = [part for part in text.split("\n\n") if part.startswith("|")]
    assert all(len(table.splitlines()) > 2 for table in tables)


def test_rows_of_a_table_are_of_the_seeds_of_its_block() -> None:
    """GRPO has eight seeds at its tuned rate, but is compared on the three that the schedules have."""
    whole = finished(grpo=0.2)
    rows = {line.split(" | ")[2]: line for line in price_table(whole, page.AXIS).splitlines()[2:]}
    assert rows["GRPO, µ=4"] == "| 4 | 128 | GRPO, µ=4 | 8·10⁻⁵ | 3 | 70.0 ± 0.0 | – |"
    assert rows["4 stages of 128"].endswith("| 3 | 50.0 ± 0.0 | -20.0 ± 0.0 |")
    assert " | 8 | " in accuracy_table(whole, "tuned", ["grpo"])
    assert " | 3 | " in accuracy_table(whole, "schedules", ["four"])
    assert accuracy_table(Results(GRID, [], []), "tuned", ["grpo"]) == ""


def test_the_evidence_on_rates_is_the_best_rate_and_the_regime_rate_of_the_tuning_seed() -> None:
    ends = {2e-5: 0.85, 4e-5: 0.85, 8e-5: 0.54}
    rows = [row(GRID.tuning_seed, "none", rate, after) for rate, after in ends.items()]
    assert tuned_and_regime(Results(GRID, rows, []), "none") == "85.0 % at 2·10⁻⁵, 54.0 % at 8·10⁻⁵"
    assert tuned_and_regime(Results(GRID, rows[:2], []), "none") == "not measured yet"


def test_the_summary_says_the_verdicts_first_and_then_the_price_of_staleness() -> None:
    whole = finished(veto=0.1, four=-0.2, eight=-0.1)
    said = page.verdicts(whole)
    claim = "on one stage of 512 updates, mu-GRPO ends above GRPO's clip"
    assert said[0] == f"**Holds:** {claim} (claim 1: +10.0 ± 0.0 points)."
    assert [one.split(":")[0] for one in said] == ["**Holds"] * 4 + ["**Not shown"]
    assert said[4].startswith("**Not shown:** with 4 stages of 128, mu-GRPO ends less than")
    assert said[4].endswith("(claim 5: -20.0 ± 0.0 points, all of the interval below -1 points).")
    shares, hot, between, shorter, done = page.remarks(whole)
    assert "accounts for +0.0 ± 0.0 points of claim 1's difference and the veto for +10.0 ± 0.0: at 0 of" in shares
    assert "at 45.0 % and end, on average, at 50.0 % without the veto and at 60.0 % with it" in hot
    assert between.startswith("At 8·10⁻⁵, between the tuned and the hot rate, mu-GRPO minus")
    assert between.endswith("without a veto is +10.0 ± 0.0 points over 3 seeds (exploratory).")
    assert shorter.endswith("µ=64: -10.0 ± 0.0 points over 3 seeds; µ=128: -20.0 ± 0.0 points over 3 seeds.")
    assert done == f"{len(whole.rows)} of {page.planned(whole)} cells have finished."


def test_cells_that_ran_twice_from_one_warm_start_tell_how_far_chance_moves_them() -> None:
    first = row(5, "none", 1.6e-4, 0.3)
    again = {**first, "repeat": 1, "after": 0.34}
    elsewhere = {**first, "repeat": 2, "before": 0.6, "after": 0.9}
    assert ran_again(Results(GRID, [first, again, elsewhere], [])) == [pytest.approx(0.04)]


def test_a_warm_start_that_was_made_again_counts_as_another() -> None:
    whole = finished()
    start = {0: (0, 0.45), 1: (1, 0.45), 2: (0, 0.55)}
    rows = [one | dict(zip(("warm_start", "before"), start[one["seed"] % 3], strict=True)) for one in whole.rows]
    assert warm_starts(replace(whole, rows=rows)) == 3


def test_claims_that_wait_for_seeds_are_open_and_come_last() -> None:
    whole = finished(four=0.1)
    part = [one for one in whole.rows if cell_of(one) != Cell(7, "strict", 8e-5)]
    said = page.verdicts(replace(whole, rows=part))
    assert [one.split(":")[0] for one in said] == ["**Holds", *["**Open"] * 4]
    assert "with 4 stages of 128" in said[0]


def test_the_page_counts_what_is_left() -> None:
    nothing = Results(GRID, [], [])
    fixed = 2 * 8 + (6 + 4 + 8 + 1) * 3 + 2  # claims 3 and 4; hot, thresholds, regime and fresh; noise
    fixed += 2  # claim 3's methods again, where the cells of hot are a second draw
    waiting = 4 * 8 + 8 + (5 + 3 + 1) * 3
    assert page.planned(nothing) == f"at least {fixed + waiting + (4 + 5 + 1) * len(GRID.start)}"
    (done,) = page.remarks(nothing)
    assert done == f"0 of {page.planned(nothing)} cells have finished."
    own = 8 + 4 * 3 + 3 * 3 + 3  # the chosen schedule, the others, the paper's shape, part five
    own += 4 * 6  # claims 1 and 2 at the seeds without regime cells of that draw: here every tuned rate is the regime's
    own += 3  # GRPO again, where the chosen schedule's cell is a second draw
    assert page.planned(finished()) == str(fixed + own + (4 + 5 + 1) * 3)
