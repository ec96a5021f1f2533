"""What an engine cannot do, as one table: when, why with the way out, and the newest SGLang in which it was seen.

A test compares `until` with the pinned SGLang, so that every row is looked at again when the pin moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.systems import BLOCK
from mugrpo_megatron.weights.config import attention_factor

SGLANG = "0.5.15"
PROJECT_LIMIT = ""
"""A row's `until` where this project draws the line."""
DETERMINISTIC_ATTENTION = ("fa3", "flashinfer", "triton")
"""What `engine.extra.attention_backend` may be where SGLang computes a response alike in every batch."""
UNTIED = ("mixtral", "qwen3_moe")
"""Model types whose class in SGLang has an output layer of its own, whatever `tie_word_embeddings` says."""

_DEEPSEEK = ("moe_layer_freq", "scoring_func", "topk_method")
UNWRITTEN = {"deepseek_v3": _DEEPSEEK, "kimi_k2": _DEEPSEEK, "glm4_moe_lite": ("first_k_dense_replace",)}
"""Fields that SGLang's class of a model type needs and transformers leaves out."""


class EngineSetup(NamedTuple):
    """What a row looks at."""

    recipe: Recipe
    model: Mapping[str, Any] = {}
    """The Hugging Face config; empty where it is not known."""
    cuda: bool | None = None
    """Whether the engine runs on CUDA; None where that is not known."""


@dataclass(frozen=True, slots=True)
class Gap:
    """One thing that an engine cannot do."""

    when: Callable[[EngineSetup], object]
    """True, or a value for `why`, where the recipe asks for it."""
    why: str
    """The sentence, with `{section.key}` of the recipe, `{model[key]}`, and `{it}` for what `when` returned."""
    until: str = SGLANG
    """The newest SGLang in which it was seen."""


def _scaling(case: EngineSetup) -> dict[str, Any]:
    """The config's rope scaling, of either version of transformers."""
    return {**(case.model.get("rope_scaling") or {}), **(case.model.get("rope_parameters") or {})}


def _rope(case: EngineSetup) -> str:
    scaling = _scaling(case)
    return scaling.get("rope_type", scaling.get("type")) or "default"


def _other_yarn(case: EngineSetup) -> bool:
    """Whether the config scales attention otherwise than by YaRN's factor alone."""
    scaling, factor = _scaling(case), _scaling(case).get("factor")
    if _rope(case) != "yarn" or not isinstance(factor, int | float) or _latent(case):
        return False
    return not math.isclose(attention_factor(scaling, factor), attention_factor({}, factor), rel_tol=1e-6)


def _other_head_dim(case: EngineSetup) -> bool:
    head_dim, heads = case.model.get("head_dim"), case.model.get("num_attention_heads")
    return bool(head_dim and heads and head_dim * heads != case.model.get("hidden_size"))


def _broken_blocks(case: EngineSetup) -> str:
    """Matrices whose shards are no whole fp8 blocks, where SGLang asks for that (fp8.py)."""
    model, tensor = case.model, case.recipe.engine.tensor
    heads = model.get("num_attention_heads") or 1
    kv_heads = model.get("num_key_value_heads") or heads
    head_dim = model.get("head_dim") or (model.get("hidden_size") or heads) // heads
    widths = {
        "num_attention_heads x head_dim": heads * head_dim / tensor,
        "num_key_value_heads x head_dim": max(1, kv_heads / tensor) * head_dim,
        **{key: model[key] / tensor for key in ("intermediate_size", "moe_intermediate_size") if model.get(key)},
    }
    if not _fp8(case) or not model:
        return ""
    return " and ".join(f"{name} is {width:g}" for name, width in widths.items() if width % BLOCK)


def _fp8(case: EngineSetup) -> bool:
    return case.recipe.engine.quantization == "fp8"


def _latent(case: EngineSetup) -> bool:
    return bool(case.model.get("kv_lora_rank"))


def _unwritten(case: EngineSetup) -> str:
    needed = UNWRITTEN.get(case.model.get("model_type", ""), ())
    return " and ".join(name for name in needed if case.model.get(name) is None)


def _mixtral(case: EngineSetup) -> bool:
    return case.model.get("model_type") == "mixtral"


