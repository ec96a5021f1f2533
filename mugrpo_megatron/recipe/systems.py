"""Sections about machines: parallel layout, learner, engine."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from mugrpo_megatron.recipe.objective import Section, changes

BLOCK = 128
"""Number of rows, and of columns, of a block of weights that shares one fp8 scale, in an engine with
`engine.quantization`."""
SYNC_BUCKET_BYTES = 512 * 1024 * 1024
CUDA_SYNC_BUCKET_BYTES = 4 * 1024**3
FP8_MULTIPLE = {"none": 1, "tensorwise": 16, "blockwise": 128}
"""`LearnerSection.fp8` -> the number that must divide all dimensions of a product: 16 for tensor cores, 128 for
blocks."""
Replay = Literal["off", "rollout", "learner"]


def cpu_row_tokens(layers: int, hidden: int) -> int:
    """Returns the most tokens of a micro-batch on a CPU, for a model of `layers` layers of width `hidden`.

    A single longer response may exceed it.
    """
    # With more tokens the activations would leave the cache before the backward pass reads them: 8,192 tokens are too
    # many for a model of 0.8M parameters. A large model gets half, since its activations are larger: at 135M about
    # 0.75 MB a token.
    return 4096 if 12 * layers * hidden**2 < 64 * 2**20 else 2048


def sync_bucket_bytes(cuda: bool) -> int:
    """Returns the most bytes that a weight sync takes besides the model; two equally large buckets share them."""
    # On CUDA buckets are large, because each costs about 5 ms for collectives, a message and an IPC handle. A 7B model
    # has 57 buckets of the CPU's size, for which these costs would exceed the time of the copies. Memory is free during
    # a sync, since the KV cache is released.
    return CUDA_SYNC_BUCKET_BYTES if cuda else SYNC_BUCKET_BYTES


class ParallelSection(Section):
    """Parallel layout of the learner; the remaining ranks are data parallel."""

    model_config = ConfigDict(json_schema_extra=changes("work"))

    tensor: PositiveInt = 1
    """Tensor parallel size. Above 1, sequence parallelism is on too."""
    pipeline: PositiveInt = 1
    """Pipeline parallel size."""
    virtual_pipeline: PositiveInt = 1
    """Model chunks per pipeline rank (interleaved 1F1B); 1 is plain 1F1B."""
    context: PositiveInt = 1
    """Context parallel size: the number of ranks over which each packed sequence is split, for sequences that are too
    long for one rank."""
    expert: PositiveInt = 1
    """Expert parallel size of mixture-of-experts models."""

    @property
    def sequence(self) -> bool:
        """Whether the tensor parallel ranks also split norms and residual stream (sequence parallelism)."""
        return self.tensor > 1


class LearnerSection(Section):
    """Micro-batches, memory and layers of the learner."""

    model_config = ConfigDict(json_schema_extra=changes("work"))

    micro_batch_tokens: PositiveInt = 16384
    """Packed tokens (prompts and responses) of a micro-batch on a rank. A single longer response may exceed it.
    Micro-batches that run at once on CPU threads share this number. On a CPU each has at most 4,096 tokens, or 2,048 if
    the model has more than about 64 million parameters."""
    loss_chunk_tokens: NonNegativeInt = 0
    """Tokens per chunk of the fused loss. The logits of one chunk are in memory at once. 0 takes 4,096 on CUDA and
    1,024 on a CPU."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation in the backward pass, to save memory."""
    layers: Literal["local", "transformer_engine", "auto", "fp8_tensorwise", "fp8_blockwise"] = "local"
    """Kind of linear layers: Megatron's, or Transformer Engine's with fused norms; `auto` takes Transformer Engine's if
    it is installed. The two `fp8` kinds multiply in fp8, scaled by tensor or by blocks of 128; weights stay in
    bfloat16."""
    routing_replay: Replay = Field("off", json_schema_extra=changes("branch"))
    """Routing replay of mixtures of experts, which keeps the importance ratios of stale tokens from jumping. `rollout`
    replays the experts that the engine chose for each token (CUDA only); `learner` replays those of a learner pass at
    the stage's start."""
    threads: NonNegativeInt = 0
    """CPU threads of each learner rank; 0 divides the machine's cores among its ranks. Up to four of the threads run
    separate micro-batches if the model is small, dense, on one rank and not recomputed."""

    @property
    def fp8(self) -> Literal["none", "tensorwise", "blockwise"]:
        """The scaling of products in fp8; `none` if the layers do not use fp8."""
        if self.layers == "fp8_tensorwise":
            return "tensorwise"
        return "blockwise" if self.layers == "fp8_blockwise" else "none"

    def chunk_tokens(self, cuda: bool) -> int:
        """Returns the most tokens in a chunk of the fused loss: `loss_chunk_tokens`, or the device's default for 0."""
        # Each chunk also reads and writes the output weight's float32 gradient, so a chunk is large on CUDA. For an
        # output weight of 3,584 x 152,064 that moves 4.4 GB in about 1 ms on an H200, while the products of a chunk
        # take 4 ms with 1,024 tokens and 17 ms with 4,096.
        return self.loss_chunk_tokens or (4096 if cuda else 1024)


class EngineSection(Section):
    """SGLang engines, which share the learner's devices."""

    model_config = ConfigDict(json_schema_extra=changes("work"))

    tensor: PositiveInt = 1
    """Tensor parallel size of an engine: a divisor of a node's ranks, or all ranks of `engine.nodes`."""
    nodes: PositiveInt = 1
    """Number of nodes of an engine, each with all its devices, for models that are too large for one node
    (docs/engine.md)."""
    between_stages: Literal["restart", "sleep"] = "sleep"
    """What the engine does while the learner trains: `sleep` keeps its process and releases its memory, `restart` ends
    its process."""
    memory_fraction: float = Field(0.8, gt=0.0, lt=1.0)
    """Fraction of a GPU's memory for weights and KV cache (CUDA)."""
    max_running_requests: PositiveInt = 1024
    """Maximum number of requests that are decoded together. A high number helps with short responses."""
    request_timeout_s: PositiveFloat = 600.0
    """Seconds after which an engine counts as hung: without a new token during generation, and without an answer
    otherwise. Its start may take three times as long."""
    quantization: Literal["none", "fp8"] = "none"
    """Type of the weights of the engine's linear layers: that of the learner, or fp8, quantized in blocks of 128 x 128
    at each weight sync (CUDA and bfloat16 only)."""
    check_weights: Literal["first", "every", "never"] = "first"
    """Weight syncs after which the engines' weights are compared bitwise with the learner's."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Other server arguments of SGLang, checked against the installed version (docs/engine.md)."""

    @property
    def start_timeout_s(self) -> float:
        """Seconds after which an engine that has not started counts as failed."""
        # A start takes longer than a request: a large model is read from disk, and the first start on a GPU compiles
        # kernels.
        return 3 * self.request_timeout_s

    @field_validator("extra")
    @classmethod
    def _check_finite(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, number in value.items():
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{name} is {number}, and must be a finite number")
        return value
