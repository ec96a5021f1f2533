"""What a learner rank holds between updates: weights, gradients, master weights, moments."""

from __future__ import annotations

from dataclasses import dataclass

from mugrpo_megatron.plan.layout import Held, Layout

FLOAT = 4


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of one rank (learner/model.py and learner/optimizer.py make them)."""

    weights: int
    """Of model.dtype, in the buffers of Megatron's data parallel wrapper."""
    gradients: int
    """float32 for every parameter (`grad_reduce_in_fp32`), not sharded."""
    master: int
    """float32 copies, sharded over data (and context) parallel ranks; none in float32, where weights are the master."""
    moments: int
    """Both float32 moments of AdamW, sharded likewise."""

    @property
    def optimizer(self) -> int:
        """What sleeps with its values while the engine works, besides the weights."""
        return self.master + self.moments

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def learner_state(held: Held, layout: Layout, itemsize: int) -> State:
    """State of a rank that holds `held` parameters of `itemsize` bytes each."""
    sharded = held.dense / layout.shards + held.experts / layout.expert_shards
    return State(
        weights=itemsize * held.total,
        gradients=FLOAT * held.total,
        master=round(FLOAT * sharded) if itemsize < FLOAT else 0,
        moments=round(2 * FLOAT * sharded),
    )
