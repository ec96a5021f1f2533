"""Runs with auxiliary models: scores are the learner's own, its memory is back, and a kill in a turn loses none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from mugrpo_megatron.data.tokenizer import CHAT_ML, build_arithmetic_tokenizer
from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.stages.columns import LogprobColumn
from tests.forked import started
from tests.patience import PATIENCE_S
from tests.tiny import COIN, mugrpo, save_model, write_recipe

pytestmark = pytest.mark.process


def test_the_engines_scores_are_the_learners_pass(tmp_path: Path) -> None:
    """At a temperature and over the kept tokens; the KL penalty's ref is that pass with the teacher's weights."""
    model, run_dir = save_model(tmp_path / "model"), tmp_path / "run"
    recipe = write_recipe(
        tmp_path / "recipe.toml",
        model,
        run_dir,
        schedule={"stages": 1},
        rollout={"temperature": 0.7, "top_k": 8, "top_p": 0.95},
        objective={"teacher": "big", "teacher_coef": 0.5, "kl_ref": str(model)},
        auxiliary={"big": {"model": str(model)}},
        eval={"every_stages": 0},
        reward=COIN,
    )
    mugrpo("train", recipe)
    for update in range(2):
        taught = read(run_dir / "auxiliary" / "stage00000-teacher-big.parquet", update)
        np.testing.assert_allclose(taught, read(run_dir / "ref" / "stage00000.parquet", update), atol=1e-4)
    rows = read_rows(run_dir / "metrics.jsonl")
    (auxiliary,) = [row for row in rows if row.get("phase") == "auxiliary"]
    assert abs(auxiliary["kl_teacher"]) < 1e-4, "the policy begins with the teacher's weights"
    assert (
        auxiliary["memory_after"] < 1.05 * auxiliary["memory_before"]
    )  # a process this small grows by what it imports
    updates = [row for row in rows if row["kind"] == "update"]
    assert updates[0]["kl_teacher"] == pytest.approx(0.0, abs=1e-4)
    assert updates[1]["kl_teacher"] != 0.0


def read(path: Path, update: int) -> np.ndarray:
    """An update's logprobs, whatever they belong to."""
    of = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["logprobs"]["identity"]
    return np.concatenate(LogprobColumn(path, of).read(update))


UPDATES = 80


def recipe_of(folder: Path, **objective: object) -> Path:
    """A teacher, and a judge that samples: asked again, it would answer something else."""
    model = save_model(folder / "model")
    build_arithmetic_tokenizer(CHAT_ML).save_pretrained(model)
    (folder / "question.j2").write_text("{{ prompt }} {{ response }} {{ gold }}", encoding="utf-8")
    judge = {
        "function": "judge",
        "model": "wise",
        "prompt": str(folder / "question.j2"),
        "parse": "tests.extras.auxiliary.parsing:characters",
        "max_tokens": 8,
        "temperature": 1.0,
    }
    return write_recipe(
        folder / "recipe.toml",
        model,
        folder / "run",
        data={"prompt_style": "plain"},
        schedule={"stages": 1, "updates_per_stage": UPDATES},
        objective={"teacher": "wise", "teacher_coef": 0.1, **objective},
        eval={"every_stages": 0},
        reward={"functions": {"coin": COIN, "quality": judge}},
        auxiliary={"wise": {"model": str(model), "engine": {"max_running_requests": 4}}},
    )


def kill_in_turn(recipe: Path, what: str, *words: object) -> dict[str, list[dict[str, object]]]:
    """Kill the command and its engines once a part of a column is there; the rows of the parts by name."""
    auxiliaries = recipe.parent / "run" / "auxiliary"
    with started(*words, real_engine=True) as command:
        while not any(auxiliaries.glob(f"*{what}*.parts-*/*.parquet")):
            assert command.wait(0.005) is None, command.said
        family = command.family
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert alive == []
    parts = sorted(auxiliaries.glob(f"*{what}*.parts-*/*.parquet"))
    return {part.stem: pq.read_table(part).to_pylist() for part in parts}


@pytest.mark.night
@pytest.mark.parametrize("learner", [True, False])
@pytest.mark.parametrize("what", ["teacher-wise", "reward-quality"])
def test_killed_while_a_auxiliary_has_its_turn(what: str, learner: bool, tmp_path: Path) -> None:
    """The run's own turn, or that of a process without a learner."""
    recipe = recipe_of(tmp_path)
    words = ["train", recipe] if learner else ["generate", recipe, "--engine-only", "--shard", "0/1"]
    if not learner:
        assert "once all shards have, `mugrpo seal" in mugrpo(*words).stdout
        assert "run its shards again for its auxiliary models" in mugrpo("seal", tmp_path / "run").stdout
    durable = kill_in_turn(recipe, what, *words)
    assert 0 < len(durable) < UPDATES
    mugrpo(*words)
    auxiliaries = tmp_path / "run" / "auxiliary"
    with pq.ParquetFile(auxiliaries / f"stage00000-{what}.parquet") as column:
        assert column.num_row_groups == UPDATES
        for update, rows in durable.items():
            assert column.read_row_group(int(update)).to_pylist() == rows
    assert not list(auxiliaries.glob("*.parts-*"))
    if not learner:
        return
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert sum(row["kind"] == "update" for row in rows) == UPDATES
    turns = [row for row in rows if row.get("phase") == "auxiliary"]
    assert len(turns) == 1, "the killed one wrote no row"
