"""The policy as Megatron GPT chunks: configuration, construction and the data parallel wrapper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner.attention import PackedAttention, Packing
from mugrpo_megatron.learner.delta import delta_spec
from mugrpo_megatron.learner.groups import Ranks
from mugrpo_megatron.learner.latent import latent_spec
from mugrpo_megatron.learner.linear import DirectLayers
from mugrpo_megatron.learner.operators import SwiGLU, frequencies, norm_type
from mugrpo_megatron.megatron_compat import mlp_spec
from mugrpo_megatron.recipe.policy import ModelSection
from mugrpo_megatron.recipe.systems import LearnerSection, ParallelSection
from mugrpo_megatron.weights.architecture import Architecture, Rope, stage_layers
from mugrpo_megatron.weights.table import NORMS


def choose_backend(layers: str, device: torch.device) -> BackendSpecProvider:
    """The provider of the layer classes that `layers`, the value of `learner.layers`, names.

    `auto` takes Transformer Engine's classes on CUDA if it loads, and else those of `local`: Megatron's own classes, on
    CUDA with the linear layers of `learner.linear`. Raises UserError if `layers` asks for a Transformer Engine that
    is installed and does not load; `checks.layouts` has refused one that is not installed.
    """
    if layers == "local" or (layers == "auto" and not (device.type == "cuda" and HAVE_TE)):
        return DirectLayers() if device.type == "cuda" else LocalSpecProvider()
    if not HAVE_TE:
        raise UserError(
            f'learner.layers = "{layers}", but Transformer Engine does not load here: `mugrpo doctor` says '
            'why; fix it, or set learner.layers = "local"'
        )
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def layer_spec(
    config: TransformerConfig, backend: BackendSpecProvider, architecture: Architecture, layer: int
) -> ModuleSpec:
    """The specification of the pre-norm layer with number `layer`, from 0, in the whole model.

    The number decides which attention the layer has, and whether it has experts. With `config.moe_grouped_gemm` its
    experts are one grouped GEMM.
    """
    fused, norm = backend.fuse_layernorm_and_linear(), norm_type(config)
    experts = architecture.experts if layer >= architecture.dense_layers else 0
    latent, linear = architecture.latent, architecture.is_linear(layer)
    if latent:
        attention = latent_spec(latent, backend)
    elif architecture.delta and linear:
        attention = delta_spec(architecture.delta, backend)
    else:
        attention = _attention_spec(config, backend)
    # Despite its name, use_te_activation_func lets Megatron take any activation from the specification.
    activation = SwiGLU if config.use_te_activation_func else None
    mlp = mlp_spec(backend, experts or None, config.moe_grouped_gemm, activation)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp if fused and not (latent or linear) else norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp if fused and not experts else norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            # A norm has one name in checkpoints, fused or not: either backend loads what the other saved.
            sharded_state_dict_keys_map=dict(NORMS),
        ),
    )


def _attention_spec(config: TransformerConfig, backend: BackendSpecProvider) -> ModuleSpec:
    head_norm = norm_type(config) if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_layer_norm_linear() or backend.column_parallel_linear(),
            core_attention=PackedAttention,
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


FLOAT32_TABLES = (64, 128, 256, 512)
"""Head dimensions for which SGLang 0.5.15 rotates with float32 tables on CUDA (layers/rotary_embedding/base.py)."""


def table_type(cuda: bool, head_dim: int, params_dtype: torch.dtype) -> torch.dtype:
    """The type of the rotary tables, as in SGLang: float32 on CUDA for `FLOAT32_TABLES`, otherwise the model's type."""
    return torch.float32 if cuda and head_dim in FLOAT32_TABLES else params_dtype


