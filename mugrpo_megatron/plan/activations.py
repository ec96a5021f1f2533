"""Bytes that a micro-batch keeps on a rank until its backward pass, tensor by tensor.

Shapes per layer of t tokens (after context parallelism), s of them in norms and residual stream (t / TP under sequence
parallelism, else t); H, Q, K, F as in `weights/blocks.py`, divided by TP. docs/plan.md has the list.
"""

from __future__ import annotations

from dataclasses import dataclass

from mugrpo_megatron.plan.layout import Layout
from mugrpo_megatron.weights.architecture import Architecture

FLOAT = 4
PADDED = 1.0
"""Slots of CPU attention per token: 1 for equal lengths, at most 1.25 with padding (learner/attention.py)."""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one transformer layer."""

    input: float
    """The residual stream that enters: all that is kept under full recompute."""
    attention: float
    """What core attention keeps besides its output; not kept under selective recompute."""
    projections: float
    """What is kept in its place under selective recompute."""
    rest: float
    """Norms, residual stream, inputs of matrix products, feed-forward."""
    working: float
    """Gradients and temporaries that exist at once in the layer's backward pass."""

    def kept(self, recompute: str) -> float:
        """Bytes kept from forward to backward."""
        if recompute == "full":
            return self.input
        return self.input + self.rest + (self.projections if recompute == "selective" else self.attention)

    def recomputed(self, recompute: str) -> float:
        """Bytes that are recomputed for the one layer in its backward pass."""
        whole = self.kept("none")
        return {"none": 0.0, "selective": self.attention, "full": whole}[recompute]


def layer_bytes(architecture: Architecture, layout: Layout, tokens: int, itemsize: int, cuda: bool) -> LayerBytes:
    """One layer on `tokens` tokens of this rank: a packed row divided by the context parallel size."""
    size = architecture.letters
    tp, b = layout.tensor, itemsize
    stream = tokens / (tp if layout.sequence else 1)
    heads = architecture.transformer["num_attention_heads"] / tp
    q, k = size["Q"] / tp, size["K"] / tp
    norms = 2 * stream * FLOAT
    if cuda:
        # v is a view of the projection's output and keeps all of it; rotated q and k are copies; flash keeps lse.
        attention = tokens * (b * (q + 2 * k) + b * (q + k) + FLOAT * heads)
    else:
        # q, k, v rotated, padded and in float32; the padded output; lse.
        attention = PADDED * tokens * FLOAT * (q + 2 * k + q + heads)
    if architecture.qk_layernorm:
        # The norm keeps its input: a copy of q, and k in the projection's output, freed on CPU without a norm.
        attention += tokens * (b * q + FLOAT * (heads + heads * k / q))
        attention += 0 if cuda else tokens * b * (q + 2 * k)
    projections = tokens * b * (q + 2 * k + q)
    rest = stream * b * size["H"] * 3 + norms + tokens * b * q
    feed_forward, working = _feed_forward(architecture, layout, tokens, stream, b, cuda)
    return LayerBytes(stream * b * size["H"], attention, projections, rest + feed_forward, working)


def _feed_forward(
    architecture: Architecture, layout: Layout, tokens: int, stream: float, itemsize: int, cuda: bool
) -> tuple[float, float]:
    """(kept, working): bytes kept besides the norm's output, and temporary bytes of the backward pass."""
    size, tp, b = architecture.letters, layout.tensor, itemsize
    if not architecture.experts:
        width = size["F"] / tp
        return tokens * b * 3 * width, b * (tokens * 3 * width + 2 * stream * size["H"])
    chosen = tokens * architecture.transformer["moe_router_topk"]  # experts are evenly loaded
    width = size["M"] / tp
    products = 3 if cuda else 5  # fc1's output and fc2's input; on CPU also silu(gate) and the product before weighting
    kept = chosen * b * (size["H"] + products * width) + stream * architecture.experts * (2 * FLOAT + 1)
    return kept, b * chosen * 3 * (size["H"] + width)


def micro_batches_in_flight(layout: Layout, pp_stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations pipeline stage `pp_stage` keeps at its peak, in units of all its layers.

    1F1B: one more than its warm-up. Interleaved: chunks in flight over chunks (Megatron, get_pp_rank_microbatches).
    """
    after = layout.pipeline - pp_stage - 1
    if layout.virtual == 1:
        return min(after + 1, micro_batches)
    chunks = min(2 * after + (layout.virtual - 1) * layout.pipeline + 1, micro_batches * layout.virtual)
    return chunks / layout.virtual


def loss_bytes(architecture: Architecture, layout: Layout, tokens: int, chunk: int, itemsize: int, cuda: bool) -> float:
    """Bytes on the last pipeline stage while the loss of this rank's `tokens` tokens is computed.

    Hidden states: the final norm's output, gathered where it was split, its rows that predict a trained token (at most
    all) and their gradient. On top, one chunk's logits in float32, which their gradient overwrites; on CPU also the
    weight in float32.
    """
    width = architecture.letters["H"]
    rows = -(-architecture.vocab_size // layout.tensor)
    hidden = tokens / (layout.tensor if layout.sequence else 1) + 2 * tokens
    if layout.context > 1 or layout.sequence:
        hidden += tokens * layout.context
    forward = FLOAT * rows * (min(chunk, tokens) + (0 if cuda or itemsize == FLOAT else width))
    return itemsize * width * hidden + forward
