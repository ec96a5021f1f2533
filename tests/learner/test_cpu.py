"""What Megatron's experts miss without Transformer Engine, on any device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from mugrpo_megatron.learner import cpu

pytestmark = pytest.mark.skipif(moe_utils.HAVE_TE, reason="Transformer Engine defines the name")


@pytest.fixture
def as_imported() -> Iterator[None]:
    """Megatron's module as it is before the learner's package has looked at it."""
    kept = moe_utils.te_general_gemm
    del moe_utils.te_general_gemm
    yield
    moe_utils.te_general_gemm = kept


@pytest.mark.usefixtures("as_imported")
def test_the_router_runs_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cpu.install()
    x, weight = torch.randn(5, 8), torch.randn(3, 8)
    with pytest.raises(NameError, match="te_general_gemm"):
        moe_utils.router_gating_linear(x, weight, None, torch.float32)
    cpu.complete_router()
    torch.testing.assert_close(moe_utils.router_gating_linear(x, weight, None, torch.float32), x @ weight.T)