class PolicyModel(GPTModel):
    """GPT that returns hidden states instead of logits: the loss path applies the output weight to them in chunks."""

    def __init__(self, rope: Rope, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.register_buffer("frequencies", frequencies(rope), persistent=False)

    def _preprocess(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, *, packed_seq_params: Packing, **_: Any
    ) -> tuple[Any, ...]:
        """Embed the tokens if this chunk has the embedding, and compute the rotation of each row's position.

        Megatron would take the rotation from a table.
        """
        angles = torch.outer(position_ids[0].float(), self.frequencies).unsqueeze(1)
        dtype = table_type(angles.is_cuda, 2 * len(self.frequencies), self.config.params_dtype)
        packed_seq_params.rotation = angles.cos().to(dtype), angles.sin().to(dtype)
        embedded = self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else None
        return embedded, None, None, None, None, None

    def _postprocess(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return the hidden states [t, 1, h], also on the last pipeline stage, where GPTModel returns logits.

        Under sequence parallelism t is a rank's part of the rows.
        """
        return hidden_states

    @property
    def shares_weight(self) -> bool:
        """Whether the output weight is tied to the embedding and this rank holds the embedding."""
        return bool(self.share_embeddings_and_output_weights and self.pre_process)

    def output_weight(self) -> torch.Tensor:
        """The output weight [padded vocabulary / tp, h], on the last pipeline stage.

        It is the embedding's weight if the two are tied and on the same rank.
        """
        return self.shared_embedding_or_output_weight() if self.shares_weight else self.output_layer.weight


class Adapters(Protocol):
    """Parameters that train instead of the model's weights; `extras.lora` implements this interface.

    They are in modules whose names begin with `weights.table.ADAPTER`. A weight that they change becomes a
    `weights.buckets.MergedWeight`, from which syncs and saves read.
    """

    identity: Mapping[str, str | int]
    """Description of the adapters and of the frozen weights, stored in checkpoints and compared at a load."""

    def attach(self, chunk: PolicyModel) -> None:
        """Freeze the chunk's weights and add the adapters, before the data parallel wrapper sees them."""

    def start(self, chunks: Sequence[PolicyModel]) -> None:
        """Set the adapters to their state at the run's start."""

    def turn_off(self, chunks: Sequence[PolicyModel]) -> None:
        """Let the model compute with its frozen weights alone."""

    def files(self, chunks: Sequence[PolicyModel]) -> dict[str, Any]:
        """The adapters' files by their names in `hf/`, on rank 0. Collective."""


def build_model(
    model: ModelSection,
    parallel: ParallelSection,
    section: LearnerSection,
    architecture: Architecture,
    ranks: Ranks,
    adapters: Adapters | None = None,
    deterministic: bool = False,
) -> list[DistributedDataParallel]:
    """This rank's model chunks, each in Megatron's data parallel wrapper, with uninitialised weights.

    There are `parallel.virtual_pipeline` of them.
    """
    backend = choose_backend(section.layers, ranks.device)
    config = transformer_config(
        model, parallel, section, architecture, ranks, backend.fuse_layernorm_and_linear(), deterministic
    )
    vp_size = parallel.virtual_pipeline
    rows = -(-architecture.gpt["vocab_size"] // ranks.tp_size) * ranks.tp_size  # padded, so that all shards are equal
    chunks = [
        _build_chunk(config, backend, architecture, rows, vp_stage if vp_size > 1 else None)
        for vp_stage in range(vp_size)
    ]
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=reduces_early(ranks),
        # With this check Megatron would end the run. Here a non-finite gradient skips its update (optimizer.take_step).
        check_for_nan_in_grad=False,
    )
    if adapters:
        for chunk in chunks:
            adapters.attach(chunk)
    return [
        DistributedDataParallel(config, ddp, chunk.to(ranks.device), disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]


def reduces_early(ranks: Ranks) -> bool:
    """Whether gradients are reduced over data parallel ranks, bucket by bucket, during the last micro-batch's backward
    pass."""
    # Not on CPU: a reduction that runs beside the backward pass would compete with it for the cores.
    return ranks.device.type == "cuda" and ranks.dp_size * ranks.cp_size > 1


def policy(chunk: torch.nn.Module) -> PolicyModel:
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk  # type: ignore[return-value]


RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
FP8: dict[str, dict[str, Any]] = {
    "none": {},
    # "hybrid" computes forward in e4m3, and takes e5m2 for gradients because of its larger range.
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    # With a scale for each block, gradients fit into e4m3, whose steps are finer.
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}
"""Megatron's settings for each value of `learner.fp8`. Scales are computed from the current tensor, not from a history
of earlier ones (delayed scaling), so there is no state to checkpoint."""


def transformer_config(
    model: ModelSection,
    parallel: ParallelSection,
    section: LearnerSection,
    architecture: Architecture,
    ranks: Ranks,
    grouped_experts: bool,
    deterministic: bool = False,
) -> TransformerConfig:
    """Megatron's configuration: the architecture, plus layout, dtype and the learner's settings."""
    cuda = ranks.device.type == "cuda"
    dtype = getattr(torch, model.dtype)
    interleaved = parallel.virtual_pipeline > 1
    experts = bool(architecture.experts)
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": ranks.tp_size,
        "pipeline_model_parallel_size": ranks.pp_size,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline if interleaved else None,
        "context_parallel_size": ranks.cp_size,
        "expert_model_parallel_size": parallel.expert,
        "sequence_parallel": parallel.sequence,
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
        # With this setting Megatron sums the losses of micro-batches instead of averaging them.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        # Megatron compiles these two fusions with torch.compile, which takes seconds at a process's first updates. The
        # first is worth it on CUDA for experts, which have no other fused SwiGLU. The second is not: it fuses bias,
        # dropout and an addition, and these models have only the addition.
        "bias_activation_fusion": cuda and experts,
        "bias_dropout_fusion": False,
        "use_te_activation_func": not experts,
        # With interleaving, batched sends silently give wrong gradients; with overlapped sends, freed outputs give NaN
        # on gloo. These settings exclude both combinations.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "deallocate_pipeline_outputs": cuda,
        # With this setting Megatron adds up the embedding's gradient in a fixed order.
        "deterministic_mode": deterministic,
        **RECOMPUTE[section.recompute],
        **FP8[section.fp8],
    }
    if not interleaved and architecture.layers % ranks.pp_size:
        stages = [["decoder"] * count for count in stage_layers(architecture.layers, ranks.pp_size)]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        settings["pipeline_model_parallel_layout"] = stages
    if experts:
        settings["moe_token_dispatcher_type"] = "alltoall"
        settings["moe_grouped_gemm"] = grouped_experts
        settings["moe_enable_routing_replay"] = section.routing_replay != "off"
        settings["moe_router_padding_for_quantization"] = section.fp8 != "none"
    return TransformerConfig(**{**settings, **architecture.transformer})


def _no_init(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _build_chunk(
    config: TransformerConfig,
    backend: BackendSpecProvider,
    architecture: Architecture,
    vocab_size: int,
    vp_stage: int | None,
) -> PolicyModel:
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = range(offset, offset + get_num_layers_to_build(config, vp_stage=vp_stage))
    specs = [layer_spec(config, backend, architecture, layer) for layer in layers]
    return PolicyModel(
        rope=architecture.rope,
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm_type(config)),
        pre_process=first,
        post_process=last,
        parallel_output=True,
        vp_stage=vp_stage,
        **{**architecture.gpt, "vocab_size": vocab_size},
    )


def gather_sequence(hidden: torch.Tensor, sequence_parallel: bool) -> torch.Tensor:
    """The hidden states of all rows, [rows, h], on every tensor parallel rank, from `hidden` [t, 1, h].

    Under sequence parallelism `hidden` has only this rank's part of the rows. Each rank computes the gradient from its
    own slice of the vocabulary, and the backward pass sums these gradients over the tensor parallel ranks.
    """
    if sequence_parallel:
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    else:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
    return hidden.squeeze(1)


def parameters(chunks: Sequence[torch.nn.Module]) -> int:
    return sum(p.numel() for chunk in chunks for p in chunk.parameters())
