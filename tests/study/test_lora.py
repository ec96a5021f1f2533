"""The grid, the figures and the table of docs/lora.md."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from run_scripts.study.cells import Cell, settings
from run_scripts.study.grid import load_grid
from run_scripts.study.lora import BEGIN, COLUMNS, CSVS, END, GRIDS, PAGE, table, write_table
from run_scripts.study.results import DOCS
from run_scripts.study.search import wanted


def test_every_seed_has_all_weights_and_four_ranks_on_one_stage() -> None:
    grid = load_grid(GRIDS["grid"])
    cells = [one for one in wanted(grid, {}) if isinstance(one, Cell)]
    assert len(cells) == 3 * 5 == len(set(cells))
    assert all(grid.shares_stage(cell.method) for cell in cells)
    of_rank = {cell.method: settings(grid, cell) for cell in cells if cell.seed == 1}
    assert {"lora.rank=16", "optimizer.lr=0.0003"} <= {*of_rank["rank16"]}
    assert not any(one.startswith("lora.") for one in of_rank["all"])
    assert all("eval.every_updates=16" in one and "run.seed=1" in one for one in of_rank.values())


def test_the_table_has_seeds_with_all_cells_and_replaces_the_old_one(tmp_path: Path) -> None:
    grid = load_grid(GRIDS["grid"])
    rows = [
        {
            "seed": seed,
            "method": name,
            "rate": block.rate,
            "update": 64,
            "accuracy": 0.5 + 0.1 * seed,
            "checkpoint": 3e6,
        }
        for seed in (0, 1)
        for block in grid.blocks.values()
        for name in block.methods
    ]
    partly = {**rows[0], "seed": 2}
    lines = table(grid, [*rows, partly])
    assert "| rank 16 | 0.0003 | 2 | 55.0 (50.0–60.0) | 3.0 |\n" in lines
    page = tmp_path / PAGE
    begin, end = BEGIN.format("grid"), END.format("grid")
    page.write_text(f"before\n{begin}old\n{end}after\n")
    for _ in range(2):
        write_table(page, "grid", lines)
        assert page.read_text() == f"before\n{begin}{lines}{end}after\n"


def test_the_full_rank_has_three_rates_beside_all_weights_on_one_stage() -> None:
    grid = load_grid(GRIDS["rates"])
    cells = [one for one in wanted(grid, {}) if isinstance(one, Cell)]
    assert len(cells) == 3 * 3 + 5 == len(set(cells))
    assert next((cell.method, cell.rate) for cell in cells if cell.seed == 0) == ("all", 3e-5)


@pytest.mark.parametrize("name", GRIDS)
def test_the_page_has_the_tables_of_the_kept_figures(name: str) -> None:
    with (DOCS.parent / CSVS[name]).open(newline="", encoding="utf-8") as file:
        rows = [{key: value(key, text) for key, text in row.items()} for row in csv.DictReader(file)]
    assert tuple(rows[0]) == COLUMNS
    lines = table(load_grid(GRIDS[name]), rows)
    assert f"{BEGIN.format(name)}{lines}{END.format(name)}" in (DOCS.parent / PAGE).read_text()


def value(key: str, text: str) -> str | float | None:
    return text if key in ("method", "commit") else float(text) if text else None
