"""Part three of the study: the sweep is the plan's, its cells become rows, and the tables say what the rows do."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from mugrpo_megatron.extras.sweep.grid import cells_of, read_grid
from mugrpo_megatron.recipe import dump_recipe, load_recipe
from mugrpo_megatron.run.directory import RunDirectory
from run_scripts.study import short
from run_scripts.study.collect import write_rows
from run_scripts.study.results import DOCS, SHORT, Row, read_rows
from run_scripts.study.short_tables import THRESHOLDS, ends_without_veto, plain_table, threshold_gap, veto_table

PUBLISHED = read_rows(DOCS / SHORT)


def test_the_sweep_has_the_plans_cells_and_they_differ_in_objective_and_rate_only(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    recipe = load_recipe(short.RECIPE)
    run.recipe.write_text(dump_recipe(recipe))
    cells = cells_of(read_grid([], short.GRID), run, tmp_path)
    assert recipe.schedule.total_updates == 128
    assert Counter(
        (one.recipe.objective.name, one.recipe.objective.veto, one.recipe.optimizer.lr) for one in cells
    ) == {
        **{("mu_grpo", scope, 5.6e-4): 5 for scope in ("suffix", "suffix_non_trigger", "response")},
        ("mu_grpo", "trigger", 5.6e-4): 2,
        **{("mu_grpo", "none", rate): 1 for rate in (1e-4, 5.6e-4)},
        **{("grpo", "none", rate): 1 for rate in (1e-4, 5.6e-4)},
    }
    for one in cells:
        assert one.recipe.objective.reduction == "token_mean"
        own = {"objective": None, "optimizer": None, "run": None}
        assert one.recipe.model_copy(update=own) == recipe.model_copy(update=own)
        assert one.recipe.optimizer.model_copy(update={"lr": recipe.optimizer.lr}) == recipe.optimizer


def test_a_sweeps_cells_become_rows(tmp_path: Path) -> None:
    columns = ["cell", *short.SETTINGS.values(), "objective.trigger_ratio", *short.FIGURES, "ratio_neg_min"]
    values = ["one", "mu_grpo", "0.00056", "suffix", "0.01", "0.4", "0.6", "2000", "2", "0.5", "0.1", "0.2", "5e-05"]
    (tmp_path / "cells.csv").write_text(f"{','.join(columns)}\n{','.join(values)}\n")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "recipe.toml").write_text(dump_recipe(load_recipe(short.RECIPE)))
    updates = [
        {"kind": "update", "time": 0.0, "stage": 0, "update": k, "age": k, "ratio_neg_min": least}
        | {f"trigger_tokens_{threshold}": 0.25 * k for threshold in THRESHOLDS}
        for k, least in enumerate((0.5, 5e-5))
    ]
    (tmp_path / "one" / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in updates))
    write_rows(tmp_path / SHORT, short.COLUMNS, [{**row, "commit": "c"} for row in short.rows_of(3, tmp_path)])
    (row,) = read_rows(tmp_path / SHORT)
    assert (row["seed"], row["objective"], row["veto"], row["rate"], row["threshold"]) == (
        *(3, "mu_grpo", "suffix", 5.6e-4, 0.01),
    )
    assert (row["before"], row["after"], row["first_trigger"], row["below_1e-1"]) == (0.4, 0.6, 1, 0.125)


def row(seed: int, veto: str, threshold: float | None, after: float, **changed: object) -> Row:
    own: Row = {"seed": seed, "objective": "mu_grpo", "veto": veto, "threshold": threshold, "after": after}
    shares = dict.fromkeys(("below_1e-1", "below_1e-2", "below_1e-3", "below_1e-4"), 0.0)
    return own | {"rate": 5.6e-4, "before": 0.5, "ratio_neg_min": 1e-5} | shares | changed


def test_the_tables_have_means_by_scope_threshold_and_rate() -> None:
    rows = [
        *(row(seed, "none", None, 0.2 + seed / 10) for seed in range(3)),
        *(row(seed, "none", None, 0.6, rate=1e-4) for seed in range(3)),
        *(row(seed, "suffix", threshold, 0.3 + seed / 10) for seed in range(3) for threshold in (1e-4, 0.5)),
        row(0, "", None, 0.4, objective="grpo"),
    ]
    lines = veto_table(rows).splitlines()
    assert lines[0] == "| Veto of | 10⁻⁴ | 0.5 |"
    assert "| S_κ | 40.0 ± 24.8 | 40.0 ± 24.8 |" in lines  # t(0.975, 2) = 4.303, s = 0.1
    assert ends_without_veto(rows, 5.6e-4) == "20.0, 30.0 and 40.0 %"
    assert "| T | – | – |" in lines
    lines = plain_table(rows).splitlines()
    assert any(line.startswith("| no veto | 10⁻⁴ | 3 | 50.0 ± 0.0 | 60.0 ± 0.0 |") for line in lines)
    assert any(line.startswith("| GRPO's clip | 5.6·10⁻⁴ | 1 | 50.0 | 40.0 |") for line in lines)
    assert veto_table([]) == plain_table([]) == ""
    assert threshold_gap(rows, "suffix", 0.5, 1e-4) == "+0.0 ± 0.0 points over 3 seeds"
    assert threshold_gap(rows, "response", 0.5, 1e-4) == "not measured yet"


def test_the_kept_rows_are_three_seeds_of_the_whole_grid_from_one_warm_start() -> None:
    assert Counter(one["seed"] for one in PUBLISHED) == dict.fromkeys(short.SEEDS, 21)
    assert len({one["before"] for one in PUBLISHED}) == 1
    assert {one["updates"] for one in PUBLISHED} == {128}
    assert set(PUBLISHED[0]) == set(short.COLUMNS)
