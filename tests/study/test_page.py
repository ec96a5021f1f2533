"""The published page is what the kept results say, and verdicts say no more than intervals do."""

from __future__ import annotations

import json

import pytest

from run_scripts.study import page, tables, timing
from run_scripts.study.grid import load_grid
from run_scripts.study.plots import PICTURES
from run_scripts.study.results import CLOCK, DOCS, Mean, Results, read_results


@pytest.fixture(scope="module")
def published() -> Results:
    return read_results(load_grid(), DOCS)


def test_the_page_is_that_of_the_kept_results(published: Results) -> None:
    """After a change of either, run `python -m run_scripts.study.page`."""
    assert (DOCS.parent / "study.md").read_text(encoding="utf-8") == page.text(published, DOCS)


def test_every_picture_is_there_and_on_the_page() -> None:
    text = (DOCS.parent / "study.md").read_text(encoding="utf-8")
    assert {path.stem for path in DOCS.glob("*.svg")} == PICTURES.keys()
    assert all(f'src="study/{name}.svg"' in text for name in PICTURES)


def test_every_kept_cell_has_its_curve_and_belongs_to_the_grid(published: Results) -> None:
    variants = published.grid.variants()
    for row in published.rows:
        assert row["updates"] == variants[row["variant"]].updates
        assert row["mu"] == variants[row["variant"]].mu
        assert published.curve(row)["evals"][-1][3] == pytest.approx(row["accuracy"])
    assert len({json.dumps([row["kind"], row["variant"], row["rate"], row["seed"]]) for row in published.rows}) == len(
        published.rows
    )


@pytest.mark.parametrize(
    ("apart", "says"),
    [
        (None, "not measured"),
        (Mean(0.05, None, 1), "open (one seed)"),
        (Mean(0.0, 0.005, 3), "holds"),
        (Mean(0.0, 0.02, 3), "open"),
        (Mean(-0.05, 0.02, 3), "does not hold"),
    ],
)
def test_a_verdict_needs_an_interval_on_one_side(apart: Mean | None, says: str) -> None:
    assert tables.verdict(apart, -0.01) == says


def test_every_comparison_is_of_variants_in_the_grid(published: Results) -> None:
    known = published.grid.variants()
    named = {name for one in (*tables.PAPERS, *tables.BEYOND) for name in (one.left, one.right)}
    named |= {name for one in tables.SETTINGS for name in (one.mu_grpo, one.relaxed, one.strict, one.grpo)}
    assert named <= known.keys()


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        (Mean(200.0, None, 1), "open (one run a side)"),
        (Mean(2.0, 3.0, 3), "open"),
        (Mean(2.0, 1.0, 3), "holds"),
        (Mean(-2.0, 1.0, 3), "does not hold"),
        (None, "not measured"),
    ],
)
def test_wall_clock_needs_an_interval(saved: Mean | None, says: str) -> None:
    assert timing.speed_verdict(saved) == says


def test_a_time_that_some_runs_never_reach_decides_nothing(published: Results) -> None:
    """The goal lies half a point below the lower mean, so a run whose last evaluation is lower never reaches it."""
    level = timing.same_accuracy(published)
    last = [published.curve(row)["evals"] for row in published.tuned("mu_grpo", CLOCK)]
    reached = sum(any(point[3] >= level for point in evals) for evals in last)
    (row,) = (line for line in timing.speed_claims(published).splitlines() if "same accuracy | engine sleeps" in line)
    assert f"{reached} of {len(last)}" in row
    assert row.endswith("| open: not every run gets there |") is (reached < len(last))


def test_every_rate_above_the_tuned_ones_is_listed_and_none_has_a_verdict(published: Results) -> None:
    one = tables.SETTINGS[1]
    tuned, above = max(published.grid.rates), max(published.grid.all_rates())
    ends: dict[tuple[str, float], tuple[float, ...]] = {
        (one.relaxed, above): (0.4, 0.5, 0.6),
        (one.mu_grpo, above): (0.6, 0.6, 0.6),
    }
    ends |= {(name, tuned): (0.1,) for name in (one.relaxed, one.mu_grpo)}
    rows = [
        {"kind": "study", "variant": variant, "rate": rate, "seed": seed, "accuracy": accuracy}
        for (variant, rate), accuracies in ends.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    _, _, *lines = tables.edge_table(Results(published.grid, rows, {}), before=0.55).splitlines()
    assert lines == [
        f"| 1 stage of 128 | {above:g} | 50.0 ± 24.8 | 60.0 ± 0.0 | – | 2 of 3 | 0 of 3 | 0.40 | +10.0 ± 24.8 |"
    ]
    told = [line for line in tables.edge_table(published, 0.5).splitlines() if "1 stage of 128" in line]
    assert [line.split(" | ")[1] for line in told] == ["0.00056", "0.0008"]
    assert not any(word in line for line in told for word in ("holds", "open"))


def test_trl_is_compared_at_the_same_rate(published: Results) -> None:
    runs = [
        {"side": side, "rate": rate, "points": [[0, 0.0, 0.0, 0.5], [8, 2.0, 1.0, end]]}
        for side, rate, end in (("TRL, µ=4", 9.0, 0.60), ("ours, grpo, µ=4", 9.0, 0.63), ("ours, grpo, µ=4", 8.0, 0.9))
    ]
    assert timing.trl_gap(runs, published) == pytest.approx(3.0)
    assert timing.trl_table(runs).splitlines()[-1] == "| ours, grpo, µ=4 | 9 | 50.0 | 63.0 | 2.0 | 1.0 |"


def test_the_seconds_to_a_goal_lie_between_evaluations() -> None:
    slow, fast = (
        {"side": side, "points": [[0, 0.0, 0.0, 0.5], [8, wall, wall / 2, 0.6]]}
        for side, wall in (("a", 8.0), ("b", 2.0))
    )
    rows = timing.trl_clock_table([slow, fast], 0.55).splitlines()[-2:]
    assert rows == ["| b | 60.0 | 2.0 | 1.0 | 1.0 | 0.5 |", "| a | 60.0 | 8.0 | 4.0 | 4.0 | 2.0 |"]
    assert timing.trl_clock_table([slow], 0.7).endswith("| – | – |")


def test_an_end_of_the_grid_is_told_only_where_nothing_was_tried_beyond_it() -> None:
    grid = load_grid()
    low, high = grid.rates[0], grid.rates[-1]

    def told(accuracies: dict[float, float]) -> str:
        rows = [
            {"kind": "study", "variant": "grpo", "rate": rate, "seed": 0, "accuracy": accuracy}
            for rate, accuracy in accuracies.items()
        ]
        return tables.edges(Results(grid, rows, {}))

    falling = {rate: 0.6 - rate for rate in grid.rates}
    rising = {rate: 0.6 + rate for rate in grid.rates}
    assert "GRPO, µ=4 (lowest)" in told(falling)
    assert "GRPO, µ=4 (lowest)" in told(falling | {high * 2: 0.1})  # the other end
    assert "GRPO" not in told(falling | {low / 2: 0.1})
    assert "GRPO, µ=4 (lowest)" in told(falling | {low / 2: 0.9})
    assert "GRPO, µ=4 (highest)" in told(rising)
    assert "GRPO" not in told(rising | {high * 2: 0.1})
