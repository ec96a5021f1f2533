"""Impossible layouts are refused before anything starts, with the way out."""

from __future__ import annotations

from typing import Any

import pytest

from mugrpo_megatron.checks.layouts import check_layout
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import Recipe

MODEL = {
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 4096,
}


def recipe(**sections: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(sections)


@pytest.mark.parametrize(("layout", "world"), [({}, 1), ({"tensor": 2, "pipeline": 2}, 4), ({}, 2)])
def test_possible_layouts_pass(layout: dict[str, Any], world: int) -> None:
    check_layout(recipe(parallel=layout), MODEL, world)


@pytest.mark.parametrize(
    ("sections", "world", "said"),
    [
        (
            {"parallel": {"tensor": 3}},
            3,
            r"parallel.tensor = 3 does not divide the model's 4 attention heads.*\[1, 2, 4\]",
        ),
        ({"parallel": {"pipeline": 5}}, 5, r"parallel.pipeline = 5 is more than the model's 4 layers"),
        ({"parallel": {"pipeline": 3, "virtual_pipeline": 2}}, 3, r"= 6 does not divide the model's 4 layers"),
        ({"parallel": {"tensor": 2}}, 3, r"needs a multiple of 2 ranks but 3 run"),
        ({"parallel": {"virtual_pipeline": 2}}, 1, r"virtual_pipeline above 1 needs parallel.pipeline"),
        ({"parallel": {"expert": 2}}, 2, r"the model has no experts"),
        ({"learner": {"routing_replay": "learner"}}, 1, r'routing_replay = "learner" but the model has no experts'),
        ({"objective": {"name": "tis"}}, 1, r'mismatch = "truncate" corrects .* set rollout.behaviour = "learner"'),
        ({"engine": {"tensor": 3}}, 1, r"engine.tensor = 3 does not divide"),
        (
            {"rollout": {"prompts_per_update": 3, "responses_per_prompt": 3}},
            2,
            r"= 9 does not divide over 2 data parallel",
        ),
        ({"learner": {"layers": "fp8_blockwise"}}, 1, r"multiples of 128, but the model's hidden_size is 32;"),
        (
            {"learner": {"layers": "fp8_tensorwise"}, "parallel": {"tensor": 8}},
            8,
            r"multiples of 16, but the model's intermediate_size is 64 over 8 tensor parallel ranks",
        ),
        ({"checkpoint": {"every_stages": 2}, "schedule": {"max_kl": 0.1}}, 1, r"every_stages above 1 .* set it to 1"),
        ({"rollout": {"max_response_tokens": 4000}}, 1, r"= 4512 exceeds the model's 4096 positions"),
    ],
)
def test_impossible_layouts_are_refused(sections: dict[str, Any], world: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_layout(recipe(**sections), MODEL, world)


HYBRID = {**MODEL, "model_type": "qwen3_5_text", "linear_num_key_heads": 6, "linear_num_value_heads": 12}


@pytest.mark.parametrize(
    ("sections", "world", "said"),
    [
        ({"parallel": {"context": 2}}, 2, r"parallel.context = 2 splits sequences, and the state .* set it to 1"),
        ({"parallel": {"tensor": 4}}, 4, r"tensor = 4 does not divide the 2 key/value heads of gated attention"),
        ({"parallel": {"tensor": 4}}, 4, r"tensor = 4 does not divide the model's linear_num_key_heads of 6"),
        ({"learner": {"layers": "fp8_tensorwise"}}, 1, r'not tried in fp8; take "local"'),
    ],
)
def test_what_gated_delta_networks_cannot_be_split_into_is_refused(
    sections: dict[str, Any], world: int, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        check_layout(recipe(**sections), HYBRID, world)


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(UserError, match=r"attention heads.*layers"):
        check_layout(recipe(parallel={"tensor": 3, "pipeline": 5}), MODEL, 15)
