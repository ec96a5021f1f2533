"""The learner: everything that an update changes, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from mugrpo_megatron.learner.groups import Ranks
from mugrpo_megatron.learner.parking import Parked
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.weights.architecture import Architecture


@dataclass
class Learner:
    """A rank's share of the policy and its optimizer."""

    recipe: Recipe
    ranks: Ranks
    architecture: Architecture
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    updates_done: int = 0
    """Updates taken, skipped ones included; drives the learning rate."""
    steps_done: int = 0
    """Steps the optimizer took: `updates_done` less the updates skipped for a non-finite gradient."""
    skipped_in_a_row: int = 0
    """Updates skipped since the last step."""
    asleep: dict[str, list[Parked]] = field(default_factory=dict)
    """Parts of the state whose memory the engine has (see `memory`)."""
