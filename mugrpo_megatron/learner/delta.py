"""Gated delta networks over packed sequences (arXiv 2412.06464, equation 10; Qwen3.5).

Megatron's own module (core/ssm/gated_delta_net) needs flash-linear-attention's CUDA kernels, and refuses packed rows
without them. This module has the same parameters and checkpoint keys. Every segment of a packed row starts with an
empty convolution window and a state of zeros, so no token sees a token of another segment. Each tensor parallel rank
computes some of the heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch.utils.checkpoint import checkpoint

from mugrpo_megatron.kernels.gated_delta import gated_delta_rule
from mugrpo_megatron.learner.attention import Packing, Unpad
from mugrpo_megatron.learner.operators import RMSNorm
from mugrpo_megatron.megatron_compat import split_tensor_factory
from mugrpo_megatron.weights.architecture import Delta


@dataclass
class DeltaSubmodules:
    """Classes of the linear layers of a gated delta network, under Megatron's names."""

    in_proj: type
    """A column-parallel linear layer."""
    out_proj: type
    """A row-parallel linear layer."""


class GatedDeltaNet(MegatronModule):
    """A gated delta network over each segment, which maps [t, 1, hidden] to [t, 1, hidden].

    Under sequence parallelism t is a rank's part of the rows.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaSubmodules,
        layer_number: int,
        sizes: Delta,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.sizes, self.group = sizes, pg_collection.tp
        ranks = self.group.size()
        self.keys, self.values, self.heads = sizes.keys // ranks, sizes.values // ranks, sizes.value_heads // ranks
        self.sections = [self.keys, self.keys, self.values, self.values, self.heads, self.heads]
        """Number of rows of each section of this rank's shard of in_proj: query, key, value, gate z, beta, alpha."""
        linear: dict[str, Any] = {"config": config, "bias": False, "is_expert": False, "tp_group": self.group}
        self.dt_bias = self._parameter(self.heads)
        # Published checkpoints have A_log and the norm's weight in float32: bfloat16 would change A by up to 1.6 %.
        self.A_log = self._parameter(self.heads, dtype=torch.float32)
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            ranks * sum(self.sections),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **linear,
        )
        self.conv1d = torch.nn.Module()
        self.conv1d.register_parameter("weight", self._parameter(sizes.channels // ranks, 1, sizes.kernel))
        self.out_norm = RMSNorm(config, sizes.value, config.layernorm_epsilon)
        self.out_norm.weight.data = self.out_norm.weight.data.float()
        # Megatron must not sum this gradient over the ranks, because `copy_to_tensor_model_parallel_region` in
        # `forward` does: each rank has the part of its own heads.
        self.out_norm.weight.sequence_parallel = False  # type: ignore[attr-defined]
        self.out_proj = build_module(
            submodules.out_proj,
            sizes.values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

    def _parameter(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """Make an uninitialised parameter of this rank's heads, in the model's type unless `dtype` is given."""
        weight = torch.empty(shape, dtype=dtype or self.config.params_dtype, device=torch.cuda.current_device())
        parameter = torch.nn.Parameter(weight)
        parameter.tensor_model_parallel, parameter.partition_dim = True, 0  # type: ignore[attr-defined]
        return parameter

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, *, packed_seq_params: Packing, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the output, and None as its bias."""
        projected, _bias = self.in_proj(hidden_states)
        qkv, z, beta_alpha = projected.squeeze(1).split([sum(self.sections[:3]), self.values, 2 * self.heads], dim=-1)
        padding, outputs = packed_seq_params.padding, []
        padded = _Pad.apply(torch.cat([qkv, beta_alpha], dim=-1), padding.rows, padding.slots)
        counts = [bucket.count * bucket.length for bucket in padding.buckets]
        recomputes = self.config.recompute_granularity == "selective" and self.training
        for bucket, rows in zip(padding.buckets, padded.split(counts), strict=True):
            segments = rows.view(bucket.count, bucket.length, -1)
            mixed = checkpoint(self._mix, segments, use_reentrant=False) if recomputes else self._mix(segments)
            outputs.append(mixed.flatten(0, 1))
        out = Unpad.apply(torch.cat(outputs) if len(outputs) > 1 else outputs[0], padding.slots)
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight, self.group)
        out = F.rms_norm(out.float(), out.shape[-1:], None, self.out_norm.eps).to(z.dtype) * weight
        out = out * F.silu(z.unflatten(-1, (-1, self.sizes.value)).float())
        return self.out_proj(out.to(z.dtype).flatten(1).unsqueeze(1))

    def _mix(self, segments: torch.Tensor) -> torch.Tensor:
        """Convolve the segments and apply the gated delta rule to them.

        Takes [segments, tokens, features], whose features are query, key, value, beta and alpha; returns [segments,
        tokens, heads, value].
        """
        qkv, beta, alpha = segments.split([sum(self.sections[:3]), self.heads, self.heads], dim=-1)
        window = F.pad(qkv.transpose(1, 2), (self.sizes.kernel - 1, 0))
        convolved = F.conv1d(window, self.conv1d.get_parameter("weight"), groups=qkv.shape[-1])
        query, key, value = F.silu(convolved).transpose(1, 2).split(self.sections[:3], dim=-1)
        query, key = (x.unflatten(-1, (-1, self.sizes.key)) for x in (query, key))
        value = value.unflatten(-1, (-1, self.sizes.value))
        log_decay = -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias)
        out, _state = gated_delta_rule(query, key, value, log_decay, beta.sigmoid())
        return out.to(segments.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None, **_: Any
    ) -> dict[str, Any]:
        """The sharded state, with the keys of Megatron's own module.

        Each section of `in_proj` and `conv1d` (query, key, ...) is a tensor of its own.
        """
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        tensors = {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "conv1d.weight": self.conv1d.get_parameter("weight"),
            "out_norm.weight": self.out_norm.weight,
        }
        axes = {"A_log": 0, "dt_bias": 0, "conv1d.weight": 0}
        groups = {"tp_group": self.group, "dp_cp_group": metadata["dp_cp_group"]}
        state = make_sharded_tensors_for_checkpoint(tensors, prefix, axes, sharded_offsets, **groups)
        for name in ("in_proj", "out_proj"):
            layer = getattr(self, name)
            state |= sharded_state_dict_default(layer, f"{prefix}{name}.", sharded_offsets, metadata, self.group)
        names = ("query", "key", "value", "z", "beta", "alpha")
        for name, count in (("in_proj.weight", 6), ("conv1d.weight", 3)):
            sharded = state[prefix + name]
            state[prefix + name] = split_tensor_factory(sharded, self.sections[:count], names[:count], 0)
        return state


def delta_spec(sizes: Delta, backend: BackendSpecProvider) -> ModuleSpec:
    """The specification of a gated delta network in place of a layer's attention, with `backend`'s linear layers."""
    submodules = DeltaSubmodules(backend.column_parallel_linear(), backend.row_parallel_linear())
    return ModuleSpec(module=GatedDeltaNet, params={"sizes": sizes}, submodules=submodules)


class _Pad(torch.autograd.Function):
    """Pad packed rows [t, d] to [slots, d]; backward skips the slots that only pad, whose gradient is zero."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slots)
        return packed.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return grads[0].index_select(0, slots), None, None
