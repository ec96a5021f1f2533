"""The law's formula: it finds its own constants, its interval holds nine of ten cells, claim 8 follows from both."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from run_scripts.study import six_passes, six_plots
from run_scripts.study.collect import CELL_COLUMNS, write_rows
from run_scripts.study.grid import GRID, load_grid
from run_scripts.study.law_formula import (
    COVERAGE,
    FITTED,
    NO_NATS,
    PREDICTED,
    Gap,
    Law,
    fit,
    law_gaps,
    main,
    miss,
    prediction_table,
    read,
    read_gaps,
    reading,
)
from run_scripts.study.results import CELLS, DOCS
from run_scripts.svg import write_svg

TRUE = Law(height=0.2, scale=0.5, half=0.0, cells=0)


def cells(noise: float, count: int = 40) -> list[Gap]:
    rng = np.random.default_rng(0)
    bare = [Gap("stage", nats, errors, None) for nats, errors in zip(*rng.uniform(0.05, 1.0, (2, count)), strict=True)]
    return [Gap(one.method, one.nats, one.errors, _noisy(one, noise * rng.normal())) for one in bare]


def _noisy(cell: Gap, share: float) -> float:
    return TRUE.interval(cell)[1] + share * cell.errors


def test_a_fit_finds_the_constants_of_cells_that_follow_the_law() -> None:
    law = fit(cells(noise=0.0))
    assert (law.height, law.scale) == (pytest.approx(TRUE.height, rel=0.02), pytest.approx(TRUE.scale, rel=0.02))
    assert law.half < 1e-3


def test_an_interval_holds_nine_of_ten_cells_and_not_all() -> None:
    known = cells(noise=0.05)
    law = fit(known)
    inside = sum(low <= one.gap <= high for one in known if one.gap is not None for low, _, high in [law.interval(one)])
    assert inside == math.ceil(COVERAGE * (len(known) + 1))


def test_a_formula_without_nats_is_a_constant_share_and_misses_what_nats_explain() -> None:
    known = cells(noise=0.0)
    constant = fit(known, NO_NATS)
    assert constant.height == pytest.approx(statistics.fmean(one.gap / one.errors for one in known if one.gap))
    assert constant.interval(replace(known[0], nats=0.1)) == constant.interval(replace(known[0], nats=3.0))
    assert miss(constant, known) > 0.02
    assert miss(TRUE, known) == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ValueError, match="no gap is known"):
        miss(TRUE, [Gap("stage", 0.1, 0.5, None)])


def test_a_gap_grows_with_displacement_and_with_errors_and_is_nothing_without() -> None:
    gaps = [TRUE.interval(Gap("stage", nats, 0.5, None))[1] for nats in (0.0, 0.1, 1.0, 10.0)]
    assert gaps == sorted(gaps)
    assert gaps[0] == 0.0
    assert gaps[-1] == pytest.approx(0.2 * 0.5)
    assert TRUE.interval(Gap("stage", 1.0, 0.25, None))[1] == pytest.approx(gaps[2] / 2)


def test_too_few_cells_have_no_interval() -> None:
    with pytest.raises(ValueError, match="8 gaps are too few"):
        fit(cells(noise=0.0, count=8))


@pytest.mark.parametrize(("inside", "expected"), [(4, "holds"), (3, "holds"), (2, "does not hold")])
def test_claim_8_needs_three_of_four_gaps(inside: int, expected: str) -> None:
    law = Law(0.2, 0.5, 0.05, 40)
    bare = Gap("stage", 1.0, 0.5, None)
    middle, far = law.interval(bare)[1], law.interval(bare)[2] + 0.001
    known = [Gap("stage", 1.0, 0.5, middle if place < inside else far) for place in range(4)]
    assert reading(law, known) == expected
    assert reading(law, [*known[:3], bare]) == "open"
    assert prediction_table(law, [("six_euclid_small", one) for one in [*known, bare]]).count("| yes |") == inside


def test_gaps_are_read_at_each_methods_rate_and_grpo_may_come_later(tmp_path: Path) -> None:
    grid = load_grid(GRID.with_name(f"{PREDICTED[0]}.toml"))
    row = {**dict.fromkeys(CELL_COLUMNS), "seed": 30, "repeat": 0, "problems": 500, "before": 0.6, "ratio_neg_min": 1.0}
    own = {name: grid.blocks[name].rate for name in grid.methods}
    rows = [{**row, "method": name, "rate": rate, "after": 0.7, "nats": 0.4} for name, rate in own.items()]
    other = {**rows[0], "rate": 1.0, "after": 0.1}
    write_rows(tmp_path / PREDICTED[0] / CELLS, CELL_COLUMNS, [other, *rows[:2]])
    assert read_gaps(tmp_path, PREDICTED[0]) == [Gap(name, 0.4, 0.4, None) for name in ("stage", "eight")]
    write_rows(tmp_path / PREDICTED[0] / CELLS, CELL_COLUMNS, [other, *rows])
    assert [one.gap for one in read_gaps(tmp_path, PREDICTED[0])] == [0.0, 0.0]


def test_the_explorations_cells_are_read_and_the_page_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(law_gaps(DOCS)) == 8
    if any(read_gaps(DOCS, name) for name in FITTED):
        main([])
        assert "Claim 8: " in capsys.readouterr().out


def test_the_picture_has_every_method_and_the_predicted_cells(tmp_path: Path) -> None:
    known = cells(noise=0.05)
    both = [replace(one, method=method) for one in known[:8] for method in ("stage", "rule")]
    grids = dict.fromkeys(FITTED, both) | dict.fromkeys(PREDICTED, known[8:10])
    text = write_svg(six_plots.six(known, grids, {}), tmp_path / "six.svg").read_text()
    assert all(f">{label}<" in text for label in ("exploration", "stage", "rule", "predicted: euclid"))
    assert ">eight<" not in text


def test_the_published_picture_is_that_of_the_kept_cells(tmp_path: Path) -> None:
    """After a change of either, run `python -m run_scripts.study.six_plots`."""
    drawn = write_svg(six_plots.six(*read(DOCS), six_passes.read(DOCS)), tmp_path / "six.svg")
    assert drawn.read_text() == (DOCS / f"{six_plots.NAME}.svg").read_text()
