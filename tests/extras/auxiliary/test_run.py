"""A run with a teacher: SGLang's scores are the learner's own of the same weights, and the learner's memory is back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.stages.columns import LogprobColumn
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