def _extra(case: EngineSetup, name: str) -> Any:
    return case.recipe.engine.extra.get(name)


GAPS = (
    Gap(
        lambda c: c.recipe.engine.tensor % c.recipe.engine.nodes,
        "engine.nodes = {engine.nodes} does not divide engine.tensor = {engine.tensor}: each node runs as many of an "
        "engine's ranks; set engine.tensor to {engine.nodes} times the devices of a node",
        PROJECT_LIMIT,
    ),
    Gap(
        lambda c: c.recipe.rollout.function and c.recipe.learner.routing_replay == "rollout",
        'learner.routing_replay = "rollout" with rollout.function: an engine returns the experts of one request, and '
        'an episode has several; set it to "learner"',
        PROJECT_LIMIT,
    ),
    Gap(
        lambda c: c.model.get("model_type") in UNTIED and c.model.get("tie_word_embeddings"),
        "the model is a {model[model_type]} with tie_word_embeddings, and for that family SGLang has an output layer "
        "of its own, which a tied checkpoint leaves unset: store the embedding as lm_head.weight as well, and set "
        "tie_word_embeddings to false in its config.json",
    ),
    Gap(
        lambda c: _rope(c) == "yarn" and not isinstance(_scaling(c).get("factor"), int | float),
        "the model's YaRN has no factor, for which SGLang takes 1: write it into the rope scaling of its config.json "
        "(max_position_embeddings / original_max_position_embeddings)",
    ),
    Gap(
        _other_yarn,
        "the model's YaRN has an attention_factor, or mscale and mscale_all_dim, which SGLang does not read: engine "
        "and learner would be different policies",
    ),
    Gap(
        lambda c: _mixtral(c) and _rope(c) != "default" and _rope(c),
        "the model is a mixtral with rope scaling of type {it}, which SGLang does not read for that family: engine and "
        "learner would be different policies",
    ),
    Gap(
        lambda c: _mixtral(c) and _other_head_dim(c),
        "the model is a mixtral with head_dim {model[head_dim]}, and for that family SGLang takes hidden_size / "
        "num_attention_heads = {model[hidden_size]} / {model[num_attention_heads]}: it would load other shapes",
    ),
    Gap(
        lambda c: _extra(c, "speculative_algorithm") not in (None, "NGRAM"),
        "engine.extra.speculative_algorithm = {engine.extra[speculative_algorithm]!r} needs a draft model: a weight "
        "sync would load the learner's weights into it, and it would lose its own while the engine sleeps; set it to "
        '"NGRAM", which needs none, or remove it',
    ),
    Gap(
        lambda c: (
            c.recipe.run.deterministic
            and _extra(c, "attention_backend") is not None
            and _extra(c, "attention_backend") not in DETERMINISTIC_ATTENTION
        ),
        "run.deterministic = true with engine.extra.attention_backend = {engine.extra[attention_backend]!r}: its "
        f"results depend on the batch; take one of {', '.join(DETERMINISTIC_ATTENTION)}, or leave it out",
    ),
    Gap(
        lambda c: c.recipe.run.deterministic and _extra(c, "speculative_algorithm"),
        "run.deterministic = true with engine.extra.speculative_algorithm: drafts are accepted by a random stream that "
        "all requests share; remove one of the two",
    ),
    Gap(
        lambda c: _fp8(c) and c.recipe.model.dtype != "bfloat16",
        'engine.quantization = "fp8" quantises a bfloat16 learner: set model.dtype = "bfloat16", or '
        'engine.quantization = "none"',
        PROJECT_LIMIT,
    ),
    Gap(
        lambda c: (
            _fp8(c) and str(_extra(c, "kv_cache_dtype")).startswith("fp8") and c.recipe.engine.between_stages == "sleep"
        ),
        'engine.quantization = "fp8" with engine.extra.kv_cache_dtype = {engine.extra[kv_cache_dtype]!r}: the cache\'s '
        "scales are then weights, which the engine loses while it sleeps; remove one of the two, or set "
        'engine.between_stages = "restart"',
    ),
    Gap(
        lambda c: _fp8(c) and c.recipe.rollout.behaviour == "learner" and c.recipe.objective.mismatch == "none",
        'engine.quantization = "fp8" samples from another policy than the learner\'s, and rollout.behaviour = '
        '"learner" would take it for the learner\'s: set it to "engine", whose ratios are of the policy that sampled, '
        'or keep it and set objective.mismatch = "truncate" or "drop"',
        PROJECT_LIMIT,
    ),
    Gap(
        _unwritten,
        "the model's config.json lacks {it}, which SGLang reads and transformers does not write: copy it from the "
        "config.json of the published model",
    ),
    Gap(
        lambda c: _fp8(c) and _latent(c),
        'engine.quantization = "fp8" of a model with latent attention: the sync does not know which of its projections '
        'SGLang multiplies in fp8; set it to "none"',
        PROJECT_LIMIT,
    ),
    Gap(
        _broken_blocks,
        f'engine.quantization = "fp8" has one scale for each {BLOCK} rows, but the model\'s {{it}} on each of '
        '{engine.tensor} tensor parallel ranks; lower engine.tensor, or set it to "none"',
    ),
)
"""Whatever device it runs on."""
DEVICE_GAPS = (
    Gap(
        lambda c: c.recipe.run.deterministic and not c.cuda,
        "run.deterministic = true needs CUDA to generate: the products and the attention of a CPU depend on what is "
        "batched together, and SGLang has its fixed ones for CUDA only; set it to false, the learner on a CPU gives "
        "equal bits on equal stages all the same",
    ),
    Gap(
        lambda c: c.recipe.model.dtype == "float32" and c.cuda and not c.recipe.run.deterministic,
        'model.dtype = "float32" with an engine on CUDA: the norms of SGLang take half precision there; set '
        'model.dtype to "bfloat16", or run.deterministic = true, which has other norms',
    ),
    Gap(
        lambda c: c.recipe.learner.routing_replay == "rollout" and not c.cuda,
        'learner.routing_replay = "rollout" needs CUDA to generate: SGLang keeps routed experts in pinned host memory, '
        'which only a machine with an accelerator has; set it to "learner", which records them in a learner pass at '
        "the stage's start",
    ),
    Gap(
        lambda c: _fp8(c) and not c.cuda,
        'engine.quantization = "fp8" needs CUDA: SGLang multiplies in fp8 on a GPU, and on CPUs with AMX alone, which '
        'this project does not use; set it to "none"',
    ),
)
"""On CUDA, or on CPU."""
SYNC_GAPS = (
    Gap(
        lambda c: c.recipe.engine.quantization != "none",
        'engine.quantization = "{engine.quantization}" needs a learner, whose weight sync quantises: leave '
        "--engine-only out, or set it to none",
        PROJECT_LIMIT,
    ),
    Gap(
        lambda c: c.recipe.engine.nodes > 1,
        "an engine of several nodes needs a learner's ranks on each: leave --engine-only out",
        PROJECT_LIMIT,
    ),
)
"""Without a learner."""


