"""Shards of a stage that processes without a learner generate, and the run's next stage by its hf/ alone."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.data.prepare import Problems
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.engine_only.shards import (
    GenerationShard,
    NextStage,
    begin,
    close_stage,
    mark_shard,
    marked_shards,
    next_stage,
    parse_shard,
    seal,
)
from mugrpo_megatron.files.checkpoint_state import STATE
from mugrpo_megatron.files.durable import write_json
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.cursor import Cursor, checkpoint_name
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.record import PROVENANCE, claim, provenance, read_record
from mugrpo_megatron.samples import Problem, Sample
from mugrpo_megatron.stages.manifest import Origin
from mugrpo_megatron.stages.store import StageStore
from tests.patience import PATIENCE_S
from tests.refusals import refuses

SCHEDULE = {"stages": 2, "updates_per_stage": 3}
PROBLEMS = Problems([Problem("p", "1 + 1", "2", "p")], [], [])


def recipe_of(tmp_path: Path, **sections: dict[str, Any]) -> Recipe:
    weights = tmp_path / "model"
    weights.mkdir(exist_ok=True)
    (weights / "model.safetensors").write_bytes(b"weights")
    return Recipe.model_validate(
        {"run": {"dir": str(tmp_path / "run")}, "model": {"path": str(weights)}, "schedule": SCHEDULE, **sections}
    )


@given(st.integers(1, 30), st.integers(0, 200))
def test_shards_divide_a_stage(of: int, count: int) -> None:
    parts = [GenerationShard(number, of).groups(count) for number in range(of)]
    assert sorted(group for part in parts for group in part) == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len({GenerationShard(number, of).writer for number in range(of)} | {0}) == of + 1, "writer 0 is left to seal"


@pytest.mark.process
def test_a_process_without_a_learner_imports_no_megatron() -> None:
    """As its page says; the import takes seconds, and memory of a device."""
    code = "import sys, mugrpo_megatron.extras.engine_only.shard_generation; sys.exit('megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("text", ["", "4", "4/4", "-1/4", "1/0", "0/0", "a/b", "1/4 ", "99999/100000"])
def test_other_texts_are_no_shard(text: str) -> None:
    refuses("write it as I/N", parse_shard, text)
    assert parse_shard("3/4") == GenerationShard(3, 4)


def test_a_run_begins_with_the_model_and_goes_on_with_its_hf(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    directory = RunDirectory(recipe.run.dir)
    refuses("holds no run", next_stage, directory, recipe.model, recipe.schedule)
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
    with pytest.raises(UserError, match="is at stage00001-age00000, and its hf/ holds nothing"):
        next_stage(directory, recipe.model, recipe.schedule)
    directory.hf.mkdir()
    write_json(directory.hf / PROVENANCE, provenance(first.record))
    refuses("does not say at which update", next_stage, directory, recipe.model, recipe.schedule)
    write_json(directory.hf / PROVENANCE, provenance(first.record, asdict(Cursor(1, 0, 3))))
    assert next_stage(directory, recipe.model, recipe.schedule).origin == Origin(first.record.id, 1, 3)
    assert next_stage(directory, recipe.model, recipe.schedule).weights == directory.hf
    checkpoint(Cursor(1, 2, 5)).rename(directory.checkpoints / "stage00001-age00002.damaged")
    assert next_stage(directory, recipe.model, recipe.schedule).cursor == Cursor(1, 0, 3), (
        "what was set aside is no place to stand at"
    )
    checkpoint(Cursor(1, 2, 5))
    with pytest.raises(UserError, match=r"holds stage00001-age00000: finish the stage with `mugrpo optimize`"):
        next_stage(directory, recipe.model, recipe.schedule)
    write_json(directory.hf / PROVENANCE, provenance(first.record, asdict(Cursor(2, 0, 6))))
    refuses("taken all of its 6 updates", next_stage, directory, recipe.model, recipe.schedule)
    write_json(directory.hf / PROVENANCE, {"run": "another", "cursor": asdict(Cursor(2, 0, 6))})
    refuses("does not say", next_stage, directory, recipe.model, recipe.schedule)


def test_shards_have_the_same_weights_and_problems(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    stage = begin(recipe, PROBLEMS)
    folder = stage.directory
    mark_shard(GenerationShard(0, 2), stage, PROBLEMS)
    mark_shard(GenerationShard(0, 2), stage, PROBLEMS)
    mark_shard(GenerationShard(1, 2), stage, PROBLEMS)
    assert marked_shards(folder, stage.weights) == [GenerationShard(0, 2), GenerationShard(1, 2)]
    refuses("another part of the stage", mark_shard, GenerationShard(0, 3), stage, PROBLEMS)
    other = Problems([Problem("p", "1 + 2", "3", "p")], [], [])
    mark_shard(GenerationShard(2, 3), stage, other)
    refuses("different problems", marked_shards, folder, stage.weights)
    (recipe.model.path / "model.safetensors").write_bytes(b"stronger")
    refuses("other weights than", marked_shards, folder, stage.weights)
    refuses("other weights or problems", mark_shard, GenerationShard(1, 2), stage, PROBLEMS)


def test_a_shard_without_its_mark_is_not_sealed(tmp_path: Path) -> None:
    """N12: the check of weights and problems was left out for it."""
    recipe = recipe_of(tmp_path)
    stage = begin(recipe, PROBLEMS)
    folder = stage.directory
    for number in range(2):
        mark_shard(GenerationShard(number, 2), stage, PROBLEMS)
        (folder / f"manifest-{number + 1:04d}.json").write_text("{}")
    damaged = folder / "shard-0002.json"
    damaged.write_text(damaged.read_text().replace("2", "3", 1))
    way_out = r"remove it with manifest-0002\.json and shard-0002-\*\.parquet, and run its shard again"
    refuses(rf"shard-0002\.json: damaged; {way_out}", marked_shards, folder, stage.weights)
    damaged.unlink()
    refuses(rf"shard-0002\.json is missing.*{way_out}", marked_shards, folder, stage.weights)
    (folder / "manifest-0002.json").unlink()
    assert marked_shards(folder, stage.weights) == [GenerationShard(0, 2)]


def write_groups(stage: NextStage, shard: GenerationShard, version: int = 0) -> None:
    """All groups of a shard of a stage with six, on disk."""
    store = StageStore(stage.directory, shard.writer, replace(stage.origin, updates=version))
    ids, logprobs = np.arange(3, dtype=np.int32), -np.arange(3, dtype=np.float32)
    for group in sorted(shard.groups(6)):
        store.append([Sample(group, "p", ids, ids, logprobs, float(n), version, "stop") for n in range(2)])
    store.flush()


def test_a_stage_is_sealed_once_all_groups_of_its_weights_are_there(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, rollout={"prompts_per_update": 2, "responses_per_prompt": 2})
    stage = begin(recipe, PROBLEMS)
    shards = [GenerationShard(number, 2) for number in range(2)]
    mark_shard(shards[0], stage, PROBLEMS)
    refuses(
        r"lacks 6 of 6 groups; incomplete .*: 0/2 \(3\); .* 3 are of shards .* not begun;", close_stage, stage, 3, 2
    )
    mark_shard(shards[1], stage, PROBLEMS)
    write_groups(stage, shards[0])
    refuses(
        r"lacks 3 of 6 groups; incomplete .*: 1/2 \(3\); run each shard that lacks groups", close_stage, stage, 3, 2
    )
    write_groups(stage, shards[1], version=2)
    refuses(r"sampled after 2 updates, not .* sampled after 0 updates;", close_stage, stage, 3, 2)
    for path in stage.directory.glob("*-0002*"):
        path.unlink()
    mark_shard(shards[1], stage, PROBLEMS)
    write_groups(stage, shards[1])
    assert close_stage(stage, 3, 2) == 6
    assert "is sealed already" in seal(recipe.run.dir)


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
    ids = {results.get(timeout=PATIENCE_S) for _ in processes}
    for process in processes:
        process.join()
    record = read_record(recipe.run.dir)
    assert record is not None
    assert ids == {record.id}
    assert claim(recipe.run.dir) == record
