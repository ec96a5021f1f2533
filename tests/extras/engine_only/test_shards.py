"""Shares of a stage, and where a run stands by its hf/ alone."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.data.prepare import Problems
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.prefetch.shares import Share, begin, mark_share, parse_share, position, shares_of
from mugrpo_megatron.files.durable import write_json
from mugrpo_megatron.files.hf_config import STATE
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.cursor import Cursor, checkpoint_name
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.record import MARK, claim, mark, read_record
from mugrpo_megatron.samples import Problem
from mugrpo_megatron.stages.manifest import Origin

SCHEDULE = {"stages": 2, "updates_per_stage": 3}
PROBLEMS = Problems([Problem("p", "1 + 1", "2", "p")], [], [])


def recipe_of(tmp_path: Path) -> Recipe:
    weights = tmp_path / "model"
    weights.mkdir(exist_ok=True)
    (weights / "model.safetensors").write_bytes(b"weights")
    return Recipe.model_validate(
        {"run": {"dir": str(tmp_path / "run")}, "model": {"path": str(weights)}, "schedule": SCHEDULE}
    )


@given(st.integers(1, 30), st.integers(0, 200))
def test_shares_divide_a_stage(of: int, count: int) -> None:
    parts = [Share(number, of).groups(count) for number in range(of)]
    assert sorted(group for part in parts for group in part) == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len({Share(number, of).writer for number in range(of)} | {0}) == of + 1, "writer 0 is left to seal"


@pytest.mark.process
def test_a_process_without_a_learner_imports_no_megatron() -> None:
    """As its page says; the import takes seconds, and memory of a device."""
    code = "import sys, mugrpo_megatron.extras.prefetch.engine_only; sys.exit('megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("text", ["", "4", "4/4", "-1/4", "1/0", "0/0", "a/b", "1/4 ", "99999/100000"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="write it as I/N"):
        parse_share(text)
    assert parse_share("3/4") == Share(3, 4)


def test_a_run_begins_with_the_model_and_goes_on_with_its_hf(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    directory = RunDirectory(recipe.run.dir)
    with pytest.raises(UserError, match="holds no run"):
        position(directory, recipe)
    first = begin(recipe, PROBLEMS)
    assert (first.cursor, first.weights) == (Cursor(), recipe.model.path)
    assert first.origin == Origin(first.record.id, 0, 0)
    assert begin(recipe, PROBLEMS) == first

    def checkpoint(cursor: Cursor) -> Path:
        state = directory.checkpoints / checkpoint_name(cursor) / STATE
        state.parent.mkdir(parents=True)
        state.touch()
        return state.parent

    checkpoint(Cursor(1, 0, 3))
    with pytest.raises(UserError, match="is at stage00001-age00000, but its hf/ holds nothing"):
        position(directory, recipe)
    directory.hf.mkdir()
    write_json(directory.hf / MARK, mark(first.record))
    with pytest.raises(UserError, match="does not say at which update"):
        position(directory, recipe)
    write_json(directory.hf / MARK, mark(first.record, asdict(Cursor(1, 0, 3))))
    assert position(directory, recipe).origin == Origin(first.record.id, 1, 3)
    assert position(directory, recipe).weights == directory.hf
    checkpoint(Cursor(1, 2, 5)).rename(directory.checkpoints / "stage00001-age00002.damaged")
    assert position(directory, recipe).cursor == Cursor(1, 0, 3), "what was set aside is no place to stand at"
    checkpoint(Cursor(1, 2, 5))
    with pytest.raises(UserError, match=r"holds stage00001-age00000: finish the stage with `mugrpo optimize`"):
        position(directory, recipe)
    write_json(directory.hf / MARK, mark(first.record, asdict(Cursor(2, 0, 6))))
    with pytest.raises(UserError, match="taken all of its 6 updates"):
        position(directory, recipe)
    write_json(directory.hf / MARK, {"run": "another", "cursor": asdict(Cursor(2, 0, 6))})
    with pytest.raises(UserError, match="does not say"):
        position(directory, recipe)


def test_shares_have_the_same_weights_and_problems(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    where, stage = begin(recipe, PROBLEMS), tmp_path / "run" / "stages" / "00000"
    mark_share(Share(0, 2), where, PROBLEMS)
    mark_share(Share(0, 2), where, PROBLEMS)
    mark_share(Share(1, 2), where, PROBLEMS)
    assert shares_of(stage, where.weights) == [Share(0, 2), Share(1, 2)]
    with pytest.raises(UserError, match="another part of the stage"):
        mark_share(Share(0, 3), where, PROBLEMS)
    other = Problems([Problem("p", "1 + 2", "3", "p")], [], [])
    mark_share(Share(2, 3), where, other)
    with pytest.raises(UserError, match="different problems"):
        shares_of(stage, where.weights)
    (recipe.model.path / "model.safetensors").write_bytes(b"stronger")
    with pytest.raises(UserError, match="other weights than"):
        shares_of(stage, where.weights)
    with pytest.raises(UserError, match="other weights or problems"):
        mark_share(Share(1, 2), where, PROBLEMS)


def test_a_share_without_its_mark_is_not_sealed(tmp_path: Path) -> None:
    """N12: the check of weights and problems was left out for it."""
    recipe = recipe_of(tmp_path)
    where, stage = begin(recipe, PROBLEMS), tmp_path / "run" / "stages" / "00000"
    for number in range(2):
        mark_share(Share(number, 2), where, PROBLEMS)
        (stage / f"manifest-{number + 1:04d}.json").write_text("{}")
    damaged = stage / "share-0002.json"
    damaged.write_text(damaged.read_text().replace("2", "3", 1))
    way_out = r"remove it with manifest-0002\.json and shard-0002-\*\.parquet, and run its share again"
    with pytest.raises(UserError, match=rf"share-0002\.json: damaged; {way_out}"):
        shares_of(stage, where.weights)
    damaged.unlink()
    with pytest.raises(UserError, match=rf"share-0002\.json is missing.*{way_out}"):
        shares_of(stage, where.weights)
    (stage / "manifest-0002.json").unlink()
    assert shares_of(stage, where.weights) == [Share(0, 2)]


def _begin(recipe: Recipe, results: Any) -> None:
    results.put(begin(recipe, PROBLEMS).record.id)


@pytest.mark.process
def test_processes_that_begin_at_once_make_one_run(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_begin, args=(recipe, results)) for _ in range(6)]
    for process in processes:
        process.start()
    ids = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    found = read_record(recipe.run.dir)
    assert found is not None
    assert ids == {found.id}
    assert claim(recipe.run.dir) == found
