"""Part six: verdicts of claims 6 and 7 from cells whose gaps are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from run_scripts.study.collect import CELL_COLUMNS, write_rows
from run_scripts.study.grid import GRID, load_grid
from run_scripts.study.results import CELLS, Results, Row, read_results
from run_scripts.study.six import (
    CLAIMS,
    PREFIX,
    cells_table,
    claims_table,
    main,
    prefix_table,
    tuning_table,
    verdicts,
)

SEEDS = range(20, 28)
RATE = 8e-5


def row(method: str, seed: int, rate: float, after: float, stages: int = 6) -> Row:
    known = {"seed": seed, "repeat": 0, "method": method, "rate": rate, "problems": 500, "before": 0.5, "after": after}
    return {**dict.fromkeys(CELL_COLUMNS), **known, "ratio_neg_min": 0.1, "stages": stages, "nats": 0.4}


def kept(docs: Path, gap: float, seeds: range = SEEDS, stages: int = 6) -> dict[str, Results]:
    """Both grids tuned at `RATE`; on each seed the claim's method ends `gap` above GRPO."""
    results = {}
    for claim in CLAIMS:
        grid = load_grid(GRID.with_name(f"{claim.grid}.toml"))
        ends = {name: 0.9 if name == "grpo" else 0.9 + gap for name in grid.methods}
        tuning = [
            row(name, seed, rate, 0.8 - (0.1 if rate != RATE else 0.0))
            for name in grid.methods
            for seed in grid.tuning_seeds
            for rate in (RATE / 2, RATE, 2 * RATE)
        ]
        cells = [row(name, seed, RATE, ends[name] + seed / 1000, stages) for name in grid.methods for seed in seeds]
        write_rows(docs / claim.grid / CELLS, CELL_COLUMNS, [*tuning, *cells])
        results[claim.grid] = read_results(grid, docs / claim.grid)
    return results


@pytest.mark.parametrize(
    ("gap", "seeds", "stages", "readings"),
    [
        (-0.005, SEEDS, 6, ["holds", "holds"]),
        (-0.005, SEEDS, 9, ["not shown", "not shown"]),  # more generation phases than the claim allows
        (-0.02, SEEDS, 6, ["not shown", "not shown"]),
        (-0.005, range(20, 27), 6, ["open", "open"]),
    ],
)
def test_a_claim_holds_when_every_seed_is_less_than_a_point_below(
    gap: float, seeds: range, stages: int, readings: list[str], tmp_path: Path
) -> None:
    found = verdicts(kept(tmp_path, gap, seeds, stages))
    assert [one.reading for one in found] == readings
    assert [one.gaps for one in found] == [pytest.approx([gap] * len(seeds))] * 2
    if "open" not in readings:
        assert {one.p for one in found} == {2 / 256 if gap > -0.01 else 1.0}


def test_tables_have_the_cells_at_the_tuned_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = kept(tmp_path, -0.02)
    assert "| 6: `stage` minus GRPO | -2.0 ± 0.0 | 8 of 8 | 6.0 | 1.000 | not shown |" in claims_table(
        verdicts(results)
    )
    table = cells_table(results["six_large"])
    assert [line.split(" | ")[2] for line in table.splitlines()[2:]] == ["8"] * 3
    assert "| 4·10⁻⁵ | 2 | 70.0" in tuning_table(results["six_small"])
    main(["--docs", str(tmp_path)])
    assert capsys.readouterr().out.count("| --- |") == 6


def test_weights_by_the_prefix_stand_beside_one_stage_seed_by_seed(tmp_path: Path) -> None:
    grid = load_grid(GRID.with_name(f"{PREFIX}.toml"))
    ends = {20: 0.89, 21: 0.901, 22: 0.912}  # one stage ends at 0.92 to 0.922
    write_rows(tmp_path / CELLS, CELL_COLUMNS, [row("product", seed, 2e-5, after) for seed, after in ends.items()])
    table = prefix_table(read_results(grid, tmp_path), kept(tmp_path, 0.0)["six_small"])
    assert table.splitlines()[2:] == ["| weight by the prefix's ratio | 3 | -2.0 ± 2.5 |"]


def test_nothing_kept_is_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--docs", str(tmp_path)])
    assert capsys.readouterr().out.count("| 0 of 8 | – | – | open |") == 2
