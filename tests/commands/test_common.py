"""What several commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from mugrpo_megatron.commands import common
from mugrpo_megatron.observe.environment import bfloat16_products
from mugrpo_megatron.recipe import load_recipe


@pytest.mark.parametrize(
    ("cpuinfo", "flag"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16\n", "avx512_bf16"),
        ("flags: avx512_bf16 amx_bf16\n", "amx_bf16"),
        ("Features\t: fp asimd bf16\n", "bf16"),
        ("flags: avx2 avx512f\nbugs: bf16\n", ""),
        (None, ""),
    ],
)
def test_the_dtype_follows_the_cores(
    cpuinfo: str | None, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, unless the recipe names one."""
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(cpuinfo)
    assert bfloat16_products(file) == flag
    monkeypatch.setattr(common, "bfloat16_products", lambda: flag)
    monkeypatch.setattr(common, "may_find_cuda", lambda: False)
    lines: list[str] = []
    dtype = common.with_dtype(load_recipe(None).model, lines.append).dtype
    assert dtype == ("bfloat16" if flag else "float32")
    assert lines == [f"model.dtype = {dtype}: these cores " + (f"have {flag}" if flag else "do not multiply bfloat16")]
    for named in ("float32", "bfloat16", "float16"):
        assert common.with_dtype(load_recipe(None, [f"model.dtype={named}"]).model, lines.append).dtype == named
    monkeypatch.setattr(common, "may_find_cuda", lambda: True)
    assert common.with_dtype(load_recipe(None).model, lines.append).dtype == "bfloat16"
    assert len(lines) == 1
