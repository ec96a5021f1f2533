"""Hand-written backward passes equal autograd on the definitions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from mugrpo_megatron.learner.attention import _Rotate
from mugrpo_megatron.learner.model import FLOAT32_TABLES, table_type
from mugrpo_megatron.learner.operators import RMSNorm, _SwiGLU

CONFIG = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False)


def compare(ours: Callable[..., torch.Tensor], definition: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    result, wanted = ours(*inputs), definition(*inputs)
    torch.testing.assert_close(result, wanted)
    weights = torch.randn_like(wanted)
    for a, b in zip(
        torch.autograd.grad((result * weights).sum(), inputs),
        torch.autograd.grad((wanted * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(7, 1, 16), (3, 2, 4, 16)])
def test_norm(shape: tuple[int, ...]) -> None:
    norm = RMSNorm(CONFIG, 16, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(shape, requires_grad=True)

    def ours(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return norm(x)

    compare(ours, lambda x, weight: F.rms_norm(x, (16,), weight, 1e-5), x, norm.weight)


def test_gate() -> None:
    def definition(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    compare(_SwiGLU.apply, definition, torch.randn(9, 1, 24, requires_grad=True))


def test_rotary_tables_have_the_type_of_the_engines() -> None:
    """SGLang's own condition for its fallback kernel, which rounds the tables to the type of the queries."""
    sglang = Path(find_spec("sglang").origin or "").parent
    text = (sglang / "srt" / "layers" / "rotary_embedding" / "base.py").read_text(encoding="utf-8")
    lists = re.findall(r"self\.head_size not in (\[[\d, ]+\])", text)
    assert [tuple(json.loads(sizes)) for sizes in lists] == [FLOAT32_TABLES]
    assert table_type(True, 128, torch.bfloat16) == torch.float32
    assert table_type(True, 16, torch.bfloat16) == table_type(False, 128, torch.bfloat16) == torch.bfloat16


def test_rotation() -> None:
    angles = torch.rand(6, 1, 4, dtype=torch.float64)
    x = torch.randn(6, 3, 8, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: _Rotate.apply(x, angles.cos(), angles.sin()), x)
    pairs = torch.view_as_complex(torch.stack([x[..., :4], x[..., 4:]], -1)) * torch.polar(
        torch.ones_like(angles), angles
    )
    expected = torch.cat([pairs.real, pairs.imag], -1)
    torch.testing.assert_close(_Rotate.apply(x, angles.cos(), angles.sin()), expected)
