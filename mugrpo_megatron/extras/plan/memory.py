"""Bytes of one rank: the learner's state and update, the engine, and the phases in which they share a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mugrpo_megatron.cpu.sglang import most_kv_bytes
from mugrpo_megatron.engine.launch import LENGTH_MARGIN, STATES_PER_REQUEST, kv_bytes_per_token
from mugrpo_megatron.extras.plan.case import (
    Layout,
    PlanCase,
    RankParameters,
    largest_parameter,
    parameters,
    rank_parameters,
    stage_range,
)
from mugrpo_megatron.extras.plan.hardware import GIB, replicas_of_engines
from mugrpo_megatron.extras.plan.layer_bytes import FLOAT, layer_bytes, linear_layer_bytes
from mugrpo_megatron.extras.plan.lengths import resident_mean, response_lengths
from mugrpo_megatron.recipe.systems import BLOCK, cpu_row_tokens, sync_bucket_bytes
from mugrpo_megatron.weights.architecture import Architecture

CPU_IMPORTS = 0.4 * GIB
"""Resident bytes of torch, Megatron or SGLang in a process on CPU; replicas of an engine are forked and share them."""
KEYS_SHARE = 1 / 1.9
"""Share of keys and values in the cache of an engine that also holds states of gated delta networks (SGLang's
`mamba_full_memory_ratio` is 0.9)."""


def state_bytes(architecture: Architecture, itemsize: int) -> int:
    """Bytes that an engine keeps for a request besides keys and values: states of gated delta networks and windows of
    convolutions."""
    if not (sizes := architecture.delta):
        return 0
    window = (sizes.kernel - 1) * sizes.channels
    return (architecture.layers - architecture.attention_layers) * (FLOAT * sizes.state + itemsize * window)


def micro_batches_in_flight(layout: Layout, pp_stage: int, micro_batches: int) -> float:
    """Number of micro-batches whose activations pipeline stage `pp_stage` keeps at its peak.

    With 1F1B these are its warm-up's micro-batches and one more. With the interleaved schedule it is the number of
    chunks in flight divided by the stage's chunks, each of which has a part of its layers (Megatron,
    get_pp_rank_microbatches).
    """
    after = layout.pipeline - pp_stage - 1
    if layout.virtual == 1:
        return min(after + 1, micro_batches)
    chunks = min(2 * after + (layout.virtual - 1) * layout.pipeline + 1, micro_batches * layout.virtual)
    return chunks / layout.virtual


def loss_bytes(architecture: Architecture, layout: Layout, tokens: int, chunk: int, itemsize: int, cuda: bool) -> float:
    """Bytes on the last pipeline stage while the loss of this rank's `tokens` tokens is computed.

    These are hidden states: the final norm's output, a gathered copy if it is split over ranks, its rows that predict a
    trained token (at most all), and the gradient of these rows. Besides, one chunk's logits in float32, which their
    gradient overwrites; on CPU also the output weight in float32.
    """
    width = architecture.letters["H"]
    rows = -(-architecture.vocab_size // layout.tensor)
    hidden = tokens / (layout.tensor if layout.sequence else 1) + 2 * tokens
    if layout.context > 1 or layout.sequence:
        hidden += tokens * layout.context
    forward = FLOAT * rows * (min(chunk, tokens) + (0 if cuda or itemsize == FLOAT else width))
    return itemsize * width * hidden + forward


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of a rank's weights, gradients and optimizer state (learner/model.py, learner/optimizer.py)."""

    weights: int
    """Bytes of the weights in model.dtype, which are in the buffers of Megatron's data parallel wrapper."""
    gradients: int
    """Bytes of the gradients: float32 for every parameter (`grad_reduce_in_fp32`), not sharded."""
    master: int
    """Bytes of the float32 copies of the weights, sharded over data and context parallel ranks; 0 if the weights are
    float32."""
    moments: int
    """Bytes of AdamW's two float32 moments, sharded in the same way."""

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer state, which on CUDA is offloaded with the weights while the engine works."""
        return self.master + self.moments

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def learner_state(mine: RankParameters, layout: Layout, itemsize: int, adapter: RankParameters | None = None) -> State:
    """State of a rank whose parameters have `itemsize` bytes each; if there is an adapter, only it is trained."""
    trained = adapter or mine
    sharded = trained.shared(layout)
    return State(
        weights=itemsize * (mine.total + (adapter.total if adapter else 0)),
        gradients=FLOAT * trained.total,
        master=round(FLOAT * sharded) if itemsize < FLOAT else 0,
        moments=round(2 * FLOAT * sharded),
    )


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The packed rows of one update on a data parallel rank."""

    length: int
    """Tokens of the longest packed row, before context parallelism divides it."""
    micro_batches: int
    """Number of packed rows in an update whose sequences have mean lengths."""


