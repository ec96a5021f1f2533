"""The table of gaps: what SGLang, or this project's use of it, cannot run, each with the way out.

A test compares `Gap.until` with the SGLang version that this project pins, so that somebody looks at every row again
when that version changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mugrpo_megatron.engine.sglang_compat import has_gated_delta
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import has_delta
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.systems import BLOCK
from mugrpo_megatron.weights.config import CLASSES, attention_factor, engine_rope_fields, mscale

SGLANG = "0.5.15"
PROJECT_LIMIT = ""
"""Value of `Gap.until` for a limit of this project, which no newer SGLang lifts."""
DETERMINISTIC_ATTENTION = ("fa3", "flashinfer", "triton")
"""Values of `engine.extra.attention_backend` with which SGLang's results do not depend on the batch."""
UNTIED = ("mixtral", "qwen3_moe")
"""Model types whose class in SGLang ignores `tie_word_embeddings` and has a separate output layer."""

ENGINE_CLASSES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""Model type -> its class in SGLang and in `architectures` of a config."""

_DEEPSEEK = ("moe_layer_freq", "scoring_func", "topk_method")
UNWRITTEN = {
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe_lite": ("first_k_dense_replace",),
    "qwen3_5_text": ("full_attention_interval",),
    "qwen3_5_moe_text": ("full_attention_interval",),
}
"""Model type -> fields of config.json that SGLang's class of the model reads and that transformers leaves out when it
saves a config."""


class EngineSetup(NamedTuple):
    """The input of a gap's condition: the recipe, its model, and whether the engine runs on CUDA."""

    recipe: Recipe
    model: Mapping[str, Any] = {}
    """Hugging Face config; empty if it is not known."""
    cuda: bool | None = None
    """Whether the engine runs on CUDA; None if that is not known."""


@dataclass(frozen=True, slots=True)
class Gap:
    """One combination of settings, model and device that an engine cannot run."""

    when: Callable[[EngineSetup], object]
    """Returns something true if the gap applies; `why` may show it as `{it}`."""
    why: str
    """The sentence for the user, a format string: `{section.key}` stands for a value of the recipe, `{model[key]}` for
    one of the model's config, `{it}` for the value that `when` returned."""
    until: str = SGLANG
    """Newest SGLang version that has the gap."""


def _scaling(setup: EngineSetup) -> dict[str, Any]:
    """Returns the config's rope scaling: `rope_scaling` of transformers 4 or `rope_parameters` of 5."""
    return {**(setup.model.get("rope_scaling") or {}), **(setup.model.get("rope_parameters") or {})}


def _rope(setup: EngineSetup) -> str:
    scaling = _scaling(setup)
    return scaling.get("rope_type", scaling.get("type")) or "default"


def _yarn_positions(setup: EngineSetup) -> int:
    """Returns the number of positions in SGLang's table of YaRN rotations if the recipe allows longer sequences than
    that, else 0.

    The table has factor times original_max_position_embeddings positions (layers/rotary_embedding/yarn.py), whatever
    max_position_embeddings says. For later positions SGLang reads beyond the table's end.
    """
    scaling, recipe = _scaling(setup), setup.recipe
    known = (scaling.get("factor"), scaling.get("original_max_position_embeddings"))
    if _rope(setup) != "yarn" or not all(isinstance(value, int | float) for value in known):
        return 0
    positions = int(known[0] * known[1])  # type: ignore[operator]  # both are numbers, by the condition above
    return positions if positions < recipe.longest_sequence else 0


def _other_yarn(setup: EngineSetup) -> str:
    """Returns, as text, the two keys to set so that SGLang scales attention as the config asks.

    "" if SGLang does so already, without YaRN or its factor, and for latent attention (`_latent_yarn`).

    SGLang multiplies the scale that follows from YaRN's factor by `attn_factor` (layers/rotary_embedding/yarn.py). It
    does not read `attention_factor`, which learner and transformers read.
    """
    scaling, factor = _scaling(setup), _scaling(setup).get("factor")
    if _rope(setup) != "yarn" or not isinstance(factor, int | float) or _latent(setup):
        return ""
    given = 1.0 if scaling.get("attn_factor") is None else scaling["attn_factor"]
    scale = attention_factor(scaling, factor)
    wanted = scale / mscale(factor, 1.0)
    if math.isclose(wanted, given, rel_tol=1e-6):
        return ""
    return f"attention_factor = {scale:.16g} and attn_factor = {wanted:.16g}"


def _latent_yarn(setup: EngineSetup) -> str:
    """Returns the keys of YaRN that SGLang does not read for latent attention and that change the model.

    "" if there are none, and for a model without YaRN or without latent attention.
    """
    scaling = _scaling(setup)
    if _rope(setup) != "yarn" or not _latent(setup):
        return ""
    changed = [
        name for name, same in (("truncate", True), ("attention_factor", None)) if scaling.get(name, same) != same
    ]
    return " and ".join(changed)


