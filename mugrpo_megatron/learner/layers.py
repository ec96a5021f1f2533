"""Layer specs: transformer layers from Megatron's local linear layers or from Transformer Engine's.

Megatron calls these two backends; the spec is the same for both. Transformer Engine fuses a norm with the linear layer
after it, and groups the matrix products of the experts. Attention over packed sequences, with context parallelism, is
this project's own in both cases (`learner/attention.py`), and so are norms that are not fused: a checkpoint of either
backend loads into the other.
"""

from __future__ import annotations

from typing import Literal

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE, get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner.attention import PackedAttention
from mugrpo_megatron.learner.experts import Experts
from mugrpo_megatron.learner.operators import RMSNorm, SwiGLU
from mugrpo_megatron.weights.table import NORMS

Layers = Literal["auto", "local", "transformer_engine"]


def choose_backend(layers: Layers, device: torch.device) -> BackendSpecProvider:
    """The backend that `learner.layers` names; `auto` is Transformer Engine on CUDA if it loads, else local.

    Raises UserError when Transformer Engine is asked for and Megatron cannot load it (`recipe.checks` has already
    refused the case that it is not installed).
    """
    if layers == "local" or (layers == "auto" and not (device.type == "cuda" and HAVE_TE)):
        return LocalSpecProvider()
    if not HAVE_TE:
        raise UserError(
            'learner.layers = "transformer_engine", but Transformer Engine does not load here: `mugrpo doctor` says '
            'why; fix it, or set learner.layers = "local"'
        )
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def block_spec(
    config: TransformerConfig, backend: BackendSpecProvider, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of this rank's pipeline stage, or of its virtual stage `vp_stage`, and the model's final norm."""
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer_spec(config, backend)] * count, layer_norm=RMSNorm)


def layer_spec(config: TransformerConfig, backend: BackendSpecProvider) -> ModuleSpec:
    """A pre-norm layer; `config.moe_grouped_gemm` selects one grouped GEMM for its experts, if any."""
    fused = backend.fuse_layernorm_and_linear()
    experts = config.num_moe_experts
    mlp = get_mlp_module_spec_for_backend(backend, experts, moe_grouped_gemm=config.moe_grouped_gemm)
    if config.use_te_activation_func:  # Megatron's name for taking the spec's activation
        mlp.submodules.activation_func = SwiGLU
    if experts and mlp.submodules.experts.module is SequentialMLP:
        mlp.submodules.experts.module = Experts
    of_heads = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp if fused else RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=backend.column_parallel_layer_norm_linear() or backend.column_parallel_linear(),
                    core_attention=PackedAttention,
                    linear_proj=backend.row_parallel_linear(),
                    q_layernorm=of_heads,
                    k_layernorm=of_heads,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp if fused and not experts else RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            # A norm has one name in checkpoints, fused or not: either backend loads what the other saved.
            sharded_state_dict_keys_map=dict(NORMS),
        ),
    )
