"""Checks of the `[engine]` section across sections: devices, quantised weights, nodes, drafts, equal runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.sections import Recipe
from mugrpo_megatron.weights.config import attention_factor

BLOCK = 128
"""Rows and columns of a weight that share an fp8 scale."""
DETERMINISTIC_ATTENTION = ("auto", "fa3", "flashinfer", "triton")
"""What `engine.attention_backend` may be where SGLang 0.5.15 computes a response alike in every batch."""

UNTIED = ("mixtral", "qwen3_moe")
"""Model types whose class in SGLang 0.5.15 has an output layer of its own, whatever `tie_word_embeddings` says."""


def engine_problems(recipe: Recipe, model: Mapping[str, Any]) -> Iterator[str]:
    """Why the engines cannot be what `[engine]` says, a sentence each; `model` is the Hugging Face config."""
    yield from _node_problems(recipe)
    if recipe.engine.replicas > 1 and recipe.engine.tensor > 1:
        yield (
            f"engine.replicas = {recipe.engine.replicas} with engine.tensor = {recipe.engine.tensor}: replicas are of "
            "engines with one rank; leave one of the two out"
        )
    yield from filter(None, (tied_problem(model), yarn_problem(model), mixtral_problem(model)))
    yield from _draft_problems(recipe)
    if recipe.run.deterministic:
        yield from _deterministic_problems(recipe)
    if recipe.engine.quantization == "fp8":
        yield from _fp8_problems(recipe)
        yield from _block_problems(recipe.engine.tensor, model)


def tied_problem(model: Mapping[str, Any]) -> str:
    """Why an engine would not compute this model's output layer; empty if it does."""
    if model.get("model_type") not in UNTIED or not model.get("tie_word_embeddings"):
        return ""
    return (
        f"the model is a {model['model_type']} with tie_word_embeddings, and for that family SGLang 0.5.15 has an "
        "output layer of its own, which a tied checkpoint leaves unset: store the embedding as lm_head.weight as well, "
        "and set tie_word_embeddings to false in its config.json"
    )


def yarn_problem(model: Mapping[str, Any]) -> str:
    """Why an engine would scale this model's attention otherwise than the learner does; empty if it does not."""
    scaling = {**(model.get("rope_scaling") or {}), **(model.get("rope_parameters") or {})}
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        return ""
    factor = scaling.get("factor")
    if not isinstance(factor, int | float):
        return (
            "the model's YaRN has no factor, for which SGLang 0.5.15 takes 1: write it into the rope scaling of its "
            "config.json (max_position_embeddings / original_max_position_embeddings)"
        )
    if not math.isclose(attention_factor(scaling, factor), attention_factor({}, factor), rel_tol=1e-6):
        return (
            "the model's YaRN has an attention_factor, or mscale and mscale_all_dim, which SGLang 0.5.15 does not "
            "read: engine and learner would be different policies"
        )
    return ""


def mixtral_problem(model: Mapping[str, Any]) -> str:
    """Why an engine would compute another attention than this Mixtral's; empty if it does not, or for other models."""
    if model.get("model_type") != "mixtral":
        return ""
    scaling = {**(model.get("rope_scaling") or {}), **(model.get("rope_parameters") or {})}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        return (
            f"the model is a mixtral with rope scaling of type {kind}, which SGLang 0.5.15 does not read for that "
            "family: engine and learner would be different policies"
        )
    head_dim, heads = model.get("head_dim"), model.get("num_attention_heads")
    if head_dim and heads and head_dim * heads != model.get("hidden_size"):
        return (
            f"the model is a mixtral with head_dim {head_dim}, and for that family SGLang 0.5.15 takes "
            f"hidden_size / num_attention_heads = {model.get('hidden_size')} / {heads}: it would load other shapes"
        )
    return ""


def check_engine_device(recipe: Recipe, cuda: bool) -> None:
    """Raise UserError when the engine on a machine with or without CUDA cannot do what the recipe asks of it."""
    for problem in _device_problems(recipe, cuda):
        raise UserError(problem)


def needs_a_kind_of_device(recipe: Recipe) -> bool:
    """Whether the engine can do what the recipe asks only on CUDA, or only on CPU."""
    return any(any(_device_problems(recipe, cuda)) for cuda in (True, False))


def check_without_sync(recipe: Recipe) -> None:
    """Raise UserError for what engines need a sync with a learner for."""
    if recipe.engine.quantization != "none":
        raise UserError(
            f'engine.quantization = "{recipe.engine.quantization}" needs a learner, whose weight sync quantises: leave '
            "--engine-only out, or set it to none"
        )
    if recipe.engine.nodes > 1:
        raise UserError("an engine of several nodes needs a learner's ranks on each: leave --engine-only out")


