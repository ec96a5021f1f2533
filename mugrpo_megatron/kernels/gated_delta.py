"""The gated delta rule (arXiv 2412.06464, equation 10) in torch's operations, for learners, and for engines on CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK = 64
"""Number of tokens whose updates of the state are solved as one system of equations."""
EPSILON = 1e-6
"""Added to the squared norm of queries and keys."""


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the outputs S_t q_t of the state S_t = a_t S_{t-1} (1 - b_t k_t k_t^T) + b_t v_t k_t^T.

    The updates of one chunk of tokens are solved as a triangular system (section 3.3 of the paper), and a loop carries
    the state from chunk to chunk.

    Args:
        query, key: [n, t, key heads, key], normalised here; value: [n, t, heads, value].
        log_decay: [n, t, heads], logarithm of a; beta: [n, t, heads], b.
        state: float32 [n, heads, value, key] before the first token; None is zero.

    Returns:
        The outputs, float32 [n, t, heads, value], and the state after the last token, float32 [n, heads, value, key].
    """
    t, heads, width = value.shape[1:]
    query, key = unit_heads(query, key, heads)
    chunk = min(CHUNK, t)
    # From here on every tensor is [n, chunks, heads, tokens of a chunk, ...]. Padding has beta 0, and so no effect.
    query, key, value, log_decay, beta = (
        _chunks(x, chunk) for x in (query, key, value.float(), log_decay, beta.float())
    )
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=log_decay.device).triu(1)
    # torch.cumsum is not used: on CUDA it adds in no fixed order, and raises under use_deterministic_algorithms.
    total = log_decay.unsqueeze(-2).masked_fill(later, 0).sum(-1)
    # Masked before the exponential, so that its gradient is 0: a mask after it would give infinity times 0.
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    weighted = key * beta.unsqueeze(-1)
    system = (weighted @ key.transpose(-1, -2)) * decay
    sides = torch.cat([value * beta.unsqueeze(-1), weighted * total.exp().unsqueeze(-1)], dim=-1)
    solution = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    written, read = solution.split([width, key.shape[-1]], dim=-1)
    scores = (query @ key.transpose(-1, -2)) * decay
    query = query * total.exp().unsqueeze(-1)
    key = (key * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
    remaining = total[..., -1, None, None].exp()
    if state is None:
        state = value.new_zeros(len(value), heads, width, query.shape[-1])
    memory = state.transpose(-1, -2)
    outputs = []
    for i in range(total.shape[1]):
        update = written[:, i] - read[:, i] @ memory
        outputs.append(scores[:, i] @ update + query[:, i] @ memory)
        memory = memory * remaining[:, i] + key[:, i] @ update
    return torch.stack(outputs, dim=1).transpose(2, 3).flatten(1, 2)[:, :t], memory.transpose(-1, -2)


def unit_heads(query: torch.Tensor, key: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise queries and keys [..., key heads, key] to length 1; returns both as float32 [..., heads, key].

    Each key head is repeated for the value heads that share it, and the query is multiplied by
    key^-1/2, where key is the size of a head.
    """
    query, key = (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + EPSILON) for x in (query, key))
    query, key = (x.repeat_interleave(heads // x.shape[-2], -2) for x in (query, key))
    return query * query.shape[-1] ** -0.5, key


def _chunks(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """Cut [n, t, heads, ...] into [n, chunks, heads, tokens of a chunk, ...], with zeros after the last token."""
    missing = -x.shape[1] % chunk
    padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing)) if missing else x
    return padded.unflatten(1, (-1, chunk)).transpose(2, 3)
