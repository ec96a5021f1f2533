"""The runner: one stage a seed, finished cells are skipped, a failed one does not stop the others."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from run_scripts.study import run
from run_scripts.study.cells import Cell
from run_scripts.study.collect import main as collect
from run_scripts.study.grid import load_grid
from run_scripts.study.results import read_kept, read_results

pytestmark = [pytest.mark.night, pytest.mark.process]

GRID = Path(__file__).with_name("grid.toml").read_text()

PROGRAM = """
import json, sys
from pathlib import Path
from mugrpo_megatron.files.durable import Span
from mugrpo_megatron.recipe import dump_recipe, load_recipe
from mugrpo_megatron.stages.manifest import Manifest, Origin, Sealed, write_manifest
command, base = sys.argv[1:3]
given = dict(word.split("=", 1) for word in sys.argv if "=" in word)
recipe = load_recipe(Path(base), [word for word in sys.argv[3:] if word != "--set"])
if command == "sft":
    recipe.sft.output.joinpath("hf").mkdir(parents=True)
    recipe.sft.output.joinpath("hf", "config.json").write_text("{}")
    out = recipe.sft.output.parent
else:
    out = recipe.run.dir.parents[1]
with (out / "calls").open("a") as calls:
    calls.write(f"{command} {recipe.run.dir.name if command != 'sft' else recipe.sft.output.name}\\n")
if command == "sft":
    sys.exit()
if (out / "broken").exists() and (out / "broken").read_text() == recipe.run.dir.name:
    sys.exit(1)
recipe.run.dir.mkdir(parents=True, exist_ok=True)
recipe.run.dir.joinpath("recipe.toml").write_text(dump_recipe(recipe))
name, place = recipe.data.eval, {"stage": 0, "age": 0}
def evaluation(update, value):
    figures = {f"{kind}/{name}": value for kind in ("accuracy", "low", "high", "truncated")}
    return {"kind": "eval", "time": float(update), "update": update, **place, **figures, f"problems/{name}": 500}
if command == "generate":
    stage = recipe.run.dir / "stages" / "00000"
    stage.mkdir(parents=True)
    spans = [Span(0, 1, "")] * 64
    sealed = Sealed("stage.parquet", 64, 8, spans, spans, Span(0, 1, ""), {"seed": recipe.run.seed})
    write_manifest(stage, Manifest([], sealed, Origin(recipe.run.dir.name, 0, 0)))
    rows = [evaluation(0, 0.4)]
else:
    least = 1e-3 if recipe.optimizer.lr < 1e-3 else 1e-5
    metrics = {"clipped_fraction": 0.5, "ratio_neg_mean": 1.0, "ratio_neg_min": least, "ess": 0.9, "kl_k3": 1e-3}
    first = [evaluation(0, 0.4)] if recipe.schedule.stages > 1 else []
    updates = [{"kind": "update", "time": float(n), "update": n, **place, **metrics} for n in range(64)]
    sampled = {"kind": "stage", "time": 0.0, **place, "generated_tokens": 6_000, "responses": 100}
    after = 0.5 if recipe.optimizer.lr == 1e-3 else 0.3
    rows = [sampled, *first, *updates, evaluation(32, 0.45), evaluation(64, after)]
    recipe.run.dir.joinpath("summary.json").write_text('{"updates": 64}')
with (recipe.run.dir / "metrics.jsonl").open("a") as file:
    file.writelines(json.dumps(row) + "\\n" for row in rows)
