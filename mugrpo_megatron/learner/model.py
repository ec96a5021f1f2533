"""The policy as Megatron GPT chunks: configuration from architecture and recipe, data parallel wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from mugrpo_megatron.learner.attention import Packing
from mugrpo_megatron.learner.groups import Ranks
from mugrpo_megatron.learner.layers import block_spec, choose_backend
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.weights.architecture import Architecture, Rope
from mugrpo_megatron.weights.rope import frequencies


class PolicyModel(GPTModel):
    """GPT that ends at the hidden states: the loss path multiplies with the output weight itself, chunk by chunk."""

    def __init__(self, rope: Rope, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.register_buffer("frequencies", frequencies(rope), persistent=False)

    def _preprocess(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, *, packed_seq_params: Packing, **_: Any
    ) -> tuple[Any, ...]:
        """Embed, and hand the rotation of every row's position to the attention instead of a table to the layers."""
        angles = torch.outer(position_ids[0].float(), self.frequencies).unsqueeze(1)
        dtype = self.config.params_dtype
        packed_seq_params.rotation = angles.cos().to(dtype), angles.sin().to(dtype)
        embedded = self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else None
        return embedded, None, None, None, None, None

    def _postprocess(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """[t, 1, h] on the last stage as on every other; t is divided by TP under sequence parallelism."""
        return hidden_states

    def output_weight(self) -> torch.Tensor:
        """[padded vocabulary / tp, h] on the last stage: the embedding when tied and on the same rank."""
        shared = self.share_embeddings_and_output_weights and self.pre_process
        return self.shared_embedding_or_output_weight() if shared else self.output_layer.weight


def build_model(recipe: Recipe, architecture: Architecture, ranks: Ranks) -> list[DistributedDataParallel]:
    """This rank's model chunks (one, or `parallel.virtual_pipeline`), with room for weights but no values in it yet."""
    backend = choose_backend(recipe.learner.layers, ranks.device)
    config = transformer_config(recipe, architecture, ranks, backend.fuse_layernorm_and_linear())
    stages = recipe.parallel.virtual_pipeline
    rows = padded_vocab(architecture, ranks.tp_size)
    chunks = [
        _build_chunk(config, backend, architecture, rows, stage if stages > 1 else None) for stage in range(stages)
    ]
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,  # the loss path writes the output weight's gradient where no hook would see it
        check_for_nan_in_grad=False,  # a non-finite gradient skips its update instead (optimizer.step)
    )
    return [
        DistributedDataParallel(config, ddp, chunk.to(ranks.device), disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]


def padded_vocab(architecture: Architecture, tp_size: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of the tensor parallel size."""
    return -(-architecture.gpt["vocab_size"] // tp_size) * tp_size


def policy(chunk: torch.nn.Module) -> PolicyModel:
    """The model inside its data parallel wrapper."""
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk  # type: ignore[return-value]


def transformer_config(
    recipe: Recipe, architecture: Architecture, ranks: Ranks, grouped_experts: bool
) -> TransformerConfig:
    """Megatron's configuration: what the architecture says, plus layout, dtype and the guards of this learner."""
    cuda = ranks.device.type == "cuda"
    dtype = getattr(torch, recipe.model.dtype)
    interleaved = recipe.parallel.virtual_pipeline > 1
    experts = bool(architecture.experts)
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": ranks.tp_size,
        "pipeline_model_parallel_size": ranks.pp_size,
        "virtual_pipeline_model_parallel_size": recipe.parallel.virtual_pipeline if interleaved else None,
        "context_parallel_size": ranks.cp_size,
        "expert_model_parallel_size": recipe.parallel.expert,
        "sequence_parallel": recipe.parallel.sequence,
        "activation_func": torch.nn.functional.silu,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": False,
        # Every weight is read from a checkpoint. Megatron's switch for that, perform_initialization, would also leave
        # out what marks a weight as a shard, and the gradient norm would then miss all shards but the first.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "calculate_per_token_loss": True,  # micro-batch losses add up: nothing divides them again
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        # Compiled elementwise kernels are not worth their compile time on CPU, where `SwiGLU` takes their place.
        "bias_activation_fusion": cuda,
        "bias_dropout_fusion": cuda,
        "use_te_activation_func": not cuda and not experts,  # Megatron's name for an activation that the spec brings
        # Interleaving over batched sends trains on wrong gradients without a word; overlapped sends with freed outputs
        # give NaN on gloo. Both are settled here so that no layout can reach them.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "deallocate_pipeline_outputs": cuda,
        **_recompute(recipe),
        **_fp8(recipe),
    }
    if experts:
        settings["moe_token_dispatcher_type"] = "alltoall"
        settings["moe_grouped_gemm"] = grouped_experts
        settings["moe_router_padding_for_quantization"] = recipe.learner.fp8 != "none"
    return TransformerConfig(**{**settings, **architecture.transformer})


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _recompute(recipe: Recipe) -> dict[str, Any]:
    match recipe.learner.recompute:
        case "none":
            return {}
        case "selective":
            return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
        case "full":
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _fp8(recipe: Recipe) -> dict[str, Any]:
    """Scales of the present tensors, no history: there is then no state that a checkpoint would have to hold."""
    match recipe.learner.fp8:
        case "none":
            return {}
        case "tensorwise":  # gradients have the range of e5m2
            return {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
        case "blockwise":  # blocks have scales of their own, so e4m3's finer steps serve gradients too
            return {"fp8": "e4m3", "fp8_recipe": "blockwise"}


def _build_chunk(
    config: TransformerConfig,
    backend: BackendSpecProvider,
    architecture: Architecture,
    vocab_size: int,
    stage: int | None,
) -> PolicyModel:
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage)
    return PolicyModel(
        rope=architecture.rope,
        config=config,
        transformer_layer_spec=block_spec(config, backend, stage),
        pre_process=first,
        post_process=last,
        parallel_output=True,
        vp_stage=stage,
        **{**architecture.gpt, "vocab_size": vocab_size},
    )


def gather_sequence(hidden: torch.Tensor, sequence_parallel: bool) -> torch.Tensor:
    """[t (/ tp under sequence parallelism), 1, h] -> [t, h] for the vocabulary-parallel loss path.

    The gradient that comes back is each rank's share over its vocabulary slice; it is summed over TP on the way.
    """
    if sequence_parallel:
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    else:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
    return hidden.squeeze(1)


def parameters(chunks: Sequence[torch.nn.Module]) -> int:
    """Parameters held by this rank."""
    return sum(p.numel() for chunk in chunks for p in chunk.parameters())
