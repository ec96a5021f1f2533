"""Reads the fields of a `config.json` that all decoder families share into an `Architecture`."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.weights.architecture import Architecture, Delta, Latent, Rope
from mugrpo_megatron.weights.blocks import Row

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path", "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype",
        "eos_token_id", "id2label", "initializer_range", "is_encoder_decoder", "label2id", "model_type",
        "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp",
        "problem_type", "return_dict", "router_aux_loss_coef", "torch_dtype", "transformers_version", "use_cache",
    }
)  # fmt: skip
"""Fields about training from scratch, generation or bookkeeping, which do not change the forward pass."""
OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
SHAPING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "add_bias_linear", "add_cross_attention", "alibi", "attention_bias", "attention_chunk_size",
            "attention_out_bias", "attention_sinks", "attn_logit_softcapping", "attn_output_gate", "clip_qkv",
            "final_logit_softcapping", "layer_types", "lm_head_bias", "logits_soft_cap", "mlp_bias",
            "moe_shared_expert_intermediate_size", "mrope_section",
            "n_routed_experts", "n_shared_experts", "no_rope_layer_interval", "no_rope_layers", "normalize_embedding",
            "num_experts", "num_local_experts", "num_shared_experts", "output_logit_soft_cap", "parallel_attn",
            "pruned_heads", "qk_layernorm", "qk_norm", "qkv_bias", "query_pre_attn_scalar", "rope_interleave",
            "rope_interleaved", "rope_local_base_freq", "scale_embeddings", "shared_expert_intermediate_size",
            "sliding_window", "sliding_window_pattern", "use_alibi", "use_bias", "use_bidirectional_attention",
            "use_mrope", "use_parallel_residual", "use_qk_layernorm", "use_qk_norm", "use_qkv_bias",
            "use_sliding_window",
        ),
        (),
    ),
    **dict.fromkeys(
        (
            "attention_multiplier", "embedding_multiplier", "embedding_scale", "lm_head_multiplier", "logit_scale",
            "logits_scaling", "partial_rotary_factor", "residual_multiplier", "rotary_pct", "scale_depth", "scale_emb",
        ),
        (1,),
    ),
    "hidden_activation": ("silu",),
    "position_embedding_type": ("rope", "rotary"),
}  # fmt: skip
"""Fields by which other classes, or a checkpoint's own code, change the forward pass -> their values that change
nothing, besides those in `OFF`. transformers ignores such a field in a class that does not know it, but the code that
the model was trained with may have read it."""
FIELDS_OF_CLASSES = Path(__file__).with_name("config_fields.json")
"""File: `model_type` -> fields that transformers' class declares or reads (by `tests/weights/config_fields.py`)."""
FIELDS_OF_ENGINES = Path(__file__).with_name("engine_fields.json")
"""File: version of SGLang -> fields that its code reads, of models and rope. `tests/weights/engine_fields.py` writes
it."""
CLASSES = {"kimi_k2": "deepseek_v3"}
"""`model_type` without a class in transformers -> the `model_type` whose class reads such models."""


CONTEXTS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length")
"""Fields that SGLang prefers to `max_position_embeddings` as the length of the context."""
OF_PICTURES = ("mrope_section", "mrope_interleaved", "mrope_interleaved_glm")
"""Keys of rope scaling for the positions of pictures, which have three numbers. They change nothing in text, where a
token's three numbers are equal."""
WAYS_OUT = {
    "dual_chunk_attention_config": "remove the field: the model is the same without it up to the field's "
    "original_max_position_embeddings",
    "rope_is_neox_style": "reorder the rows of q_proj and k_proj as Llama's conversion in transformers does, and "
    "remove the field",
}
"""Field that SGLang reads and transformers does not -> what the user can do about it."""


@cache
def class_fields(family: str) -> frozenset[str]:
    """Fields that transformers' class of this `model_type` declares or reads."""
    return frozenset(json.loads(FIELDS_OF_CLASSES.read_text(encoding="utf-8"))[CLASSES.get(family, family)])


