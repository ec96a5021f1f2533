"""Random ragged batches for property tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from mugrpo_megatron.algorithm.masks import response_weights
from mugrpo_megatron.algorithm.segments import LossInputs, Segments, make_segments, with_turns
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.recipe.objective import PRESETS
from tests.algorithm.oracle import TURN

LONGEST = 16


@dataclass
class Batch:
    """N ragged responses, as lists and as tensors."""

    logprobs: list[list[float]]
    behaviour: list[list[float]]
    advantages: list[float]
    proximal: list[list[float]]
    """Log-probabilities under the policy that a clip range may lie around."""
    ref: list[list[float]] = field(default_factory=list)
    """Log-probabilities under the policy of the KL penalty."""

    @property
    def lengths(self) -> torch.Tensor:
        return torch.tensor([len(row) for row in self.logprobs], dtype=torch.int64)

    def segments(self, config: ObjectiveSection) -> Segments:
        segments = make_segments(self.lengths, response_weights(self.lengths, config, constant_length=LONGEST))
        return with_turns(segments, [np.arange(length) // TURN for length in self.lengths.tolist()])

    def leaf(self) -> torch.Tensor:
        """float64 [T] log-probabilities that require a gradient."""
        return flat(self.logprobs).requires_grad_()

    def inputs(self, config: ObjectiveSection) -> LossInputs:
        """The other columns in float64, with proximal and ref log-probabilities if the objective reads them."""
        return LossInputs(
            config,
            flat(self.behaviour),
            flat([self.advantages]),
            self.segments(config),
            proximal=flat(self.proximal) if config.proximal_every > 1 else None,
            ref=flat(self.ref) if config.kl_ref else None,
        )


def flat(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def random_batch(seed: int, lengths: list[int], spread: float = 0.6) -> Batch:
    """Log-ratios are normal with standard deviation `spread`, half of it to the proximal policy, 0.5 to the ref policy.

    Advantages are normal, every third 0.
    """
    generator = torch.Generator().manual_seed(seed)

    def rows(draw: torch.Tensor) -> list[list[float]]:
        return [row.tolist() for row in draw.split(lengths)]

    logprobs = -2 * torch.rand(sum(lengths), generator=generator, dtype=torch.float64)
    shift = spread * torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    advantages[2::3] = 0.0
    drift = spread / 2 * torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    away = 0.5 * torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    return Batch(
        rows(logprobs), rows(logprobs - shift), advantages.tolist(), rows(logprobs - drift), rows(logprobs - away)
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Ragged responses, empty ones among them; log-ratios mostly moderate, some extreme: 1e-4 is -9.2 nats."""
    lengths = draw(st.lists(st.integers(0, LONGEST), min_size=0, max_size=6))
    batch = random_batch(draw(st.integers(0, 2**32 - 1)), lengths, draw(st.sampled_from([0.0, 0.05, 0.6, 3.0])))
    far = st.sampled_from([-50.0, -12.0, -9.3, -9.1, 50.0])
    edits = st.lists(st.tuples(st.integers(0, 5), st.integers(0, LONGEST - 1), far), max_size=12)
    for other in (batch.behaviour, batch.ref):
        for i, t, log_ratio in draw(edits):
            if i < len(lengths) and t < lengths[i]:
                other[i][t] = batch.logprobs[i][t] - log_ratio
    return batch


VARIANTS: list[dict[str, Any]] = [
    {},
    *(
        {"veto": veto, **fields}
        for fields in ({}, {"trigger_ratio": 0.5}, {"trigger_ratio": 0.5, "veto_reach": "turn"})
        for veto in ("trigger", "suffix", "suffix_non_trigger", "response")
    ),
    *({"veto": veto, "veto_reach": reach} for veto in ("prefix", "prefix_min") for reach in ("response", "turn")),
    {"veto": "prefix", "prefix_signs": "both"},
    {"dual_clip": 3.0},
    *({"veto": "suffix", "trigger_ratio": ratio} for ratio in (0.0, 1.0)),
    *({"reduction": reduction} for reduction in ("constant", "sequence_mean")),
    *(
        {"clip_centre": centre, "proximal_every": every}
        for centre in ("proximal_shifted", "proximal_scaled")
        for every in (ObjectiveSection().proximal_every, 4)
    ),
    {"reject": "sequence", "reject_range": (0.5, 2.0)},
    *(
        {"kl_ref": "start", "kl_coef": 0.1, "kl_penalty": penalty}
        for penalty in ("k2", "k3", "k1_weighted", "k2_weighted", "k3_weighted")
    ),
]

configs = st.builds(
    lambda name, variant: ObjectiveSection(name=name, **variant),
    st.sampled_from(sorted(PRESETS)),
    st.sampled_from(VARIANTS),
)
"""Every preset with every option."""
