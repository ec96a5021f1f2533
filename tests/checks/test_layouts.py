"""The nearest layout that works."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def asking(**sizes: int | bool) -> Recipe:
    return Recipe.model_validate({"parallel": sizes})


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
