"""HostCopy tensors cost nothing and come back as they were, views included."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.learner import learner
from mugrpo_megatron.learner.learner import copy_back, move_to_host


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slab", [1 << 8, 1 << 26])
def test_values_and_views_survive(dtype: torch.dtype, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "SLAB", slab)
    storage = torch.randn(1000).to(dtype)
    view, before = storage[100:300].view(10, 20), storage.clone()
    copies = move_to_host([storage])
    assert storage.untyped_storage().nbytes() == 0
    copy_back(copies)
    assert torch.equal(storage, before)
    view.fill_(3)
    assert bool((storage[100:300] == 3).all())


@given(st.lists(st.integers(0, 700), max_size=12))
def test_tensors_share_slabs_without_gaps(sizes: list[int]) -> None:
    """Of 256 bytes here: no more of them than all bytes together fill, and every tensor comes back."""
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    before = [tensor.clone() for tensor in tensors]
    with patch.object(learner, "SLAB", 256):
        copies = move_to_host(tensors)
    pieces = [piece for copy in copies if copy.host for piece in copy.host]
    slabs = {piece.untyped_storage().data_ptr() for piece in pieces}
    assert len(slabs) == -(-sum(sizes) // 256)
    assert sum(len(piece) for piece in pieces) == sum(sizes)
    copy_back(copies)
    assert all(torch.equal(copy, other) for copy, other in zip(tensors, before, strict=True))


def test_what_is_not_kept_wakes_as_zeros() -> None:
    gradients = torch.randn(64)
    copies = move_to_host([gradients], keep=False)
    assert copies[0].host is None
    copy_back(copies)
    assert torch.equal(gradients, torch.zeros(64))
