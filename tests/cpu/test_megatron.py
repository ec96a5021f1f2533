"""What stands in for CUDA, what Megatron's experts miss without Transformer Engine, and what an import leaves out."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

import mugrpo_megatron.megatron_compat  # noqa: F401  which completes the router
from mugrpo_megatron.cpu import megatron as cpu
from tests.ranks import run_ranks


@pytest.fixture
def as_imported() -> Iterator[None]:
    """Megatron's module as it is before the learner's package has looked at it."""
    name = moe_utils.te_general_gemm
    del moe_utils.te_general_gemm
    yield
    moe_utils.te_general_gemm = name


@pytest.mark.skipif(moe_utils.HAVE_TE, reason="Transformer Engine defines the name")
@pytest.mark.usefixtures("as_imported")
def test_the_router_runs_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cpu.install()
    x, weight = torch.randn(5, 8), torch.randn(3, 8)
    with pytest.raises(NameError, match="te_general_gemm"):
        moe_utils.router_gating_linear(x, weight, None, torch.float32)
    cpu.complete_router()
    torch.testing.assert_close(moe_utils.router_gating_linear(x, weight, None, torch.float32), x @ weight.T)


def has_imported(name: str) -> bool:
    return name in sys.modules


@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron compiles what it imports where there is CUDA")
def test_the_compiler_is_not_imported_with_the_learner() -> None:
    assert run_ranks(1, has_imported, "mugrpo_megatron.train") == [True]
    assert run_ranks(1, has_imported, "torch._inductor.compile_fx") == [False]
