"""Reward files of other trainers train: their parts are in the metrics of stages and updates, and in the stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mugrpo_megatron.observe.log import FILE_NAME, read_rows
from mugrpo_megatron.stages.store import StageStore
from tests.tiny import mugrpo, save_model, write_recipe

pytestmark = pytest.mark.process

FOREIGN = "tests.rewards.foreign"
FUNCTIONS = {
    "right": {"function": f"{FOREIGN}.trl_rewards:correctness"},
    "short": {"function": f"{FOREIGN}.trl_rewards:brevity", "weight": 0.5},
    "score": {"function": f"{FOREIGN}.verl_reward:compute_score", "weight": 0.1, "sources": ["sums", "arithmetic"]},
}


def write_data(path: Path, source: str) -> Path:
    """Every other problem is of `source`, the others of the source `doubles`."""
    rows = [
        {"problem": f"{n}+{n}=", "answer": str(2 * n), "data_source": source if n % 2 else "doubles"}
        | {"extra_info": {"level": "easy"}}
        for n in range(1, 33)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_trl_file_and_a_verl_file_train_unchanged(tmp_path: Path) -> None:
    def recipe(data: Path, **functions: object) -> Path:
        return write_recipe(
            tmp_path / f"{data.stem}.toml",
            model,
            tmp_path / "run",
            data={"train": str(data)},
            reward={"functions": functions, "overlong_buffer_tokens": 4},
            schedule={"stages": 1},
        )

    model = save_model(tmp_path / "model")
    uncovered = recipe(write_data(tmp_path / "uncovered.jsonl", "sums"), score=FUNCTIONS["score"])
    assert "no reward function scores the data source 'doubles'" in mugrpo("train", uncovered, code=2).stderr
    mugrpo("train", recipe(write_data(tmp_path / "rows.jsonl", "sums"), **FUNCTIONS))

    rows = read_rows(tmp_path / "run" / FILE_NAME)
    (stage,) = (row for row in rows if row["kind"] == "stage")
    updates = [row for row in rows if row["kind"] == "update"]
    names = {"reward/right", "reward/short", "reward/short.longest", "reward/score", "reward/score.acc"}
    assert all(names | {"reward/overlong"} <= row.keys() for row in (stage, *updates))
    assert -0.6 <= stage["reward/short"] < 0.0, "a tenth a token, of at most six"
    assert {row["kind"] for row in rows if "reward/arithmetic" in row} == {"eval"}

    store = StageStore(tmp_path / "run" / "stages" / "00000")
    for update, row in enumerate(updates):
        samples = store.read_update(update, with_text=True)
        by_verl = ["score" in sample.components for sample in samples]
        assert by_verl == [json.loads(sample.row)["data_source"] == "sums" for sample in samples]
        for sample in samples:
            parts = {"score": 0.0, **sample.components}
            expected = parts["right"] + 0.5 * parts["short"] + 0.1 * parts["score"] - parts["overlong"]
            assert sample.reward == pytest.approx(expected)
        short = [sample.components["short"] for sample in samples]
        assert row["reward/short"] == pytest.approx(sum(short) / len(short))
