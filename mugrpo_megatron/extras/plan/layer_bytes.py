"""Bytes that one transformer layer keeps from its forward to its backward pass, and those that it needs in backward."""

from __future__ import annotations

from dataclasses import dataclass

from mugrpo_megatron.extras.plan.case import Layout
from mugrpo_megatron.weights.architecture import Architecture

FLOAT = 4
CHUNK = 64
"""Tokens of a chunk of the gated delta rule (kernels/gated_delta.py, which imports torch)."""
PADDED = 1.0
"""Assumed padding factor of attention on CPU: 1 if all sequences are equally long; it is at most 1.25
(learner/attention.py)."""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one transformer layer."""

    input: float
    """Bytes of the residual stream that enters the layer, which is all that full recompute keeps."""
    attention: float
    """Bytes of core attention's activations besides its output; selective recompute drops them."""
    projections: float
    """Bytes of the activations that selective recompute keeps in place of `attention`."""
    rest: float
    """Bytes of all other activations: norms, residual stream, inputs of matrix products, feed-forward."""
    working: float
    """Bytes of the gradients and temporaries that exist at once in the layer's backward pass."""

    def kept(self, recompute: str) -> float:
        """Bytes kept from forward to backward."""
        if recompute == "full":
            return self.input
        return self.input + self.rest + (self.projections if recompute == "selective" else self.attention)

    def recomputed(self, recompute: str) -> float:
        """Bytes of the activations that this layer's backward pass computes again, and holds until it ends."""
        whole = self.kept("none")
        return {"none": 0.0, "selective": self.attention, "full": whole}[recompute]


def layer_bytes(architecture: Architecture, layout: Layout, tokens: int, itemsize: int, cuda: bool) -> LayerBytes:
    """Bytes of one layer for this rank's `tokens` tokens: those of a packed row, divided by context parallelism.

    For a mixture of experts the layer is one with experts; the model's first layers may be dense and then keep less.
    """
    size = architecture.letters
    tp, b = layout.tensor, itemsize
    stream = tokens / (tp if layout.sequence else 1)
    heads = architecture.transformer["num_attention_heads"] / tp
    q, k = size["Q"] / tp, size.get("K", 0) / tp
    norms = 2 * stream * FLOAT
    if architecture.latent:
        # In latent attention query, key, value and output all have the query's size. Attention keeps these four. On CPU
        # they are padded and in float32, and a fifth is added as an allowance that no measurement has confirmed.
        attention = 4 * q * b if cuda else PADDED * 5 * q * FLOAT
        attention = tokens * (attention + FLOAT * heads)
    elif cuda:
        # v is a view of the q, k, v projection's output and keeps all of it. Rotated q and k are copies. Flash
        # attention keeps its log-sum-exp.
        attention = tokens * (b * (q + 2 * k) + b * (q + k) + FLOAT * heads)
    else:
        # Kept are rotated q, k and v, padded and in float32, the padded output, and the log-sum-exp.
        attention = PADDED * tokens * FLOAT * (q + 2 * k + q + heads)
    if architecture.qk_layernorm:
        # The norms of q and k keep their inputs. q's is a copy. k's is a view of the projection's output and keeps all
        # of it: on CUDA, v keeps it anyway; on CPU, it would be freed without this norm.
        attention += tokens * (b * q + FLOAT * (heads + heads * k / q))
        attention += 0 if cuda else tokens * b * (q + 2 * k)
    projections = tokens * b * (q + 2 * k + q)
    rest = stream * b * size["H"] * 3 + norms + tokens * b * q
    if architecture.transformer.get("attention_output_gate"):
        rest += tokens * 2 * q * FLOAT  # twice: the gate and its sigmoid
    if architecture.latent:
        projections = tokens * b * 4 * q
        latents = 2 * (size["C"] + size["L"]) + architecture.latent.rotary
        rest = stream * b * (size["H"] * 3 + latents) + norms + tokens * b * size["O"] / tp
    feed_forward, working = _feed_forward(architecture, layout, tokens, stream, b, cuda)
    return LayerBytes(stream * b * size["H"], attention, projections, rest + feed_forward, working)


def linear_layer_bytes(
    architecture: Architecture, layout: Layout, tokens: int, itemsize: int, cuda: bool
) -> LayerBytes:
    """Bytes of one layer with a gated delta network, computed in torch's operations (kernels/gated_delta.py).

    The mixing over tokens takes the place of attention: selective recompute drops its activations and keeps its input.
    """
    sizes, tp, b = architecture.delta, layout.tensor, itemsize
    assert sizes is not None
    stream, width = tokens / (tp if layout.sequence else 1), architecture.letters["H"]
    channels, values, heads = sizes.channels / tp, sizes.values / tp, sizes.value_heads / tp
    # Numbers that a head keeps for a token: about nine vectors of a key's size (keys, queries and their products with
    # decays), a row in each of five matrices [CHUNK, CHUNK], the solution of the triangular system (a key and a value)
    # and the update (a value), its share of the one state of a chunk, and about eight scalars.
    of_head = 9 * sizes.key + 5 * CHUNK + sizes.key + 2 * sizes.value + sizes.key * sizes.value / CHUNK + 8
    mixing = tokens * (3 * b * channels + FLOAT * heads * of_head)
    projected = tokens * b * (channels + values + 2 * heads)
    normed = tokens * values * (2 * FLOAT + 3 * b)
    rest = stream * b * width * 3 + 2 * stream * FLOAT + projected + normed
    feed_forward, working = _feed_forward(architecture, layout, tokens, stream, b, cuda)
    segments = tokens * b * (channels + 2 * heads)
    return LayerBytes(stream * b * width, mixing, segments, rest + feed_forward, working)


def _feed_forward(
    architecture: Architecture, layout: Layout, tokens: int, stream: float, itemsize: int, cuda: bool
) -> tuple[float, float]:
    """(kept, working): bytes kept besides the norm's output, and temporary bytes of the backward pass."""
    size, tp, b = architecture.letters, layout.tensor, itemsize
    if not architecture.experts:
        width = size["F"] / tp
        return tokens * b * 3 * width, b * (tokens * 3 * width + 2 * stream * size["H"])
    chosen = tokens * architecture.transformer["moe_router_topk"]  # assumes that all experts get equally many tokens
    width = size["M"] / tp
    # An expert keeps the output of fc1 and the input of fc2; on CPU also silu(gate) and the product before its
    # weighting.
    products = 3 if cuda else 5
    activations = chosen * b * (size["H"] + products * width) + stream * architecture.experts * (2 * FLOAT + 1)
    shared = tokens * b * 3 * size.get("S", 0) / tp
    return activations + shared, b * chosen * 3 * (size["H"] + width)
