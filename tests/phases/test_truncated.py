"""A run whose sampler keeps a few tokens a place and stops at texts: what the stage stores, and ratios among them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.engine import sglang_compat
from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.stages.store import StageStore
from tests.tiny import COIN, mugrpo, save_model, write_recipe

pytestmark = pytest.mark.process
STOPS = ["7", "12"]
MASKED = pytest.mark.skipif(not sglang_compat.is_new(), reason="this SGLang returns no masks of its sampler")


@pytest.mark.parametrize("top_k", [3, pytest.param(90, marks=MASKED)], ids=["top logprobs", "masks"])
def test_engine_and_learner_agree_on_what_was_sampled_from(top_k: int, tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path / "recipe.toml",
        save_model(tmp_path / "model"),
        tmp_path / "run",
        schedule={"stages": 1, "updates_per_stage": 2},
        rollout={"top_k": top_k, "top_p": 0.9, "stop": STOPS, "max_response_tokens": 40, "prompts_per_update": 32},
        reward=COIN,
    )
    mugrpo("train", recipe)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    [stage] = [row for row in rows if row["kind"] == "stage"]
    first = next(row for row in rows if row["kind"] == "update")
    assert stage["mismatch_max"] < 1e-3, "over the whole vocabulary they would differ by the log of what was left out"
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    assert first["entropy"] < np.log(top_k)
    tokenizer, ends = load_tokenizer(tmp_path / "model"), []
    for sample in StageStore(tmp_path / "run" / "stages" / "00000").read_update(0):
        assert sample.support_ids is not None
        assert len(sample.support_ids) == len(sample.response_ids)
        assert (sample.support_ids == sample.response_ids[:, None]).any(1).all()
        assert sample.support_ids.shape[1] <= top_k
        ids = sample.response_ids.tolist()
        assert not any(stop in tokenizer.decode(ids[:-1]) for stop in STOPS), "the last token completes a stop"
        if sample.finish_reason == "length":
            assert len(ids) == 40
        elif ids[-1] != tokenizer.eos_token_id:
            ends.append(tokenizer.decode(ids))
    assert all(any(stop in end for stop in STOPS) for end in ends)
    assert any(end.endswith("7") for end in ends)
