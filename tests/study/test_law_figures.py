"""The law's figures: gaps from GRPO at the same warm start, E1's bins, and the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from run_scripts.study import law_figures, law_plots
from run_scripts.study.grid import load_grid
from run_scripts.study.law import CELL_COLUMNS, CSV, OWN_COLUMNS
from run_scripts.study.law_figures import Row, bins_of, law_points, left, study_points, tables
from run_scripts.study.results import CELLS, DOCS, read_rows
from run_scripts.svg import write_svg

TOKENS = {"updates": 512, "stage_tokens": 512 * 64 * 50.0}


def law_row(method: str, rate: float, after: float, **more: Any) -> Row:
    known = {
        **dict.fromkeys((*CELL_COLUMNS, *OWN_COLUMNS)),
        **TOKENS,
        "start": "start-58",
        "seed": 10,
        "method": method,
        "rate": rate,
        "before": 0.5,
        "after": after,
        "kl_k3_late": 0.02,
        "start_sampled": 0.2,
        "sampled": after,
        "stages": 1.0,
        "gap": 0.1,
        "gap_half": 0.02,
        "nats_first": 1.0,
        "nats": 1.0,
        "nats_last": 1.0,
        "rollout_seconds": 100.0,
    }
    return known | more


def problem(name: str, of: str, right: int, samples: int, method: str = "", rate: float | None = None) -> Row:
    return {"problem": name, "of": of, "method": method, "rate": rate, "samples": samples, "right": right}


EVALUATED = [
    *(problem("easy", "start", 32, 64), problem("hard", "start", 0, 64), problem("harder", "start", 1, 64)),
    *(problem(name, "end", 8, 8, "grpo", 4e-5) for name in ("easy", "hard", "harder")),
    *(problem("easy", "end", 8, 8, "veto", 2e-5), problem("hard", "end", 2, 8, "veto", 2e-5)),
    problem("harder", "end", 6, 8, "veto", 2e-5),
]


def test_a_gap_is_the_greedy_difference_from_grpo_at_the_same_warm_start() -> None:
    other = law_row("veto", 2e-5, 0.4, start="start-88")
    (point,) = law_points([law_row("grpo", 4e-5, 0.9), law_row("veto", 2e-5, 0.8), other])
    assert (point.gap, point.late, point.start) == (pytest.approx(10), pytest.approx(1.0), "start-58")


def test_grpo_at_another_rate_is_no_reference() -> None:
    assert law_points([law_row("grpo", 2e-5, 0.9), law_row("veto", 2e-5, 0.8)]) == []


def test_the_studys_points_have_grpo_of_their_seed_and_warm_start() -> None:
    points = study_points(read_rows(DOCS / CELLS), load_grid())
    assert not any(point.method.startswith("grpo") or point.row["same_as"] for point in points)
    tuned = [point.gap for point in points if (point.method, point.rate) == ("none", 1e-5) and point.seed < 100]
    assert sum(tuned) / len(tuned) == pytest.approx(9.9, abs=0.1)


def test_every_problem_is_in_one_bin() -> None:
    rates = (0, 3, 4, 19, 20, 64)
    rows = [problem(f"{right}", "start", right, 64) for right in rates]
    rows += [problem(f"{right}", "end", 8, 8, *cell) for right in rates for cell in (("grpo", 4e-5), ("veto", 2e-5))]
    assert [one.problems for one in bins_of(rows)] == [2, 2, 2]


def test_gaps_of_bins_are_of_sampled_accuracy() -> None:
    rows = [*EVALUATED, problem("mid", "start", 16, 64)]
    rows += [problem("mid", "end", 4, 8, "grpo", 4e-5), problem("mid", "end", 3, 8, "veto", 2e-5)]
    hard, middle, easy = bins_of(rows)
    assert (hard.gap, middle.gap, easy.gap) == (pytest.approx(50), pytest.approx(12.5), 0.0)
    assert hard.half == pytest.approx(1.96 * 35.355 / 2**0.5, rel=1e-3)


def test_there_are_no_bins_before_all_three_evaluations() -> None:
    assert bins_of([row for row in EVALUATED if row["method"] != "grpo"]) == []


def test_the_share_of_errors_left() -> None:
    assert left(law_row("veto", 2e-5, 0.6)) == pytest.approx(0.5)


def test_unfinished_evaluations_leave_dashes() -> None:
    rows = [law_row("grpo", 4e-5, 0.9), law_row("veto", 2e-5, 0.8, sampled=None, gap=None)]
    assert "| – |" in tables(rows, [])


def test_the_picture_has_every_start(tmp_path: Path) -> None:
    starts = [law_row("grpo", 4e-5, 0.9, start=name, nats=0.01) for name in law_plots.COLORS]
    starts += [law_row("veto", 2e-5, 0.8, start=name) for name in law_plots.COLORS]
    figure = law_plots.law(law_figures.law_points(starts), starts, [])
    text = write_svg(figure, tmp_path / "law.svg").read_text()
    assert all(name in text for name in law_plots.COLORS)


def test_the_picture_of_the_repository_is_the_one_that_its_csv_files_give(tmp_path: Path) -> None:
    if not (DOCS / CSV).exists():
        pytest.skip("no cell of the law has been collected")
    study, rows, problems = law_figures.read()
    again = write_svg(law_plots.law(study, rows, bins_of(problems)), tmp_path / "law.svg")
    assert again.read_text() == (DOCS / "law.svg").read_text()
