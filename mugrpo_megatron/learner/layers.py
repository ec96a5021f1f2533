"""What a transformer layer is made of: Megatron's own linear layers, or Transformer Engine's.

Megatron calls the two backends; a layer is put together here in the same way from either. Transformer Engine fuses a
norm with the linear layer behind it and an expert's products with those of the others. Attention over packed sequences
is this project's own in both cases (`learner/attention.py`), with context parallelism in it, and so are norms that
stand alone: neither holds anything that only one of the two could save or load.
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
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner.attention import PackedAttention
from mugrpo_megatron.learner.operators import RMSNorm, SwiGLU
from mugrpo_megatron.weights.table import NORMS

Layers = Literal["auto", "local", "transformer_engine"]


def choose_backend(layers: Layers, device: torch.device) -> BackendSpecProvider:
    """The backend that `learner.layers` stands for on this device; `auto` is Transformer Engine on CUDA where it loads.

    Raises UserError where Megatron cannot load a Transformer Engine that is asked for (`recipe.checks` has seen to it
    that there is one).
    """
    if layers == "local" or (layers == "auto" and not (device.type == "cuda" and HAVE_TE)):
        return LocalSpecProvider()
    if not HAVE_TE:
        raise UserError(
            'learner.layers = "transformer_engine", but Transformer Engine does not load here: `mugrpo doctor` says '
            'why; mend it, or set learner.layers = "local"'
        )
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def block_spec(
    config: TransformerConfig, backend: BackendSpecProvider, stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of this rank's pipeline stage, or of virtual `stage`, and the norm at the end of the last."""
    count = get_num_layers_to_build(config, vp_stage=stage)
    return TransformerBlockSubmodules(layer_specs=[layer_spec(config, backend)] * count, layer_norm=RMSNorm)


def layer_spec(config: TransformerConfig, backend: BackendSpecProvider) -> ModuleSpec:
    """A pre-norm layer; `config.moe_grouped_gemm` says whether its experts, if any, are computed together."""
    fused = backend.fuse_layernorm_and_linear()
    experts = config.num_moe_experts
    mlp = get_mlp_module_spec_for_backend(backend, experts, moe_grouped_gemm=config.moe_grouped_gemm)
    if config.use_te_activation_func:  # Megatron's name for an activation that the spec brings
        mlp.submodules.activation_func = SwiGLU
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
            # One name in a checkpoint for a norm, fused or not: layers of either kind load what the other saved.
            sharded_state_dict_keys_map=dict(NORMS),
        ),
    )