def _null_rope(setup: EngineSetup) -> str:
    """Returns the keys of rope scaling that are null although SGLang reads a number from them; "" if there are none."""
    scaling = _scaling(setup)
    read = engine_rope_fields(setup.model.get("model_type", ""), _rope(setup))
    return " and ".join(name for name in read if name in scaling and scaling[name] is None and name != "type")


def _other_class(setup: EngineSetup) -> str:
    """Returns, as a part of the gap's sentence, the config's `architectures` and the class that SGLang needs there.

    "" if the two agree, if the config lacks `model_type` or `architectures`, or if the model type is unknown. SGLang
    chooses the model's class by `architectures`, not by `model_type`.
    """
    family, named = setup.model.get("model_type", ""), setup.model.get("architectures")
    expected = ENGINE_CLASSES.get(CLASSES.get(family, family))
    if not expected or "model_type" not in setup.model or "architectures" not in setup.model:
        return ""
    if (named or [""])[0] == expected:
        return ""
    return f"{named}, from which SGLang takes the model's class; set it to {[expected]}"


def _other_head_dim(setup: EngineSetup) -> bool:
    head_dim, heads = setup.model.get("head_dim"), setup.model.get("num_attention_heads")
    return bool(head_dim and heads and head_dim * heads != setup.model.get("hidden_size"))


def _broken_blocks(setup: EngineSetup) -> str:
    """Returns, as text, the matrix dimensions whose share on a tensor parallel rank is no multiple of `BLOCK`; "" if
    there are none, or if the engine does not multiply in fp8.

    In fp8 SGLang requires multiples (layers/quantization/fp8.py).
    """
    model, tensor = setup.model, setup.recipe.engine.tensor
    heads = model.get("num_attention_heads") or 1
    kv_heads = model.get("num_key_value_heads") or heads
    head_dim = model.get("head_dim") or (model.get("hidden_size") or heads) // heads
    widths = {
        "num_attention_heads x head_dim": heads * head_dim / tensor,
        "num_key_value_heads x head_dim": max(1, kv_heads / tensor) * head_dim,
        **{key: model[key] / tensor for key in ("intermediate_size", "moe_intermediate_size") if model.get(key)},
    }
    if not _fp8(setup) or not model:
        return ""
    return " and ".join(f"{name} is {width:g}" for name, width in widths.items() if width % BLOCK)


def _fp8(setup: EngineSetup) -> bool:
    return setup.recipe.engine.quantization == "fp8"


def _latent(setup: EngineSetup) -> bool:
    return bool(setup.model.get("kv_lora_rank"))


def _hybrid(setup: EngineSetup) -> bool:
    return has_delta(setup.model)


def _other_interval(setup: EngineSetup) -> str:
    """Returns, as text, which layers (counted from 1) have full attention, if these are not every
    `full_attention_interval`-th layer; else ""."""
    interval, kinds = setup.model.get("full_attention_interval"), setup.model.get("layer_types")
    full = [layer for layer, kind in enumerate(kinds or [], 1) if kind == "full_attention"]
    if not _hybrid(setup) or not interval or not kinds or full == list(range(interval, len(kinds) + 1, interval)):
        return ""
    return ", ".join(map(str, full)) or "none"


def _unwritten(setup: EngineSetup) -> str:
    needed = UNWRITTEN.get(setup.model.get("model_type", ""), ())
    return " and ".join(name for name in needed if setup.model.get(name) is None)


def _fraction_of_theta(setup: EngineSetup) -> bool:
    theta = _scaling(setup).get("rope_theta") or setup.model.get("rope_theta") or 1
    return _mixtral(setup) and theta != int(theta)


def _mixtral(setup: EngineSetup) -> bool:
    return setup.model.get("model_type") == "mixtral"


def _extra(setup: EngineSetup, name: str) -> Any:
    return setup.recipe.engine.extra.get(name)