@cache
def engine_fields(family: str) -> Mapping[str, list[Any]]:
    """Fields that SGLang reads in models of this `model_type` -> its defaults, over both versions of SGLang."""
    return _of_engines("every model", CLASSES.get(family, family))


@cache
def engine_rope_fields(family: str, kind: str) -> Mapping[str, list[Any]]:
    """Keys that SGLang reads in rope scaling of this kind -> its defaults, over both versions of SGLang."""
    return _of_engines(f"rope of {CLASSES.get(family, family)}", f"rope {kind}", f"rope deepseek_{kind}")


def _of_engines(*parts: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for release in json.loads(FIELDS_OF_ENGINES.read_text(encoding="utf-8")).values():
        for part in parts:
            for name, defaults in release.get(part, {}).items():
                found[name] = found.get(name, []) + defaults
    return found


def changes_engine(value: Any, defaults: Collection[Any]) -> bool:
    """Whether SGLang computes something else with this value of a field than without the field.

    `defaults` are the values that versions of SGLang take where the field is missing.
    """
    off = value in OFF
    return not all(value == default or (off and default in OFF) for default in defaults) if defaults else not off


class Fields:
    """The fields of a config, which a family takes one by one; `finish` then judges those that it has not taken."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._left = {key: value for key, value in config.items() if key not in WITHOUT_EFFECT}
        self._where = where
        self._config = config
        self.unread: list[str] = []
        """Keys of rope scaling that nothing reads."""
        self.remarks: list[str] = []
        """Remarks about fields that transformers and SGLang read differently, and what the learner does."""
        self.refused: list[str] = []
        """A sentence for each value that the learner does not support."""

    def need(self, name: str) -> Any:
        """Take a required field; UserError where it is missing or null."""
        if self._left.get(name) is None:
            raise UserError(
                f"{self._where} has no value of {name!r}, which this model needs; take the file of the model's release"
            )
        return self._left.pop(name)

    def size(self, name: str) -> int:
        """Take a required positive integer; UserError for another value."""
        value = self.need(name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise UserError(f"{self._where}: {name} is {value!r} but must be a positive integer")
        return value

    def take(self, name: str, default: Any) -> Any:
        """Take a field that may be missing; null counts as missing, as it does in transformers."""
        value = self._left.pop(name, None)
        return default if value is None else value

    def only(self, name: str, allowed: Collection[Any], default: Any) -> None:
        """Take a field and require one of the `allowed` values; `finish` raises for another."""
        value = self.take(name, default)
        if value not in allowed:
            supported = " or ".join(map(repr, allowed))
            self.refused.append(f"{name} is {value!r}, but the learner supports only {supported}")

    def experts(self, *names: str) -> int:
        """Take the number of routed experts from the fields `names`; UserError if two of them differ."""
        counts = {name: self.size(name) for name in names if self._left.get(name)} or {names[0]: self.size(names[0])}
        if len(set(counts.values())) > 1:
            given = " and ".join(f"{name} is {count}" for name, count in counts.items())
            raise self.error(f"{given}, but both are the number of routed experts; correct the wrong one")
        return next(iter(counts.values()))

    def no_window(self, absent: int | None) -> None:
        """Take `sliding_window`, and raise UserError unless it is null or at least as long as the context.

        `absent` is the family's window for a config without the field.
        """
        window = self._left.pop("sliding_window", absent)
        context = self._left.get("max_position_embeddings") or 0
        if window is not None and window < context:
            raise self.error(
                f"sliding_window {window} is shorter than max_position_embeddings {context}, and the learner's "
                f"attention has no window; lower max_position_embeddings to {window}, up to which the model is the same"
            )

    def full_attention(self) -> None:
        """Take Qwen's fields about sliding windows and positions of pictures.

        `finish` raises if one of them is on, and UserError is raised here for a layer without full attention.
        """
        self.only("use_sliding_window", (False,), False)
        self.only("use_mrope", (False,), False)
        self.take("sliding_window", None)
        self.take("max_window_layers", None)
        kinds = set(self.take("layer_types", []))
        if kinds - {"full_attention"}:
            raise self.error(f"layer_types names {sorted(kinds)}, but the learner supports only 'full_attention'")

    @property
    def family(self) -> str:
        """`model_type` of the config."""
        return str(self._config["model_type"])

    @property
    def left(self) -> Mapping[str, Any]:
        """The fields that have not been read, with their values."""
        return self._left

    def rest(self) -> list[str]:
        """The names of the fields that have not been read."""
        return sorted(self._left)

    def error(self, message: str) -> UserError:
        return UserError(f"{self._where}: {message}")

    def finish(self) -> tuple[str, ...]:
        """Judge the fields that have not been read; returns the names that `Architecture.unread` describes.

        Raises UserError if `refused` has a sentence already, or if a field that was not read would change transformers'
        or SGLang's model; the error names all of these.
        """
        family = self._config["model_type"]
        known, engine = class_fields(family), engine_fields(family)
        refused = {
            name: value
            for name, value in self._left.items()
            if value not in OFF and (name in known or (name in SHAPING and not self._without_effect(name, value)))
        }
        if refused:
            self.refused.append(
                f"{_named(refused)}: the learner does not build this, so it would train another model than the config "
                "describes; take a checkpoint without it, or remove the field if the weights were made without it"
            )
        self.refuse_engines_own({name: value for name, value in self._left.items() if name not in refused}, engine)
        if self.refused:
            raise self.error("; ".join(self.refused))
        return tuple(sorted({*self.unread, *self._left} - known))

    def refuse_engines_own(self, left: Mapping[str, Any], engine: Mapping[str, list[Any]]) -> None:
        """Refuse each field in `left` that the learner ignores and that changes SGLang's model; `finish` raises.

        `engine` has the fields that SGLang reads, with its defaults.
        """
        context = self._config.get("max_position_embeddings") or 0
        refused = {
            name: value
            for name, value in left.items()
            if name in engine
            and changes_engine(value, engine[name])
            and not (name in SHAPING and self._without_effect(name, value))
            and not (name in CONTEXTS and isinstance(value, int) and value >= context)
        }
        if refused:
            ways = [WAYS_OUT[name] for name in refused if name in WAYS_OUT]
            self.refused.append(
                f"{_named(refused)}: SGLang reads this and the learner does not build it, so engine and learner would "
                "be different policies; "
                + (
                    "; ".join(ways)
                    or "take a checkpoint without it, or remove the field if the weights were made without it"
                )
            )

    def _without_effect(self, name: str, value: Any) -> bool:
        """Whether `value` of `name`, a field in `SHAPING`, changes nothing."""
        if name == "sliding_window":
            context = self._config.get("max_position_embeddings") or 0
            return self._config.get("use_sliding_window") is False or (isinstance(value, int) and value >= context)
        if name == "layer_types":
            return set(value) == {"full_attention"}
        return value in SHAPING[name]


def _named(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {_short(value)}" for name, value in sorted(fields.items()))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def decoder(
    fields: Fields,
    *,
    family: str,
    table: tuple[Row, ...],
    head_dim: int | None = None,
    rope_theta: float = 10000.0,
    rms_norm_eps: float = 1e-6,
    latent: Latent | None = None,
    rotated: float = 1.0,
    delta: Delta | None = None,
    **transformer: Any,
) -> Architecture:
    """Read the fields that all families share: those of a pre-norm RMSNorm decoder with rotary positions and SwiGLU.

    Args:
        table: the rows of the family's parameters.
        head_dim, rope_theta, rms_norm_eps: the family's defaults, for a config without these fields.
        latent: sizes of latent attention, instead of head_dim.
        rotated: fraction of a head that is rotated.
        delta: sizes of gated delta networks.
        transformer: further arguments of TransformerConfig that the family needs.

    Raises UserError for a field that is missing, malformed or not supported.
    """
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    head_dim = latent.rotary if latent else fields.take("head_dim", head_dim)
    if not head_dim and hidden % heads:
        raise fields.error(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is no head_dim; correct "
            "them, or add head_dim"
        )
    head_dim = head_dim or hidden // heads
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} is odd, but rotary embedding rotates pairs of dimensions; correct it")
    if int(head_dim * rotated) % 2 or not 0 < int(head_dim * rotated) <= head_dim:
        raise fields.error(
            f"partial_rotary_factor {rotated} of head_dim {head_dim} is not a positive number of pairs: it gives "
            f"{head_dim * rotated:g} rotated dimensions, which must be even, above 0 and at most head_dim; correct it"
        )
    groups = fields.take("num_key_value_heads", heads)
    if heads % groups:
        raise fields.error(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}; correct the wrong one"
        )
    context = fields.size("max_position_embeddings")
    fields.only("hidden_act", ("silu",), "silu")
    fields.only("attention_dropout", (0.0,), 0.0)
    fields.only("is_causal", (True,), True)
    rotary = read_rope(fields, int(head_dim * rotated), context, rope_theta, rotated, pictures=delta is not None)
    if rotated < 1 and rotary.attention_factor != 1:
        raise fields.error(
            f"rope scaling 'yarn' multiplies cos and sin by {rotary.attention_factor:g}, and only {rotated:g} of a "
            "head is rotated: the learner can multiply the scores of whole heads only. Remove the rope scaling, or "
            "choose another model"
        )
    tied = fields.take("tie_word_embeddings", False)
    architecture = Architecture(
        family=family,
        table=table,
        transformer={
            "num_layers": transformer.get("num_layers") or fields.size("num_hidden_layers"),
            "hidden_size": hidden,
            "ffn_hidden_size": transformer.get("ffn_hidden_size") or fields.size("intermediate_size"),
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": latent.value if latent else head_dim,
            "normalization": "RMSNorm",
            "layernorm_epsilon": fields.take("rms_norm_eps", rms_norm_eps),
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "qk_layernorm": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            # YaRN multiplies cos and sin by a factor, so a score by its square. The learner leaves cos and sin as they
            # are, and multiplies the score here. Latent attention has another factor.
            "softmax_scale": (rotary.score_factor if latent else rotary.attention_factor) ** 2
            / math.sqrt(latent.head if latent else head_dim),
            **transformer,
        },
        gpt={
            "vocab_size": fields.size("vocab_size"),
            "max_sequence_length": context,
            "position_embedding_type": "rope",
            "rotary_percent": 1.0,
            "share_embeddings_and_output_weights": tied,
        },
        rope=rotary,
        latent=latent,
        delta=delta,
    )
    return replace(architecture, unread=fields.finish(), remarks=tuple(fields.remarks))


def routing(fields: Fields, ffn: int, renormalised: bool) -> dict[str, Any]:
    """Read the fields of a softmax router over all experts; returns arguments of TransformerConfig.

    `ffn` is the size of an expert's feed-forward. `renormalised` says whether the weights of the chosen experts are
    divided by their sum.
    """
    count = fields.experts("num_local_experts", "num_experts")
    chosen = fields.size("num_experts_per_tok")
    if chosen > count:
        raise fields.error(
            f"num_experts_per_tok {chosen} is more than the model's {count} experts; correct the wrong one"
        )
    if chosen == 1 and renormalised:
        raise fields.error(
            "num_experts_per_tok is 1 and weights are renormalised, so every expert's weight is 1 and the router gets "
            "no gradient; Megatron does not build such a router, so this model cannot be trained here"
        )
    return {
        "num_moe_experts": count,
        "moe_router_topk": chosen,
        "ffn_hidden_size": ffn,
        "moe_ffn_hidden_size": ffn,
        # A softmax over the chosen logits gives the same weights as a softmax over all that is renormalised.
        "moe_router_pre_softmax": not renormalised,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def sigmoid_routing(fields: Fields, dense: int) -> dict[str, Any]:
    """Read the fields of DeepSeek-V3's router (arXiv 2412.19437, section 2.1.2); returns TransformerConfig's arguments.

    The first `dense` layers have no router. Experts are chosen by sigmoid scores plus a bias, within the groups whose
    best two experts score highest. Their weights are the scores without the bias, renormalised and scaled. The bias
    balanced the experts in pretraining and is constant here.
    """
    fields.only("scoring_func", ("sigmoid",), "sigmoid")
    fields.only("topk_method", ("noaux_tc",), "noaux_tc")
    fields.only("norm_topk_prob", (True,), True)
    fields.only("moe_layer_freq", (1,), 1)
    # These fields are not used: they belong to pretraining and to another implementation.
    for unused in ("aux_loss_alpha", "seq_aux", "ep_size"):
        fields.take(unused, None)
    width, layers = fields.size("moe_intermediate_size"), fields.need("num_hidden_layers")
    count, chosen = fields.experts("n_routed_experts", "num_local_experts"), fields.size("num_experts_per_tok")
    groups, best = fields.take("n_group", 1), fields.take("topk_group", 1)
    if not 1 < chosen <= count:
        raise fields.error(
            f"num_experts_per_tok {chosen} is not between 2 and the model's {count} experts; correct the wrong one"
        )
    if dense >= layers:
        raise fields.error(
            f"num_hidden_layers is {layers} and the first {dense} layers are dense (by first_k_dense_replace or "
            "mlp_layer_types), so none has routed experts; correct the wrong one"
        )
    if groups > 1 and (count % groups or best > groups or chosen // best != 2):
        raise fields.error(
            f"n_group {groups} and topk_group {best} with num_experts_per_tok {chosen} of {count} experts: the learner "
            "supports an n_group that divides the number of experts, a topk_group up to n_group, and a "
            "num_experts_per_tok of twice topk_group"
        )
    return {
        "num_layers": layers,
        "num_moe_experts": count,
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": width,
        # intermediate_size is the width of dense layers; a model that has none may lack the field.
        **({"ffn_hidden_size": fields.take("intermediate_size", width)} if dense == 0 else {}),
        "moe_shared_expert_intermediate_size": width * fields.take("n_shared_experts", 0) or None,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": float(fields.take("routed_scaling_factor", 1.0)),
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": best if groups > 1 else None,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def read_rope(
    fields: Fields, head_dim: int, context: int, default_theta: float, rotated: float, pictures: bool = False
) -> Rope:
    """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (transformers 4).

    `head_dim` counts the rotated dimensions only, the fraction `rotated` of a head. `pictures` says that the family's
    models also take pictures, so that the keys `OF_PICTURES` are ignored. Transformers and the learner ignore settings
    that the kind of scaling does not have; if one changes SGLang's model, `fields.finish` raises.
    """
    parameters = _one_rope(fields)
    outer_theta = fields.take("rope_theta", default_theta)
    outer_original = fields.take("original_max_position_embeddings", None)
    scaling = Fields(parameters, "config.json, rope scaling")
    theta = float(scaling.take("rope_theta", outer_theta))
    legacy = scaling.take("type", "default")
    kind = scaling.take("rope_type", legacy)
    scaling.only("partial_rotary_factor", (rotated,), rotated)
    settings: tuple[Any, ...] = ()
    factor = score_factor = 1.0
    if kind == "linear":
        settings = (scaling.need("factor"),)
    elif kind == "llama3":
        stretch, low, high = (scaling.need(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
        if high <= low:
            raise scaling.error(f"high_freq_factor {high} must be above low_freq_factor {low}; correct them")
        settings = (stretch, low, high, _original_positions(fields, scaling, outer_original, context))
    elif kind == "yarn":
        original = _original_positions(fields, scaling, outer_original, context)
        stretch = float(scaling.take("factor", context / original))
        names = ("attention_factor", "attn_factor", "mscale", "mscale_all_dim")
        factors = {name: scaling.take(name, None) for name in names}
        factor, score_factor = attention_factor(factors, stretch), mscale(stretch, factors["mscale_all_dim"] or 0.0)
        if factors["attn_factor"] is not None and factors["attention_factor"] is None:
            fields.remarks.append(
                "rope_parameters.attn_factor is honoured, as in SGLang; transformers does not read it"
            )
        scaling.only("extrapolation_factor", (1,), 1)
        fast, slow = scaling.take("beta_fast", 32.0), scaling.take("beta_slow", 1.0)
        settings = (stretch, fast, slow, original, scaling.take("truncate", True))
    elif kind != "default":
        raise fields.error(
            f"rope scaling {kind!r} is not supported; default, linear, llama3 and yarn are. {OTHER_KINDS.get(kind, '')}"
        )
    scaling.refuse_engines_own(
        {name: value for name, value in scaling.left.items() if not (pictures and name in OF_PICTURES)},
        engine_rope_fields(fields.family, kind),
    )
    fields.refused.extend(f"rope scaling: {sentence}" for sentence in scaling.refused)
    fields.unread.extend(f"rope_parameters.{name}" for name in scaling.rest())
    return Rope(kind, theta, head_dim, settings, factor, score_factor)


def _original_positions(fields: Fields, scaling: Fields, outer: int | None, context: int) -> int:
    """Take the number of positions that the model was trained with before its rope was scaled.

    It is read from the rope scaling, as in SGLang; if that lacks it, it is `context`. The config may have it beside the
    rope scaling too (`outer`), and UserError is raised if the two differ.
    """
    original: int = scaling.take("original_max_position_embeddings", context)
    if outer is not None and outer != original:
        raise fields.error(
            f"original_max_position_embeddings is {outer} beside the rope scaling, but SGLang takes {original}, from "
            "the rope scaling or, if it is missing there, from max_position_embeddings; write the right number in both "
            "places"
        )
    return original


OTHER_KINDS = {
    "dynamic": "SGLang stretches every position and transformers only those behind max_position_embeddings, so they "
    "are two models; remove the scaling if prompts and responses are shorter than that",
    "longrope": "Its factors depend on a sequence's length in transformers, and in SGLang on the engine's context",
}
"""Kind of rope scaling that the learner does not build -> a sentence that says why."""


def _one_rope(fields: Fields) -> dict[str, Any]:
    """Take the rope parameters, which stand in a file as `rope_scaling` or `rope_parameters`.

    Raises UserError if the file has both with different values.
    """
    scaling, parameters = dict(fields.take("rope_scaling", {})), dict(fields.take("rope_parameters", {}))
    if scaling and parameters and scaling != parameters:
        raise fields.error(
            "rope_scaling and rope_parameters differ, and transformers 5 and SGLang drop rope_parameters with its "
            "rope_theta; put the settings of both into rope_parameters, and remove rope_scaling"
        )
    return scaling or parameters


def attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """The number that YaRN multiplies cos and sin by, for a context stretched by `factor` (arXiv 2309.00071, eq. 22).

    It is the `attention_factor` of `scaling`, if that has one. Otherwise it is 0.1 ln(factor) + 1, or with `mscale` and
    `mscale_all_dim` the quotient of the function `mscale` at these two weights. Only in the latter two cases an
    `attn_factor` in `scaling` multiplies the number, as in YaRN's first code.
    """
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    given = 1.0 if scaling.get("attn_factor") is None else float(scaling["attn_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return given * mscale(factor, scaling["mscale"]) / mscale(factor, scaling["mscale_all_dim"])
    return given * mscale(factor, 1.0)


def mscale(factor: float, weight: float) -> float:
    """YaRN's factor for a context stretched by `factor`: 0.1 `weight` ln(factor) + 1, or 1 if nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def transformers_config(directory: Path, architecture: Architecture) -> PreTrainedConfig:
    """Load the config of `directory` so that transformers computes the same model as learner and engine.

    YaRN's `attn_factor`, which transformers ignores, is turned into the `attention_factor` that it reads.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    scaling = getattr(config, "rope_parameters", None) or {}
    if scaling.get("attn_factor") is not None:
        config.rope_parameters = {**scaling, "attention_factor": architecture.rope.attention_factor}
    return config
