"""Layouts that fit a model and a number of ranks, and the one nearest to a recipe's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

from mugrpo_megatron.recipe.systems import ParallelSection

VIRTUAL = (1, 2, 4)
"""Chunks per pipeline rank to try."""


def experts_of(model: Mapping[str, Any]) -> int:
    """Routed experts of each layer of a Hugging Face config; 0 for a dense model."""
    return model.get("num_experts") or model.get("num_local_experts") or 0


def divisors(n: int) -> list[int]:
    """All divisors of n > 0, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def candidates(model: Mapping[str, Any], world: int) -> Iterator[ParallelSection]:
    """Layouts whose sizes divide what they split and the world, whatever else may speak against them."""
    heads, layers = model.get("num_attention_heads") or 1, model.get("num_hidden_layers") or 1
    experts = experts_of(model)
    for tensor, pipeline in product(divisors(heads), divisors(layers)):
        if world % (tensor * pipeline):
            continue
        for context in divisors(world // (tensor * pipeline)):
            data = world // (tensor * pipeline * context)
            for expert in divisors(math.gcd(data * context, experts)) if experts else [1]:
                for virtual in VIRTUAL if pipeline > 1 else (1,):
                    if layers % (pipeline * virtual):
                        continue
                    yield ParallelSection(
                        tensor=tensor,
                        pipeline=pipeline,
                        virtual_pipeline=virtual,
                        context=context,
                        expert=expert,
                        sequence=tensor > 1,
                    )


def distance(one: ParallelSection, other: ParallelSection) -> float:
    """Distance of two layouts: doublings of each size; context parallelism costs most, as the last resort."""
    sizes = ("tensor", "pipeline", "virtual_pipeline", "context", "expert")
    weights = (1.0, 1.0, 0.5, 2.0, 1.0)
    steps = sum(w * abs(math.log2(getattr(one, s) / getattr(other, s))) for s, w in zip(sizes, weights, strict=True))
    return steps + 0.1 * (one.sequence != other.sequence)


def nearest(
    wanted: ParallelSection, model: Mapping[str, Any], world: int, allowed: Callable[[ParallelSection], bool]
) -> ParallelSection | None:
    """The candidate closest to `wanted` that is `allowed`; None when the model has no layout on `world` ranks."""
    for candidate in sorted(candidates(model, world), key=lambda one: distance(one, wanted)):
        if allowed(candidate):
            return candidate
    return None


def describe(layout: ParallelSection) -> str:
    """The layout as recipe keys, those at 1 left out."""
    sizes = {name: value for name, value in layout.model_dump().items() if name != "sequence" and value > 1}
    keys = [f"{name} = {value}" for name, value in sizes.items()] + ["sequence = true"] * layout.sequence
    return ", ".join(keys) or "every size 1"