GAPS = (
    Gap(
        lambda c: _hybrid(c) and not has_gated_delta(),
        "the model is a {model[model_type]}, for which the installed SGLang has no class: take the new stack, "
        "`run_scripts/setup.sh --stack new`",
    ),
    Gap(
        _other_interval,
        "the model's layer_types has full attention in layers {it}, and SGLang reads full_attention_interval = "
        "{model[full_attention_interval]} alone: it would load other layers; correct the wrong one of the two in "
        "config.json",
    ),
    Gap(
        lambda c: c.recipe.engine.tensor % c.recipe.engine.nodes,
        "engine.nodes = {engine.nodes} does not divide engine.tensor = {engine.tensor}: each node runs the same "
        "number of an engine's ranks; set engine.tensor to {engine.nodes} times the devices of a node",
        PROJECT_LIMIT,
    ),
    Gap(
        lambda c: c.recipe.rollout.episodes and c.recipe.learner.routing_replay == "rollout",
        'learner.routing_replay = "rollout" with episodes: an engine returns the experts that its '
        'routers chose in one request, and an episode has several requests; set it to "learner"',
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
        _yarn_positions,
        "the model's YaRN has {it} positions (factor times original_max_position_embeddings), fewer than the "
        "longest sequence of the recipe has tokens: SGLang would read beyond its table of rotations; lower "
        "data.max_prompt_tokens, rollout.max_response_tokens or eval's max_tokens",
    ),
    Gap(
        _other_yarn,
        "the model's YaRN has an attention_factor, or mscale and mscale_all_dim, which SGLang does not read: engine "
        "and learner would be different policies; set {it} in its rope scaling",
    ),
    Gap(
        _latent_yarn,
        "the model's YaRN has {it}, which SGLang does not read for latent attention: engine and learner would be "
        "different policies; take a model without it",
    ),
    Gap(
        _null_rope,
        "the model's rope scaling has null for {it}, where SGLang needs a number: remove it from config.json",
    ),
    Gap(
        _other_class,
        "the model's config.json has architectures {it}, the class of model_type {model[model_type]}",
    ),
    Gap(
        lambda c: _mixtral(c) and _rope(c) != "default" and _rope(c),
        "the model is a mixtral with rope scaling of type {it}, which SGLang does not read for that family: engine and "
        "learner would be different policies; take a model without it",
    ),
    Gap(
        _fraction_of_theta,
        "the model is a mixtral whose rope_theta is no whole number, which SGLang rounds down for that family: engine "
        "and learner would be different policies; take a model with a whole rope_theta",
    ),
    Gap(
        lambda c: _mixtral(c) and _other_head_dim(c),
        "the model is a mixtral with head_dim {model[head_dim]}, and for that family SGLang takes hidden_size / "
        "num_attention_heads = {model[hidden_size]} / {model[num_attention_heads]}: it would load weights of "
        "other shapes; take a model where the two are equal",
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
        lambda c: _fp8(c) and _hybrid(c),
        'engine.quantization = "fp8" of a model with gated delta networks: the sync does not know which projections '
        'SGLang multiplies in fp8; set it to "none"',
        PROJECT_LIMIT,
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
"""Gaps that engines have on any device."""
DEVICE_GAPS = (
    Gap(
        lambda c: c.recipe.run.deterministic and not c.cuda,
        "run.deterministic = true needs CUDA to generate: on a CPU, SGLang's matrix products and attention depend on "
        "which requests it batches together; set it to false, the learner on a CPU trains to the same bits on the same "
        "stage without it",
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
"""Gaps that engines have only on CUDA, or only without it."""
SYNC_GAPS = (
    Gap(
        lambda c: c.recipe.engine.quantization != "none",
        'engine.quantization = "{engine.quantization}" needs a learner, whose weight sync quantises: leave '
        '--engine-only out, or set it to "none"',
        PROJECT_LIMIT,
    ),
    Gap(
        lambda c: c.recipe.engine.nodes > 1,
        "engine.nodes = {engine.nodes} needs a learner's ranks on each: leave --engine-only out, or set it to 1",
        PROJECT_LIMIT,
    ),
)
"""Gaps of engines that run without a learner, and so get no weight sync."""


def gap_messages(gaps: Iterable[Gap], setup: EngineSetup) -> Iterator[str]:
    """Yields the sentence of each gap that applies."""
    sections = {name: getattr(setup.recipe, name) for name in Recipe.model_fields if name != "model"}
    for gap in gaps:
        if it := gap.when(setup):
            yield gap.why.format(**sections, model=setup.model, it=it)


def engine_problems(setup: EngineSetup) -> Iterator[str]:
    """Yields a sentence for each reason why an engine cannot do what the recipe asks, whatever its device is."""
    yield from gap_messages(GAPS, setup)


def check_engine_device(setup: EngineSetup) -> None:
    """Raise UserError when the engine cannot do what the recipe asks on its device: CUDA or CPU, as `setup.cuda`
    says."""
    for problem in gap_messages(DEVICE_GAPS, setup):
        raise UserError(problem)


def depends_on_device(setup: EngineSetup) -> bool:
    """Whether the recipe asks for something that an engine cannot do on CUDA, or cannot do on a CPU."""
    return any(any(gap_messages(DEVICE_GAPS, setup._replace(cuda=cuda))) for cuda in (True, False))


def check_without_sync(setup: EngineSetup) -> None:
    """Raise UserError when the recipe asks for something that an engine cannot do without a learner that syncs weights
    to it (SYNC_GAPS)."""
    for problem in gap_messages(SYNC_GAPS, setup):
        raise UserError(problem)
