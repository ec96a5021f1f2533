"""Layouts that cannot be, and the nearest one that works; gaps of the pinned SGLang."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.checks.engines import DEVICE_GAPS, GAPS, PROJECT_LIMIT, SYNC_GAPS
from mugrpo_megatron.checks.layouts import (
    candidates,
    check_layout,
    describe_layout,
    layout_distance,
    layout_problems,
    nearest_layout,
)
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.systems import ParallelSection

DENSE = {
    "model_type": "qwen2",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 12,
    "intermediate_size": 64,
    "max_position_embeddings": 4096,
}
EXPERTS = {**DENSE, "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 32}


def recipe(**sections: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(sections)


def asking(**sizes: int | bool) -> Recipe:
    return recipe(parallel=sizes)


@pytest.mark.parametrize(
    ("sizes", "model", "world", "near"),
    [
        ({"tensor": 3}, DENSE, 8, "tensor = 4"),
        ({"pipeline": 13}, DENSE, 13, "nearest layout that 13 ranks can run: context = 13"),
        ({"pipeline": 20}, DENSE, 20, "nearest layout that 20 ranks can run: pipeline = 10"),
        ({"pipeline": 2, "virtual_pipeline": 4}, DENSE, 2, "pipeline = 2, virtual_pipeline = 2"),
        ({"virtual_pipeline": 2}, DENSE, 2, "nearest layout that 2 ranks can run: every size 1"),
        ({"expert": 4}, EXPERTS, 2, "expert = 2"),
        ({"expert": 4}, DENSE, 4, "every size 1"),
        ({"tensor": 16}, DENSE, 16, "tensor = 8"),
    ],
)
def test_a_refusal_names_the_nearest_layout(
    sizes: dict[str, int], model: dict[str, object], world: int, near: str
) -> None:
    with pytest.raises(UserError) as refused:
        check_layout(asking(**sizes), model, world)
    assert near in str(refused.value)


def test_refusals_of_experts() -> None:
    with pytest.raises(UserError, match=r"expert = 4 does not divide the 2 data times context parallel ranks"):
        check_layout(asking(expert=4), EXPERTS, 2)
    check_layout(asking(tensor=2, expert=4), EXPERTS, 8)
    check_layout(asking(context=2, expert=4), EXPERTS, 4)


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@settings(max_examples=60)
@given(
    tensor=SIZES,
    pipeline=SIZES,
    virtual=st.sampled_from([1, 2, 3]),
    context=st.sampled_from([1, 2]),
    expert=st.sampled_from([1, 2, 4]),
    world=st.sampled_from([1, 2, 4, 8, 12, 16, 24]),
    experts=st.booleans(),
)
def test_the_nearest_layout_is_valid_and_a_valid_one_is_its_own_nearest(
    tensor: int, pipeline: int, virtual: int, context: int, expert: int, world: int, experts: bool
) -> None:
    recipe = asking(tensor=tensor, pipeline=pipeline, virtual_pipeline=virtual, context=context, expert=expert)
    model = EXPERTS if experts else DENSE
    nearest = nearest_layout(recipe.parallel, recipe.rollout, model, world)
    if nearest is None:
        layouts = candidates(model, world)
        assert all(any(layout_problems(layout, recipe.rollout, model, world)) for layout in layouts)
        return
    check_layout(recipe.model_copy(update={"parallel": nearest}), model, world)
    if not any(layout_problems(recipe.parallel, recipe.rollout, model, world)) and virtual < 3:
        assert nearest == recipe.parallel


def test_distance_is_zero_to_itself_and_counts_doublings() -> None:
    one = ParallelSection(tensor=2)
    assert layout_distance(one, one) == 0
    assert layout_distance(one, ParallelSection(tensor=8)) == pytest.approx(2)
    assert describe_layout(ParallelSection()) == "every size 1"


MODEL = {**DENSE, "num_attention_heads": 4, "num_hidden_layers": 4, "hidden_size": 32}
HYBRID = {**MODEL, "model_type": "qwen3_5_text", "linear_num_key_heads": 6, "linear_num_value_heads": 12}


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
        ({"parallel": {"tensor": 3, "pipeline": 5}}, 15, r"attention heads.*layers"),  # every problem at once
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


PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_every_row_was_seen_in_the_pinned_sglang() -> None:
    (pin,) = (one for one in PROJECT["optional-dependencies"]["cuda"] if one.startswith("sglang=="))
    for gap in (*GAPS, *DEVICE_GAPS, *SYNC_GAPS):
        assert gap.until == PROJECT_LIMIT or pin.startswith(f"sglang=={gap.until}"), gap.why
