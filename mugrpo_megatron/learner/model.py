"""The policy as Megatron GPT chunks: their configuration, their construction, the data parallel wrapper."""

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
    """GPT that returns hidden states: the loss path applies the output weight itself, chunk by chunk."""

    def __init__(self, rope: Rope, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.register_buffer("frequencies", frequencies(rope), persistent=False)

    def _preprocess(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, *, packed_seq_params: Packing, **_: Any
    ) -> tuple[Any, ...]:
        """Embed, and give attention the rotation of every row's position, in place of a table for all layers."""
        angles = torch.outer(position_ids[0].float(), self.frequencies).unsqueeze(1)
        # As in SGLang 0.5.15, whose tables are float32 on CUDA and of the model's type on a CPU.
        dtype = torch.float32 if angles.is_cuda else self.config.params_dtype
        packed_seq_params.rotation = angles.cos().to(dtype), angles.sin().to(dtype)
        embedded = self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else None
        return embedded, None, None, None, None, None

    def _postprocess(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """[t, 1, h] on the last pipeline stage too; t is divided by TP under sequence parallelism."""
        return hidden_states

    def output_weight(self) -> torch.Tensor:
        """[padded vocabulary / tp, h] on the last pipeline stage: the embedding if tied and on the same rank."""
        shared = self.share_embeddings_and_output_weights and self.pre_process
        return self.shared_embedding_or_output_weight() if shared else self.output_layer.weight


def build_model(recipe: Recipe, architecture: Architecture, ranks: Ranks) -> list[DistributedDataParallel]:
    """This rank's model chunks (one, or `parallel.virtual_pipeline`), with uninitialised weights."""
    backend = choose_backend(recipe.learner.layers, ranks.device)
    config = transformer_config(recipe, architecture, ranks, backend.fuse_layernorm_and_linear())
    vp_size = recipe.parallel.virtual_pipeline
    rows = padded_vocab(architecture, ranks.tp_size)
    chunks = [
        _build_chunk(config, backend, architecture, rows, vp_stage if vp_size > 1 else None)
        for vp_stage in range(vp_size)
    ]
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,  # no hook sees an untied output weight: the loss path writes its gradient
        check_for_nan_in_grad=False,  # a non-finite gradient skips its update (optimizer.take_step)
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
    """Megatron's configuration: the architecture, plus layout, dtype and this learner's settings."""
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
        "fp16": dtype == torch.float16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": False,
        # Every weight is loaded, so initialisation does nothing. Megatron's perform_initialization = False would also
        # skip marking weights as tensor parallel shards; the gradient norm would then count only the first shard.
        "init_method": _no_init,
        "output_layer_init_method": _no_init,
        "embedding_init_method": _no_init,
        "calculate_per_token_loss": True,  # micro-batch losses are summed, not averaged
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        # Megatron's fusions go through torch.compile, again for new numbers of rows. SwiGLU has kernels of its own,
        # except in Transformer Engine's experts; without bias and dropout the other fusion is a single addition.
        "bias_activation_fusion": cuda and experts and grouped_experts,
        "bias_dropout_fusion": False,
        "use_te_activation_func": not experts,  # Megatron's name for taking the spec's activation
        # Interleaving with batched sends silently trains on wrong gradients; overlapped sends with freed outputs give
        # NaN on gloo. These settings rule out both in every layout.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "deallocate_pipeline_outputs": cuda,
        "deterministic_mode": recipe.run.deterministic,  # the embedding's gradient is added in order
        **_recompute(recipe),
        **_fp8(recipe),
    }
    if experts:
        settings["moe_token_dispatcher_type"] = "alltoall"
        settings["moe_grouped_gemm"] = grouped_experts
        settings["moe_enable_routing_replay"] = recipe.learner.routing_replay != "off"
        settings["moe_router_padding_for_quantization"] = recipe.learner.fp8 != "none"
    return TransformerConfig(**{**settings, **architecture.transformer})


def _no_init(weight: torch.Tensor) -> torch.Tensor:
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
    """fp8 settings with scales of the current tensor: without a history there is no state to checkpoint."""
    match recipe.learner.fp8:
        case "none":
            return {}
        case "tensorwise":  # gradients have the range of e5m2
            return {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
        case "blockwise":  # each block has its own scale, so e4m3's finer steps also fit gradients
            return {"fp8": "e4m3", "fp8_recipe": "blockwise"}


def _build_chunk(
    config: TransformerConfig,
    backend: BackendSpecProvider,
    architecture: Architecture,
    vocab_size: int,
    vp_stage: int | None,
) -> PolicyModel:
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    return PolicyModel(
        rope=architecture.rope,
        config=config,
        transformer_layer_spec=block_spec(config, backend, vp_stage),
        pre_process=first,
        post_process=last,
        parallel_output=True,
        vp_stage=vp_stage,
        **{**architecture.gpt, "vocab_size": vocab_size},
    )


def gather_sequence(hidden: torch.Tensor, sequence_parallel: bool) -> torch.Tensor:
    """[t (/ tp under sequence parallelism), 1, h] -> [t, h] for the vocabulary-parallel loss path.

    Each rank's gradient covers its vocabulary slice; the backward pass sums them over TP.
    """
    if sequence_parallel:
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    else:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
    return hidden.squeeze(1)


def parameters(chunks: Sequence[torch.nn.Module]) -> int:
    """Parameters held by this rank."""
    return sum(p.numel() for chunk in chunks for p in chunk.parameters())