def gap_messages(gaps: Iterable[Gap], case: EngineSetup) -> Iterator[str]:
    """Why the engines cannot be what the recipe says, a sentence for each row that applies."""
    sections = {name: getattr(case.recipe, name) for name in Recipe.model_fields if name != "model"}
    for gap in gaps:
        if it := gap.when(case):
            yield gap.why.format(**sections, model=case.model, it=it)


def engine_problems(recipe: Recipe, model: Mapping[str, Any]) -> Iterator[str]:
    """Why the engines cannot be what `[engine]` says, a sentence each; `model` is the Hugging Face config."""
    yield from gap_messages(GAPS, EngineSetup(recipe, model))


def check_engine_device(recipe: Recipe, cuda: bool) -> None:
    """Raise UserError when the engine on a machine with or without CUDA cannot do what the recipe asks of it."""
    for problem in gap_messages(DEVICE_GAPS, EngineSetup(recipe, cuda=cuda)):
        raise UserError(problem)


def depends_on_device(recipe: Recipe) -> bool:
    """Whether the engine can do what the recipe asks only on CUDA, or only on CPU."""
    return any(any(gap_messages(DEVICE_GAPS, EngineSetup(recipe, cuda=cuda))) for cuda in (True, False))


def check_without_sync(recipe: Recipe) -> None:
    """Raise UserError for what engines need a sync with a learner for."""
    for problem in gap_messages(SYNC_GAPS, EngineSetup(recipe)):
        raise UserError(problem)
