"""Reward files of other trainers train: their parts are in the metrics of stages and updates, and in the stage."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mugrpo_megatron.observe.log import FILE_NAME, read_rows
from mugrpo_megatron.stages.store import StageStore
from tests.tiny import mugrpo, rows, save_model, write_recipe

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

    (stage,), updates = rows(tmp_path / "run", "stage"), rows(tmp_path / "run", "update")
    names = {"reward/right", "reward/short", "reward/short.longest", "reward/score", "reward/score.acc"}
    assert all(names | {"reward/overlong"} <= row.keys() for row in (stage, *updates))
    assert -0.6 <= stage["reward/short"] < 0.0, "a tenth a token, of at most six"
    everything = read_rows(tmp_path / "run" / FILE_NAME)
    assert {row["kind"] for row in everything if "reward/arithmetic" in row} == {"eval"}

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


def test_half_of_the_responses_have_no_reward(tmp_path: Path) -> None:
    """Advantages, baseline and log by hand, from the texts; a group without any reward keeps one response."""
    sizes = {"prompts_per_update": 8, "responses_per_prompt": 8}
    reward = {"function": "tests.rewards.functions:half_scored"}
    recipe = write_recipe(
        tmp_path / "recipe.toml", save_model(tmp_path / "model"), tmp_path / "run",
        reward=reward, rollout=sizes, schedule={"stages": 1},
    )  # fmt: skip
    said = mugrpo("train", recipe).stdout
    store, shares, kept = StageStore(tmp_path / "run" / "stages" / "00000"), [], 0
    for update, row in enumerate(rows(tmp_path / "run", "update")):
        advantages: list[float] = []
        samples = store.read_update(update, with_text=True)
        for group in range(8 * update, 8 * update + 8):
            members = [sample for sample in samples if sample.group == group]
            share = members[0].components.get("group.unscored", 0.0)
            assert len(members) == max(1, round(8 * (1 - share)))
            rewards = np.array([float(len(sample.text) % 4 == 0) for sample in members])
            if share == 1.0:
                rewards *= 0
            assert all(len(sample.text) % 2 == 0 for sample in members) is (share < 1.0)
            spread = rewards.std(ddof=1) if len(members) > 1 else 0.0
            expected = (rewards - rewards.mean()) / (spread + 1e-6)
            np.testing.assert_allclose([sample.advantage or 0.0 for sample in members], expected, rtol=1e-5)
            assert [sample.reward for sample in members] == rewards.tolist()
            advantages += expected.tolist()
            shares.append(share)
        kept += len(advantages)
        assert row["advantage_mean"] == pytest.approx(np.mean(advantages), abs=1e-5)
        assert row["advantage_std"] == pytest.approx(np.std(advantages), rel=1e-5)
        assert row["zero_advantage_fraction"] == pytest.approx(np.mean([value == 0 for value in advantages]))
        assert row["reward_mean"] == pytest.approx(np.mean([sample.reward for sample in samples]))
    (stage,) = rows(tmp_path / "run", "stage")
    assert stage["unscored_fraction"] == pytest.approx(np.mean(shares))
    assert 0.2 < stage["unscored_fraction"] < 0.8
    assert stage["responses"] == kept
    assert f"{100 * stage['unscored_fraction']:.3g} % of the responses of stage 0 have no reward" in said
