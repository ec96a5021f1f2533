"""A backend with the names and the sharding of Transformer Engine's parameters; its layers compute nothing.

What is named and sharded here as Megatron wraps Transformer Engine: `TELayerNormColumnParallelLinear` and
`TEGroupedLinear` of `megatron/core/extensions/transformer_engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from mugrpo_megatron.megatron_compat import grouped_mlp


def fused(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` where every model is built from the fused layers."""
    with patch("mugrpo_megatron.learner.model.choose_backend", lambda *_: FusedBackend()):
        return function(*args)


class NormAndLinear(ColumnParallelLinear):
    """RMS norm and a column-parallel linear layer in one module."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **arguments: Any) -> None:
        super().__init__(input_size, output_size, config=config, **arguments)
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class GroupedLinear(torch.nn.Module):
    """One linear layer for each expert of a rank; no tensor parallelism over experts."""

    def __init__(
        self, count: int, input_size: int, output_size: int, *, config: TransformerConfig, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__()
        self.count, self.groups = count, pg_collection
        for index in range(count):
            weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]
            self.register_parameter(f"weight{index}", weight)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Each expert's weight at its place in the stack over all experts."""
        result: dict[str, Any] = {}
        experts = self.groups.ep.size() * self.count
        for index in range(self.count):
            expert = self.groups.ep.rank() * self.count + index
            tensors = {f"{index}.weight": getattr(self, f"weight{index}")}
            offsets = (*sharded_offsets, (len(sharded_offsets), expert, experts))
            sharded_expert = make_sharded_tensors_for_checkpoint(
                tensors, "", {}, offsets, tp_group=self.groups.expt_tp, dp_cp_group=metadata["dp_cp_group"]
            )
            replace_prefix_for_sharding(sharded_expert, f"{index}.", prefix)
            result[f"{prefix}weight{index}"] = sharded_expert[f"{index}.weight"]
        for sharded in result.values():
            sharded.replica_id = (*sharded.replica_id[:2], self.groups.expt_dp.rank())
        return result


class FusedBackend(LocalSpecProvider):
    """What `TESpecProvider` answers, with the modules above."""

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormAndLinear

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *_: Any) -> Any:
        assert moe_use_grouped_gemm
        return grouped_mlp(TEGroupedMLP, MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear))
