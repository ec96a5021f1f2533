"""Texts that end a response: its last token completes one, and its log-probabilities go with its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.launch import sampling
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.samples import Problem, Prompt
from tests.tiny import save_model, write_recipe

pytestmark = pytest.mark.process
STOPS = ["7", "12"]


def test_a_response_ends_with_the_token_that_completes_a_stop(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    changes: dict[str, Any] = {
        "rollout": {"stop": STOPS, "max_response_tokens": 40, "top_k": 10},
    }
    recipe = load_recipe(write_recipe(tmp_path / "recipe.toml", model, tmp_path / "run", **changes))
    tokenizer = load_tokenizer(model)
    engine = Engine.start(recipe, model, tmp_path / "engine.log")
    try:
        prompts = [Prompt(i, Problem(f"p:{i}", "", ""), tokenizer.encode(f"{i}+5=")) for i in range(64)]
        ends = []
        for _, responses in engine.generate(prompts, 4, sampling(recipe, tokenizer)):
            for response in responses:
                ids = response.ids.tolist()
                assert response.kept is not None
                assert len(ids) == len(response.logprobs) == len(response.kept)
                whole, before = tokenizer.decode(ids), tokenizer.decode(ids[:-1])
                assert not any(stop in before for stop in STOPS)
                if response.finish_reason == "length":
                    assert len(ids) == 40
                elif ids[-1] != tokenizer.eos_token_id:
                    assert any(stop in whole for stop in STOPS)
                    ends.append(whole)
        assert any(end.endswith("7") for end in ends)
    finally:
        engine.stop()
