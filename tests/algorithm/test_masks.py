"""Engine/learner mismatch corrections."""

from __future__ import annotations

import torch

from mugrpo_megatron.algorithm.masks import mismatch_correction
from mugrpo_megatron.recipe import ObjectiveSection

RATIO = torch.tensor([0.01, 0.5, 1.0, 1.9, 5.0, 100.0])


def correction(name: str) -> torch.Tensor | None:
    return mismatch_correction(RATIO.log(), torch.zeros(6), ObjectiveSection(name=name))


def test_none_is_no_correction() -> None:
    assert correction("grpo") is None


def test_tis_truncates() -> None:
    torch.testing.assert_close(correction("tis"), torch.tensor([0.01, 0.5, 1.0, 1.9, 2.0, 2.0]))


def test_icepop_drops_outside_its_range() -> None:
    kept = mismatch_correction(RATIO.log(), torch.zeros(6), ObjectiveSection(name="icepop", mismatch_range=(0.4, 5.5)))
    torch.testing.assert_close(kept, torch.tensor([0.0, 0.5, 1.0, 1.9, 5.0, 0.0]))


def test_far_apart_engines_stay_finite() -> None:
    for name in ("tis", "icepop"):
        found = mismatch_correction(
            torch.tensor([-500.0, 0.0]), torch.tensor([0.0, -500.0]), ObjectiveSection(name=name)
        )
        assert found is not None
        assert found.isfinite().all()
