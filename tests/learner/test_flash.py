"""The call of torch's flash attention fits every torch that the project runs with: CUDA's is older than the CPU's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import list_flash_attention_impls
from torch.nn.attention.varlen import varlen_attn

from mugrpo_megatron.learner.context import ContextSplit, attend, fastest_flash, flash_attention


def of_torch_2_11(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    """The signature in torch 2.11.0 (torch/nn/attention/varlen.py:159), the version that the CUDA install pins."""


@pytest.mark.parametrize("wrapper", [of_torch_2_11, varlen_attn], ids=["2.11.0", "installed"])
@pytest.mark.parametrize("groups", [4, 2])
def test_the_call_fits_the_signature(wrapper: Callable[..., Any], groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    signature = inspect.signature(wrapper)

    def bound(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(signature.bind(*args, **options).arguments)
        return args[0]

    bound.__signature__ = signature  # type: ignore[attr-defined]
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", bound)
    q, k, v = (torch.randn(7, heads, 8) for heads in (4, groups, groups))
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    flash_attention(q, k, v, cu, cu, (4, 4), None)
    split = ContextSplit([3, 4], [3, 4], torch.arange(7), cu, cu)
    monkeypatch.setattr("mugrpo_megatron.learner.context.takes_flash", lambda q: True)
    monkeypatch.setattr("mugrpo_megatron.learner.context.gather_rows", lambda rows: rows)
    attend(q, k, v, split, 0.5)
    for call, scale in zip(calls, (None, 0.5), strict=True):
        assert (call["max_q"], call["max_k"], call["window_size"], call["scale"]) == (4, 4, (-1, 0), scale)
        named = "enable_gqa" in signature.parameters
        assert call.get("enable_gqa", False) == (named and groups < 4)


@pytest.mark.parametrize(
    ("capability", "installed", "expected"), [((9, 0), True, "FA3"), ((9, 0), False, "FA2"), ((8, 0), True, "FA2")]
)
def test_flash_attention_3_is_for_hopper_where_it_is_installed(
    capability: tuple[int, int], installed: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own registry imports the package and asks it for kernels."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    active: list[str] = []
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", active.append)
    if installed:
        (tmp_path / "flash_attn_interface.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path))
    fastest_flash.cache_clear()
    assert fastest_flash() == expected
    assert active == (["FA3"] if expected == "FA3" else [])
    fastest_flash.cache_clear()
    assert "FA3" in list_flash_attention_impls()
