"""The recipe's sections about machines: layout, learner, engine; each docstring is an entry of docs/recipe.md."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from mugrpo_megatron.recipe.objective import Section, changes

BLOCK = 128
"""Rows and columns of a weight that share an fp8 scale in an engine with `engine.quantization`."""
SYNC_BUCKET_BYTES = 512 * 1024 * 1024
"""Memory of a weight sync beyond the model, at most: two flattened buckets of half of it are in flight."""
FP8_MULTIPLE = {"none": 1, "tensorwise": 16, "blockwise": 128}
"""All dimensions of a product in fp8 are multiples of this: 16 for the tensor cores, 128 for a block."""
Replay = Literal["off", "rollout", "learner"]


class ParallelSection(Section):
    """The learner's parallel layout; the remaining ranks are data parallel."""

    model_config = ConfigDict(json_schema_extra=changes("work"))

    tensor: PositiveInt = 1
    """Tensor parallel size: heads, ffn and vocabulary are split over this many ranks, norms and residual stream too
    (sequence parallelism)."""
    pipeline: PositiveInt = 1
    """Pipeline parallel size: layers are split over this many ranks."""
    virtual_pipeline: PositiveInt = 1
    """Model chunks per pipeline rank (interleaved schedule); 1 is plain 1F1B."""
    context: PositiveInt = 1
    """Context parallel size: each packed row is split over this many ranks, for sequences too long for one rank."""
    expert: PositiveInt = 1
    """Expert parallel size of mixture-of-experts models."""

    @property
    def sequence(self) -> bool:
        """Sequence parallelism: the tensor parallel ranks also split norms and residual stream."""
        return self.tensor > 1


class LearnerSection(Section):
    """How an update is split into micro-batches, and what it keeps in memory."""

    model_config = ConfigDict(json_schema_extra=changes("work"))

    micro_batch_tokens: PositiveInt = 16384
    """Packed tokens (prompt and response) of one micro-batch on one rank; a single longer response may exceed it.
    Micro-batches that CPU threads run at once share it, with at most 4,096 each."""
    loss_chunk_tokens: NonNegativeInt = 0
    """Tokens whose logits are in memory at once; 0 takes 4,096 on CUDA and 1,024 on CPU. Fewer need
    less memory."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass, where they do not fit into memory."""
    layers: Literal["local", "transformer_engine", "auto", "fp8_tensorwise", "fp8_blockwise"] = "local"
    """Linear layers: Megatron's own, or Transformer Engine's with fused norms; `auto` takes these if installed. The
    last two multiply in fp8, scaled by tensor or by blocks of 128; weights stay bfloat16."""
    routing_replay: Replay = Field("off", json_schema_extra=changes("branch"))
    """Experts that a mixture's tokens go to during a stage: those that the current router chooses, those that the
    engine chose when it sampled them (CUDA), or those of one learner pass at the stage's start. Fixed ones keep the
    ratios of stale tokens from jumping."""
    threads: NonNegativeInt = 0
    """CPU threads of each learner rank; 0 divides the machine's cores among the local ranks. Up to four of them
    each run a micro-batch of their own, if the model is small and neither sharded, a mixture of experts nor recomputed.
    """

    @property
    def fp8(self) -> Literal["none", "tensorwise", "blockwise"]:
        """What shares a scale in products in fp8; `none` without them."""
        if self.layers == "fp8_tensorwise":
            return "tensorwise"
        return "blockwise" if self.layers == "fp8_blockwise" else "none"

    def chunk_tokens(self, cuda: bool) -> int:
        """Tokens of a chunk of the loss path on the device.

        Each chunk reads and writes the output weight's float32 gradient: 4.4 GB at 3,584 x 152,064, about 1 ms of an
        H200, against 4 ms of products with 1,024 tokens and 17 ms with 4,096.
        """
        return self.loss_chunk_tokens or (4096 if cuda else 1024)


class EngineSection(Section):
    """The SGLang engine that shares the learner's devices."""

    model_config = ConfigDict(json_schema_extra=changes("work"))

    tensor: PositiveInt = 1
    """Tensor parallel size of each engine; it must divide the ranks of a node, or be all ranks of `engine.nodes`."""
    nodes: PositiveInt = 1
    """Nodes that each engine spans, with all devices: for a model that does not fit on one node (docs/engine.md)."""
    between_stages: Literal["restart", "sleep"] = "sleep"
    """While the learner trains: `sleep` keeps the engine's process and releases its memory, `restart` stops the
    process."""
    memory_fraction: float = Field(0.8, gt=0.0, lt=1.0)
    """Share of a GPU's memory that weights and KV cache may take (CUDA)."""
    max_running_requests: PositiveInt = 1024
    """Maximum number of responses decoded together; a large number helps short responses."""
    request_timeout_s: PositiveFloat = 600.0
    """Seconds until an engine counts as hung: without a new token during generation, else without an answer. Its start
    may take three times as long: large models come from a slow disk, and the first start on a GPU compiles kernels."""
    quantization: Literal["none", "fp8"] = "none"
    """Weights of the engine's linear layers: the learner's, or fp8 in half the memory, with a scale for each block of
    128 x 128, quantised at each weight sync (CUDA, bfloat16)."""
    check_weights: Literal["first", "every", "never"] = "first"
    """Compare the engines' weights with the learner's, bit by bit: after an engine's first sync, after every sync, or
    never."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of SGLang's server: `[engine.extra]`, checked against the installed SGLang (docs/engine.md)."""

    @property
    def start_timeout_s(self) -> float:
        """Seconds until an engine that has not started counts as failed; one that exits is noticed at once."""
        return 3 * self.request_timeout_s

    @field_validator("extra")
    @classmethod
    def _check_finite(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, number in value.items():
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{name} is {number}, and must be a finite number")
        return value