def batch_of(case: PlanCase) -> PackedRows:
    """The packed rows of an update: as long as `learner.packing.plan` allows, their number from mean lengths."""
    recipe, layout = case.recipe, case.layout
    longest = recipe.longest_training_sequence
    most = -(-case.responses * longest // layout.data)
    row = recipe.learner.micro_batch_tokens
    if not case.cuda:
        row = min(row, cpu_row_tokens(case.architecture.layers, case.architecture.letters["H"]))
    length = max(longest, min(row, most))
    tokens = case.responses * case.mean_sequence / case.assumptions.packing / layout.data
    multiple = layout.pipeline if layout.virtual > 1 else 1
    count = max(1, math.ceil(tokens / length))
    return PackedRows(length, -(-count // multiple) * multiple)


RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """Bytes of a learner rank of one pipeline stage in an update."""

    pp_stage: int
    state: State
    recompute: str
    kept: Mapping[str, float]
    """Choice of recomputation -> bytes of activations that are kept, over all layers and micro-batches in flight."""
    remade: Mapping[str, float]
    """Choice of recomputation -> bytes of activations that are recomputed, for one layer at a time."""
    loss: float
    """Bytes of the loss path (`loss_bytes`): hidden states and one chunk of logits; 0 except on the last pipeline
    stage."""
    working: float
    """Gradients and temporaries of one layer's backward pass."""
    embedding: float
    """Bytes of the embedding's gradient before it is added to the gradient buffer; 0 except on the first pipeline
    stage."""
    reduced: float
    """gloo's copy of the gradients that it reduces; 0 with NCCL."""
    in_flight: float
    """Number of micro-batches whose activations are kept at the peak."""

    def peak(self, recompute: str) -> float:
        """Peak bytes of an update besides the state.

        The greatest of four moments: the loss is computed; the last layer's backward pass, after the loss path is
        freed; the embedding's gradient, after this micro-batch's activations are freed; the reduction of gradients.
        """
        stored = self.kept[recompute]
        others = stored * (1 - 1 / self.in_flight)
        layer = stored + self.remade[recompute] + self.working
        return max(stored + self.loss, layer, others + self.embedding, self.reduced)

    @property
    def update(self) -> float:
        return self.peak(self.recompute)

    @property
    def total(self) -> float:
        return self.state.total + self.update


def learner_memory(case: PlanCase, batch: PackedRows, pp_stage: int) -> LearnerMemory:
    """Bytes of a rank of `pp_stage` in an update of `batch`."""
    recipe, architecture, layout, b = case.recipe, case.architecture, case.layout, case.itemsize
    mine, adapter = rank_parameters(architecture, layout, pp_stage), case.adapter(layout)
    trained = adapter or mine
    tokens = batch.length // layout.context
    mixers = {
        linear: (linear_layer_bytes if linear else layer_bytes)(architecture, layout, tokens, b, case.cuda)
        for linear in {architecture.is_linear(layer) for layer in stage_range(architecture, layout, pp_stage)}
    }
    in_flight = micro_batches_in_flight(layout, pp_stage, batch.micro_batches)
    layers = [mixers[architecture.is_linear(layer)] for layer in stage_range(architecture, layout, pp_stage)]
    loss = 0.0
    if pp_stage == layout.pipeline - 1:
        loss = loss_bytes(architecture, layout, tokens, recipe.learner.chunk_tokens(case.cuda), b, case.cuda)
    return LearnerMemory(
        pp_stage=pp_stage,
        state=learner_state(mine, layout, b, adapter),
        recompute=recipe.learner.recompute,
        kept={choice: in_flight * sum(layer.kept(choice) for layer in layers) for choice in RECOMPUTE},
        # While a layer is recomputed, the activations of the layers after it are already freed.
        remade={
            choice: max(
                layer.recomputed(choice) - sum(later.kept(choice) for later in layers[index + 1 :])
                for index, layer in enumerate(layers)
            )
            for choice in RECOMPUTE
        },
        loss=loss,
        working=max(layer.working for layer in layers),
        embedding=float(b * trained.vocabulary if pp_stage == 0 else 0),
        reduced=0.0 if case.cuda else 4.0 * max(trained.dense, trained.experts),
        in_flight=in_flight,
    )


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes of an engine rank while it generates."""

    weights: float
    cache: float
    """Bytes of the KV cache. On CUDA it takes what the weights leave of `engine.memory_fraction`, unless
    `max_total_tokens` limits it; on CPU `engine.max_running_requests` and the node's memory set it."""
    work: float
    """Bytes of activations and CUDA graphs, which `engine.memory_fraction` does not include; on CPU those of the states
    of gated delta networks."""
    tokens: int
    """Tokens that the cache holds, over the engine's ranks."""
    requests: int
    """Responses decoded together at most, limited by the cache and `engine.max_running_requests`."""

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.work


def cache_shares(architecture: Architecture, tensor: int) -> int:
    """Number of distinct shards of the KV cache among an engine's ranks: 1 with latent attention, where all ranks hold
    the same; else one for each key/value head, and further ranks hold copies."""
    return 1 if architecture.latent else min(tensor, architecture.transformer["num_query_groups"])


def engine_weight_bytes(case: PlanCase) -> float:
    """Bytes of an engine's weights over all of its ranks.

    In fp8 a weight has one byte, and each block of weights a float32 scale; embedding and output layer keep the
    learner's dtype. The norms keep it too, but are so small that they are counted as fp8.
    """
    parameters = rank_parameters(case.architecture, Layout(), 0)
    if case.recipe.engine.quantization != "fp8":
        return case.itemsize * parameters.total
    return case.itemsize * parameters.vocabulary + (parameters.total - parameters.vocabulary) * (1 + FLOAT / BLOCK**2)


def engine_memory(case: PlanCase) -> EngineMemory:
    """Bytes of one rank of an engine, as SGLang sizes it: on CUDA while the learner is offloaded."""
    recipe, assumptions, tp = case.recipe, case.assumptions, case.recipe.engine.tensor
    weight_bytes = engine_weight_bytes(case)
    weights = weight_bytes / tp * replicas_of_engines(recipe.engine, case.cluster, weight_bytes)
    sharing = cache_shares(case.architecture, tp)
    per_token = kv_bytes_per_token(dict(case.config), recipe.model.dtype) / sharing
    limit = recipe.engine.extra.get("max_total_tokens") or float("inf")
    states = STATES_PER_REQUEST * state_bytes(case.architecture, case.itemsize) / tp
    if case.cuda:
        free = case.cluster.device.memory - assumptions.learner_rest - assumptions.engine_rest
        cache = min(limit * per_token, max(0.0, recipe.engine.memory_fraction * free - weights))
        work = assumptions.engine_work
    else:
        window = recipe.longest_training_sequence + LENGTH_MARGIN
        cache = min(limit, recipe.engine.max_running_requests * window) * per_token
        most = most_kv_bytes(case.cluster.device.memory * case.cluster.per_node)
        cache = min(cache, max(most, window * per_token))
        work = recipe.engine.max_running_requests * states
    tokens = int(cache / per_token * (KEYS_SHARE if states and case.cuda else 1))
    lengths = response_lengths(case.mean_response, recipe.rollout.max_response_tokens, assumptions.spread)
    resident = case.mean_prompt + resident_mean(lengths)
    requests = min(recipe.engine.max_running_requests, int(tokens / resident))
    if states and case.cuda:
        requests = min(requests, int(cache * (1 - KEYS_SHARE) / states))
    return EngineMemory(weights, cache, work, tokens, requests)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest rank in each phase, and whether they fit its device."""

    device: int
    learning: LearnerMemory
    serving: EngineMemory
    learn: float
    """While the learner works and the engine sleeps."""
    sync: float
    """During a weight sync: the buckets and the weights of learner and engine, on CPU all that the two hold."""
    generate: float
    """While the engine works; on CUDA the learner is offloaded then."""
    host: float
    """Host memory of one node: pinned copies of offloaded state, and each rank's copy of what a checkpoint saves."""
    shared: float
    """/dev/shm of one node: the buckets of the sync for engines on CPU."""

    @property
    def resting(self) -> float:
        """Bytes on the device during generation besides the engine's weights, cache and work space."""
        return self.generate - self.serving.total

    @property
    def phases(self) -> dict[str, float]:
        """Phase -> bytes of its fullest rank."""
        return {"learner": self.learn, "sync": self.sync, "engine": self.generate}

    @property
    def peak(self) -> float:
        """Bytes of the fullest phase."""
        return max(self.phases.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.device and self.serving.requests >= 1

    @property
    def problems(self) -> list[str]:
        """Sentences on each phase that does not fit, and on an engine that has no room for one response; empty if
        `fits`."""
        sentences = [
            f"the {name} phase needs {value / GIB:.1f} GiB of {self.device / GIB:.1f}"
            for name, value in self.phases.items()
            if value > self.device
        ]
        if self.serving.requests < 1:
            sentences.append("the engine's share of the device has no room for one response's keys and values")
        return sentences


def rest_bytes(case: PlanCase) -> float:
    """Bytes that a sleeping learner and a sleeping engine keep on a GPU; on CPU those of their imports."""
    return case.assumptions.learner_rest + case.assumptions.engine_rest if case.cuda else 2 * CPU_IMPORTS


def conversion_bytes(architecture: Architecture, itemsize: int) -> float:
    """Peak bytes of `mugrpo convert`: the libraries, the largest parameter and its copy."""
    return CPU_IMPORTS + 2 * itemsize * largest_parameter(architecture)


def memory(case: PlanCase, engine: EngineMemory) -> Memory:
    """Bytes of the run's fullest rank in each phase; `engine` is the memory of an engine rank."""
    layout, cluster, assumptions = case.layout, case.cluster, case.assumptions
    b, cuda = case.itemsize, case.cuda
    batch = batch_of(case)
    stages = [learner_memory(case, batch, pp_stage) for pp_stage in range(layout.pipeline)]
    fullest = max(stages, key=lambda stage: stage.total)
    rests = rest_bytes(case)
    largest = b * case.architecture.vocab_size * case.architecture.letters["H"]
    # The two buckets that exist at a time may be the embedding and the output layer. With tensor parallelism the
    # gathered shards of one of them, and the copy that is joined from these, are added.
    copies = 2 + 2 * (layout.tensor > 1)
    bucket = max(sync_bucket_bytes(cuda), copies * largest)
    staging = min(max(sync_bucket_bytes(cuda), 2 * largest), parameters(case.architecture) * b)
    state = max((stage.state for stage in stages), key=lambda stage: stage.total)
    offloaded = state.weights + state.optimizer if cuda else 0
    saved = max((b + 12) * case.trained(pp_stage).shared(layout) for pp_stage in range(layout.pipeline))
    learn = fullest.state.total + fullest.update * (1 + assumptions.fragmentation * cuda)
    return Memory(
        device=cluster.device.memory,
        learning=fullest,
        serving=engine,
        # On CPU learner and engine keep their memory while the other works. A checkpoint's copies are added to the
        # update's peak, since they do not reuse the memory of its freed activations.
        learn=learn + rests + (0 if cuda else saved + engine.total),
        sync=rests + bucket + (state.weights + engine.weights if cuda else state.total + engine.total),
        generate=engine.total + rests + (0 if cuda else state.total),
        host=cluster.per_node * (offloaded + saved),
        shared=0.0 if cuda else cluster.per_node / case.recipe.engine.tensor * staging,
    )
