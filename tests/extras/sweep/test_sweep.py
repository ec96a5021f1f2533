"""A sweep on a real stage: its cells are the branches that `mugrpo optimize --from` makes, interrupted or not."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.sweep import sweep as module
from mugrpo_megatron.extras.sweep.cells import Sweep, check_sweep, states
from mugrpo_megatron.extras.sweep.grid import cells_of, read_grid
from mugrpo_megatron.run.directory import InUse, RunDirectory
from mugrpo_megatron.run.record import read_record
from mugrpo_megatron.stages.manifest import Origin
from tests.forked import started
from tests.refusals import refuses
from tests.tiny import FINISHED, mugrpo, rows, weights

MU = FINISHED["updates_per_stage"]
END = "checkpoints/stage00001-age00000/__0_0.distcp"


def sweep_of(finished_run: Path, out: Path, *overrides: str) -> Sweep:
    cells = cells_of(read_grid(overrides, None), RunDirectory(finished_run), out)
    return Sweep(finished_run, 0, out, cells)


def words(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def figures(out: Path) -> dict[str, dict[str, str]]:
    with (out / "cells.csv").open(encoding="utf-8", newline="") as file:
        return {row["cell"]: row for row in csv.DictReader(file)}


@pytest.mark.process
@pytest.mark.slow
def test_cells_are_bitwise_the_branches_that_optimize_makes(finished_run: Path, tmp_path: Path) -> None:
    """One process for all cells: nothing of a cell reaches the next. It is asked to stop in the last, and called again.

    The middle cell's rate leaves nothing finite behind: it is named, the others go on, and the second call lacks it.
    """
    out, axis = tmp_path / "sweep", "optimizer.lr=1e-3,1e30,2e-3"
    command = ["sweep", finished_run, "--out", out, *words(axis, "objective.name=grpo")]
    last = out / "lr=0.002"
    with started(*command) as running:
        while not rows(last, "update"):
            assert running.wait(0.01) is None, running.said
        running.process.terminate()
        assert running.wait() == 0, running.said
        assert "FAILED: 10 updates in a row" in running.stdout
        assert "stopped as asked" in running.stdout
    first = (out / "lr=0.001" / "summary.json").stat()
    assert not (last / "summary.json").exists()
    assert "begun     lr=0.002" in mugrpo(*command, "--dry-run").stdout
    command = ["sweep", finished_run, "--out", out, *words("optimizer.lr=1e-3,2e-3", "objective.name=grpo")]
    assert "2 of 2 cells" in " ".join(mugrpo(*command).stdout.split())
    assert (out / "lr=0.001" / "summary.json").stat() == first, "a finished cell is left as it is"
    found = figures(out)
    assert [row["state"] for row in found.values()] == ["finished", "finished"]
    assert [row["optimizer.lr"] for row in found.values()] == ["0.001", "0.002"]
    assert (out / "report.html").exists()
    alone = tmp_path / "alone"
    options = words(f"run.dir={alone}", "optimizer.lr=2e-3", "objective.name=grpo", "objective.clip_low=0.8",
                "objective.clip_high=1.2", "objective.veto=none", "objective.reduction=sequence_mean")  # fmt: skip
    mugrpo("optimize", finished_run.parent / "recipe.toml", "--stage", 0, "--from", finished_run, *options)
    assert (last / END).read_bytes() == (alone / END).read_bytes()
    assert weights(last) == weights(alone)
    evaluations, source = rows(last, "eval"), rows(finished_run, "eval")
    assert [row["update"] for row in evaluations] == [0, MU]
    [name] = [key for key in source[0] if key.endswith("/mean") and key.partition("/")[0] in ("reward", "accuracy")]
    assert evaluations[0][name] == source[0][name], "the source's evaluation of the same weights"
    assert float(found["lr=0.002"]["after"]) == pytest.approx(evaluations[1][name], rel=1e-5)
    assert int(found["lr=0.002"]["updates"]) == MU


def test_a_cell_that_another_sweep_is_at_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N15: it was called FAILED, with a traceback in failure.txt."""

    def taken(*arguments: object) -> None:
        raise InUse("another process is at work in it")

    monkeypatch.setattr(module, "branch", taken)
    context, cell = SimpleNamespace(is_main=True), SimpleNamespace(name="lr=1", recipe=None)
    with pytest.raises(InUse):
        module._run_cell(cast(Any, context), Sweep(tmp_path, 0, tmp_path / "out", []), cast(Any, cell))
    assert not list(tmp_path.iterdir())


@pytest.mark.process
def test_every_cell_is_checked_before_the_first_one_starts(finished_run: Path, tmp_path: Path) -> None:
    """And nothing is written by a check."""
    out = tmp_path / "sweep"
    sweep = sweep_of(finished_run, out, "optimizer.lr=1e-3,2e-3")
    assert check_sweep(sweep) == (sweep, Origin(read_record(finished_run).id, 0, 0))  # type: ignore[union-attr]
    assert not out.exists()
    assert states(sweep).splitlines()[:2] == ["missing   lr=0.001", "missing   lr=0.002"]
    assert "0 of 2 cells are finished; the rest takes about" in states(sweep)
    refuses("no sealed stage 5", check_sweep, Sweep(finished_run, 5, out, sweep.cells))
    with pytest.raises(UserError, match=r"a branch cannot change run\.seed"):
        check_sweep(sweep_of(finished_run, out, "optimizer.lr=1e-3,2e-3", "run.seed=5"))
    with pytest.raises(UserError, match=r"cell name=icepop: .*mismatch"):
        check_sweep(sweep_of(finished_run, out, "objective.name=mu_grpo,icepop", "rollout.behaviour=engine"))


@pytest.mark.process
def test_a_directory_of_something_else_is_refused(finished_run: Path, tmp_path: Path) -> None:
    sweep = sweep_of(finished_run, tmp_path, "optimizer.lr=1e-3,2e-3")
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    refuses("no sweep has written", check_sweep, sweep)
    (tmp_path / "sweep.json").write_text('{"run": "other", "stage": 0, "of": "elsewhere"}', encoding="utf-8")
    refuses("the sweep of stage 0 of elsewhere", check_sweep, sweep)