def _device_problems(recipe: Recipe, cuda: bool) -> Iterator[str]:
    if recipe.run.deterministic and not cuda:
        yield (
            "run.deterministic = true needs CUDA to generate: the products and the attention of a CPU depend on what "
            "is batched together, and SGLang 0.5.15 has its fixed ones for CUDA only; set it to false, the learner on "
            "a CPU gives equal bits on equal stages all the same"
        )
    if recipe.engine.replicas > 1 and cuda:
        yield (
            f"engine.replicas = {recipe.engine.replicas} is for engines on CPU: on CUDA each rank leads an engine "
            "on its own device; leave it out"
        )
    if recipe.model.dtype == "float32" and cuda and not recipe.run.deterministic:
        yield (
            'model.dtype = "float32" with an engine on CUDA: the norms of SGLang 0.5.15 take half precision there; set '
            'model.dtype to "bfloat16", or run.deterministic = true, which has other norms'
        )
    if recipe.learner.routing_replay == "rollout" and not cuda:
        yield (
            'learner.routing_replay = "rollout" needs CUDA to generate: SGLang 0.5.15 keeps routed experts in pinned '
            'host memory, which only a machine with an accelerator has; set it to "learner", which records them in a '
            "learner pass at the stage's start"
        )
    if recipe.engine.quantization == "fp8" and not cuda:
        yield (
            'engine.quantization = "fp8" needs CUDA: SGLang 0.5.15 multiplies in fp8 on a GPU, and on CPUs with '
            'AMX alone, which this project does not use; set it to "none"'
        )


def _deterministic_problems(recipe: Recipe) -> Iterator[str]:
    """What SGLang 0.5.15 does not compute alike in every batch with `enable_deterministic_inference`."""
    engine = recipe.engine
    if engine.attention_backend not in DETERMINISTIC_ATTENTION:
        yield (
            f'run.deterministic = true with engine.attention_backend = "{engine.attention_backend}": its results '
            f"depend on the batch; take one of {', '.join(DETERMINISTIC_ATTENTION)}"
        )
    if recipe.rollout.min_p > 0:
        yield (
            f"run.deterministic = true with rollout.min_p = {recipe.rollout.min_p:g}: SGLang has no random stream of a "
            "single request under min_p; set rollout.min_p to 0, or run.deterministic to false"
        )
    if engine.extra.get("speculative_algorithm"):
        yield (
            "run.deterministic = true with engine.extra.speculative_algorithm: drafts are accepted by a random stream "
            "that all requests share; remove one of the two"
        )


def _draft_problems(recipe: Recipe) -> Iterator[str]:
    """A second model's weights: SGLang 0.5.15 loads the learner's into it, and loses its own while it sleeps."""
    algorithm = recipe.engine.extra.get("speculative_algorithm")
    if algorithm not in (None, "NGRAM"):
        yield (
            f"engine.extra.speculative_algorithm = {algorithm!r} needs a draft model, which a weight sync would break "
            '(SGLang 0.5.15): set it to "NGRAM", which needs none, or remove it'
        )


def _node_problems(recipe: Recipe) -> Iterator[str]:
    engine = recipe.engine
    if engine.nodes == 1:
        return
    if engine.tensor % engine.nodes:
        yield (
            f"engine.nodes = {engine.nodes} does not divide engine.tensor = {engine.tensor}: each node runs as many "
            f"of an engine's ranks; set engine.tensor to {engine.nodes} times the devices of a node"
        )
    if engine.per_node > 1:
        yield (
            f"engine.per_node = {engine.per_node}, but an engine of {engine.nodes} nodes takes all their devices; "
            "leave engine.per_node out"
        )


def _fp8_problems(recipe: Recipe) -> Iterator[str]:
    asked = 'engine.quantization = "fp8"'
    if recipe.model.dtype != "bfloat16":
        yield f'{asked} quantises a bfloat16 learner: set model.dtype = "bfloat16", or engine.quantization = "none"'
    cache = recipe.engine.extra.get("kv_cache_dtype", "")
    if str(cache).startswith("fp8") and recipe.engine.between_stages == "sleep":
        yield (
            f"{asked} with engine.extra.kv_cache_dtype = {cache!r}: the cache's scales are then weights, which the "
            'engine loses while it sleeps; remove one of the two, or set engine.between_stages = "restart"'
        )
    if recipe.rollout.behaviour == "learner" and recipe.objective.mismatch == "none":
        yield (
            f'{asked} samples from another policy than the learner\'s, and rollout.behaviour = "learner" would take '
            'it for the learner\'s: set it to "engine", whose ratios are of the policy that sampled, or keep it and '
            'set objective.mismatch = "truncate" or "drop"'
        )


def _block_problems(tensor: int, model: Mapping[str, Any]) -> Iterator[str]:
    """Matrices whose shards on `tensor` ranks are no whole blocks, where SGLang asks for that (fp8.py, 0.5.15)."""
    heads = model.get("num_attention_heads") or 1
    kv_heads = model.get("num_key_value_heads") or heads
    head_dim = model.get("head_dim") or (model.get("hidden_size") or heads) // heads
    widths = {
        "num_attention_heads x head_dim": heads * head_dim / tensor,
        "num_key_value_heads x head_dim": max(1, kv_heads / tensor) * head_dim,
        **{key: model[key] / tensor for key in ("intermediate_size", "moe_intermediate_size") if model.get(key)},
    }
    for name, width in widths.items():
        if width % BLOCK:
            yield (
                f'engine.quantization = "fp8" has one scale for each {BLOCK} rows, but the model\'s {name} is '
                f"{width:g} on each of {tensor} tensor parallel ranks; lower engine.tensor, or set it to "
                '"none"'
            )