"""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> run.Study:
    """The stages of `PROGRAM` have a manifest and no responses, so that there is nothing to branch from."""
    monkeypatch.setattr("mugrpo_megatron.run.branch.branch", lambda recipe, source, stage: None)
    (tmp_path / "grid.toml").write_text(GRID)
    (tmp_path / "program.py").write_text(PROGRAM)
    out = tmp_path / "out"
    out.mkdir()
    return run.Study(load_grid(tmp_path / "grid.toml"), out, program=(sys.executable, str(tmp_path / "program.py")))


def calls(study: run.Study) -> list[str]:
    """What was called since the last look."""
    found: list[str] = []
    for path in sorted(study.out.rglob("calls")):
        found += path.read_text().splitlines()
        path.unlink()
    return sorted(found)


def test_a_seed_generates_once_and_finished_cells_are_not_run_again(study: run.Study, tmp_path: Path) -> None:
    assert run.run_all(study) == 0
    first = calls(study)
    assert [one for one in first if one.startswith(("sft", "generate"))] == [
        *("generate seed0", "generate seed0-again1", "generate seed1", "generate seed100"),
        *("sft warm-start-0", "sft warm-start-1"),
    ]
    trained = ["train grpo-0.001"] * 2 + ["train none-0.0001"] + ["train none-0.001"] * 4 + ["train veto-0.001"] * 2
    assert [one for one in first if one.startswith("train")] == trained  # tuning climbed to a rate that had run already
    assert not (study.directory(Cell(0, "none", 1e-3)) / "stages").exists()
    assert run.run_all(study) == 0
    assert calls(study) == []

    docs = tmp_path / "docs"
    words = ["--out", str(study.out), "--docs", str(docs), "--grid", str(tmp_path / "grid.toml")]
    assert collect(words) == 0
    results = read_results(study.grid, docs)
    assert results.tuned("none").rate == 1e-3
    assert results.complete("one", ["none", "veto", "grpo"]) == [0, 1]
    assert [point["accuracy"] for point in results.curve(results.rows[0])] == [0.4, 0.45, 0.5]
    elsewhere = replace(study, out=tmp_path / "elsewhere", kept=read_kept(docs))
    assert run.run_all(elsewhere) == 0
    assert not elsewhere.out.exists()
    before = (docs / "cells.csv").read_bytes()
    words[1] = str(elsewhere.out)
    assert collect(words) == 0
    assert (docs / "cells.csv").read_bytes() == before


def test_a_cell_that_fails_is_named_and_tried_again(study: run.Study, capsys: pytest.CaptureFixture[str]) -> None:
    (study.out / "cells").mkdir()
    for seed in (0, 1):
        (study.out / "cells" / "broken").write_text("veto-0.001")
        assert run.run_all(study, [seed]) == 1
        assert f"not done: seed{seed}/veto-0.001\n" in capsys.readouterr().out
    (study.out / "cells" / "broken").unlink()
    calls(study)
    assert run.run_all(study, [0, 1]) == 0
    assert calls(study) == ["train veto-0.001"] * 2


def test_cells_whose_rate_was_found_elsewhere_are_collected(study: run.Study, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(GRID.replace('methods = ["none", "veto", "grpo"]', 'methods = ["grpo"]'))
    study = replace(study, grid=load_grid(tmp_path / "grid.toml"))
    assert run.run_all(study) == 0
    words = ["--out", str(study.out), "--docs", str(tmp_path / "docs"), "--grid", str(tmp_path / "grid.toml")]
    assert collect(words) == 0
    found = (tmp_path / "docs" / "cells.csv").read_text()
    cell = Cell(1, "none", 1e-3)
    for directory in (study.directory(cell), study.stage(cell)):
        moved = tmp_path / "elsewhere" / directory.relative_to(study.out)
        moved.parent.mkdir(parents=True, exist_ok=True)
        directory.rename(moved)
    (tmp_path / "docs" / "cells.csv").write_text(
        "".join(line for line in found.splitlines(keepends=True) if not line.startswith("1,0,none,"))
    )
    words[1] = str(tmp_path / "elsewhere")
    assert collect(words) == 0
    assert sorted((tmp_path / "docs" / "cells.csv").read_text().splitlines()) == sorted(found.splitlines())


def test_cells_of_another_stage_do_not_count(study: run.Study) -> None:
    cell = Cell(0, "none", 1e-3)
    assert run.run_cell(study, cell)
    outcome = study.outcome(cell)
    assert outcome
    other = Cell(0, "veto", 1e-3)
    for stage, counts in ((study.fingerprint(cell), True), ("another", False)):
        assert bool(replace(study, kept={other: (stage, outcome)}).outcome(other)) is counts
    assert replace(study, kept={Cell(0, "grpo", 1e-3): ("", outcome)}).outcome(Cell(0, "grpo", 1e-3))
    assert run.run_cell(study, Cell(100, "none", 1e-3))
    tuning = Cell(100, "none", 1e-4)
    assert replace(study, kept={tuning: ("another", outcome)}).outcome(tuning)  # a rate that was found stays
