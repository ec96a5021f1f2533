"""Multi-head latent attention over packed sequences (arXiv 2405.04434, section 2.1; DeepSeek-V3, GLM-4.7-Flash).

Keys and values are projected to a latent and from there to heads; so are queries, if they have a latent. The rotated
dimensions of a key come directly from the input and are the same for all heads. Megatron's own module rotates by the
row's index, not by each segment's positions, and needs Transformer Engine. This module has the same parameters, except
that the projections to the two latents are one product, as in SGLang. Every tensor parallel rank computes whole
latents, and the queries, keys and values of its own heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from mugrpo_megatron.learner.attention import PackedAttention, Packing, rotate_packed
from mugrpo_megatron.learner.linear import Replicated
from mugrpo_megatron.learner.operators import RMSNorm
from mugrpo_megatron.weights.architecture import Latent


@dataclass
class LatentSubmodules:
    """Classes of the submodules of latent attention, under the names that Megatron's `Attention` reads."""

    linear_up: type
    """A column-parallel linear layer from a latent to the heads."""
    linear_proj: type
    core_attention: type = PackedAttention


class LatentAttention(Attention):
    """Latent attention, causal inside each segment, that maps [t, 1, hidden] to [t, 1, hidden].

    Under sequence parallelism t is a rank's part of the rows.
    """

    def __init__(
        self, config: TransformerConfig, submodules: LatentSubmodules, layer_number: int, sizes: Latent, **options: Any
    ) -> None:
        super().__init__(config, submodules, layer_number, attention_type="self", **options)
        self.sizes, hidden, heads = sizes, config.hidden_size, config.num_attention_heads
        if sizes.query:
            self.linear_qkv_down_proj = Replicated(config, hidden, sizes.query + sizes.cached)
            self.q_layernorm = RMSNorm(config, sizes.query, config.layernorm_epsilon)
            self.linear_q_up_proj = self._up(submodules, sizes.query, heads * sizes.head)
        else:
            self.linear_kv_down_proj = Replicated(config, hidden, sizes.cached)
            self.linear_q_proj = self._up(submodules, hidden, heads * sizes.head)
        self.kv_layernorm = RMSNorm(config, sizes.key_value, config.layernorm_epsilon)
        self.linear_kv_up_proj = self._up(submodules, sizes.key_value, heads * (sizes.plain + sizes.value))

    def _up(self, submodules: LatentSubmodules, inputs: int, outputs: int) -> torch.nn.Module:
        return build_module(
            submodules.linear_up,
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.pg_collection.tp,
        )

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, *, packed_seq_params: Packing, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the output, and None as its bias."""
        query, key, value = self.get_query_key_value_tensors(hidden_states, packed_seq_params)
        # Flash attention takes queries, keys and values of one size only, so values are padded with zeros, and the
        # padding is cut off the output.
        value = F.pad(value, (0, self.sizes.head - self.sizes.value))
        recomputes = self.checkpoint_core_attention and self.training
        attend = self._checkpointed_attention_forward if recomputes else self.core_attention
        out = attend(query, key, value, attention_mask, packed_seq_params=packed_seq_params.pre_rotated)
        out = out.unflatten(-1, (-1, self.sizes.head))[..., : self.sizes.value].flatten(-2)
        return self.linear_proj(out)

    def get_query_key_value_tensors(  # type: ignore[override]
        self, hidden: torch.Tensor, packing: Packing
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute query and key [t, 1, heads, head], both rotated, and value [t, 1, heads, value].

        The heads are this rank's; the t rows are those of all tensor parallel ranks.
        """
        sizes = self.sizes
        if sizes.query:
            down = self.linear_qkv_down_proj(hidden)
            query_latent, latent, rotary = down.split([sizes.query, sizes.key_value, sizes.rotary], dim=-1)
            query, _ = self.linear_q_up_proj(self.q_layernorm(query_latent))
        else:
            latent, rotary = self.linear_kv_down_proj(hidden).split([sizes.key_value, sizes.rotary], dim=-1)
            query, _ = self.linear_q_proj(hidden)
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        key, value = key_value.unflatten(-1, (-1, sizes.plain + sizes.value)).split([sizes.plain, sizes.value], dim=-1)
        plain, rotary_part = query.unflatten(-1, (-1, sizes.head)).split([sizes.plain, sizes.rotary], dim=-1)
        query = torch.cat([plain, _rotate_pairs(rotary_part, packing)], dim=-1)
        shared = _rotate_pairs(self._gather_rows(rotary).unsqueeze(2), packing)
        return query, torch.cat([key, shared.expand(-1, -1, key.shape[2], -1)], dim=-1), value

    def _gather_rows(self, rotary: torch.Tensor) -> torch.Tensor:
        """The keys' rotated dimensions `rotary` [t, 1, d] of all ranks' rows; backward sums the ranks' gradients."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(rotary, tensor_parallel_output_grad=True)
        return copy_to_tensor_model_parallel_region(rotary)


def latent_spec(sizes: Latent, backend: BackendSpecProvider) -> ModuleSpec:
    """The specification of a layer's latent attention, with the linear layers of `backend`."""
    return ModuleSpec(
        module=LatentAttention,
        params={"sizes": sizes, "attn_mask_type": AttnMaskType.causal},
        submodules=LatentSubmodules(backend.column_parallel_linear(), backend.row_parallel_linear()),
    )


def _rotate_pairs(x: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Rotate x [t, 1, heads, d], in which dimensions 2 i and 2 i + 1 form a pair.

    In the result the dimensions i and i + d / 2 form that pair.
    """
    return rotate_packed(x.squeeze(1).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), packing).unsqueeze(1)
