"""The compiled functions of decoding against torch's operations; `tests/engine` has an engine without them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import rms_norm, silu

from mugrpo_megatron.cpu import kernels as cpu_kernels
from mugrpo_megatron.cpu.batched_attention import attend, plan
from mugrpo_megatron.cpu.kernels import Build, Kernels, fits, use_large_pages

HEADS = [(1, 1), (8, 8), (4, 2), (6, 1), (14, 2)]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    library = Build().wait()
    assert isinstance(library, ctypes.CDLL)
    return Kernels(library)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """torch's threads; two share every call."""
    monkeypatch.setattr(cpu_kernels, "SHARED_WORK", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=9),
    heads=st.sampled_from(HEADS),
    width=st.sampled_from([5, 16, 48, 64, 128]),
    size=st.sampled_from([0.1, 1.0, 30.0]),
)
@settings(max_examples=40)
def test_decoding_is_the_attention_of_the_batched_path(
    kernels: Kernels, lengths: list[int], heads: tuple[int, int], width: int, size: float
) -> None:
    query_heads, kv_heads = heads
    generator = torch.Generator().manual_seed(sum(lengths))
    keys, values = torch.randn(2, 900, kv_heads, width, generator=generator)
    fused = size * torch.randn(len(lengths), 3, query_heads, width, generator=generator)
    query = fused[:, 1]  # rows are not next to each other, as in a fused projection
    requests = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
    slots = torch.randint(0, 900, (len(lengths) + 2, 100), generator=generator, dtype=torch.int32)
    key_lengths = torch.tensor(lengths)
    assert fits(query, keys, values)
    result = kernels.decode(query, keys, values, slots, requests, key_lengths, 0.2)
    expected = attend(query, keys, values, plan(slots, requests, torch.ones_like(key_lengths), key_lengths), 0.2)
    torch.testing.assert_close(result, expected, atol=1e-5 * max(1.0, size), rtol=1e-4)


def test_threads_that_share_a_call_compute_the_same_bits(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 300, 2, 16, generator=generator)
    query = torch.randn(31, 4, 16, generator=generator)
    slots = torch.randint(0, 300, (31, 90), generator=generator, dtype=torch.int32)
    lengths = torch.randint(1, 90, (31,), generator=generator)
    before, result = torch.get_num_threads(), []
    for threads, shared_from in [(1, 0), (3, 0), (3, 1 << 40)]:
        torch.set_num_threads(threads)
        monkeypatch.setattr(cpu_kernels, "SHARED_WORK", shared_from)
        result.append(kernels.decode(query, keys, values, slots, torch.arange(31), lengths, 0.25))
    torch.set_num_threads(before)
    assert torch.equal(result[0], result[1])
    assert torch.equal(result[0], result[2])


def test_other_types_and_layouts_do_not_fit() -> None:
    query, keys = torch.zeros(3, 4, 8), torch.zeros(9, 2, 8)
    assert fits(query, keys, keys)
    assert not fits(query.bfloat16(), keys.bfloat16(), keys.bfloat16())
    assert not fits(query, keys, torch.zeros(9, 2, 5))
    assert not fits(query.transpose(0, 1), keys, keys)
    assert not fits(query, keys.transpose(0, 1), keys.transpose(0, 1))


@pytest.mark.parametrize("elements", [0, 1000, 3 << 20])
def test_asking_for_large_pages_changes_no_number(elements: int) -> None:
    numbers = torch.arange(elements, dtype=torch.float32)
    before = numbers.clone()
    use_large_pages(numbers)
    assert torch.equal(numbers, before)


def test_the_functions_between_products(kernels: Kernels, threads: int) -> None:
    torch.manual_seed(threads)
    x, residual, weight = torch.randn(37, 48), torch.randn(37, 48), torch.randn(48)
    torch.testing.assert_close(kernels.rms_norm(x, None, weight, 1e-6), rms_norm(x, (48,), weight, 1e-6))
    summed = x + residual
    torch.testing.assert_close(kernels.rms_norm(x, residual, weight, 1e-6), rms_norm(summed, (48,), weight, 1e-6))
    assert torch.equal(residual, summed)

    gated = torch.cat([torch.tensor([[0.0, -200.0, 200.0, -87.5, 87.5, -1.0]]).repeat(37, 1), torch.randn(37, 6)], 1)
    torch.testing.assert_close(kernels.silu_and_mul(gated), silu(gated[:, :6]) * gated[:, 6:])

    angles = torch.randn(100, 4)
    cache, positions = torch.cat([angles.cos(), angles.sin()], 1), torch.randint(0, 100, (37,))
    rotated = x.clone()[:, 8:40]
    kernels.rotate(rotated, 8, cache, positions)
    a, b = x[:, 8:40].view(37, 4, 2, 4).unbind(2)
    cosine, sine = angles[positions].cos()[:, None], angles[positions].sin()[:, None]
    expected = torch.stack([a * cosine - b * sine, b * cosine + a * sine], 2)
    torch.testing.assert_close(rotated, expected.view(37, 32))


def test_what_is_not_a_number_stays_visible(kernels: Kernels) -> None:
    x = torch.full((2, 16), torch.nan)
    assert kernels.rms_norm(x, None, torch.ones(16), 1e-6).isnan().all()
    assert kernels.silu_and_mul(x).isnan().all()
    slots, ones = torch.zeros(2, 4, dtype=torch.int32), torch.ones(2, dtype=torch.long)
    result = kernels.decode(x.view(2, 1, 16), torch.ones(3, 1, 16), torch.ones(3, 1, 16), slots, ones - 1, ones, 1.0)
    assert result.isnan().all()


@pytest.mark.parametrize(
    ("compilers", "cause"), [((), "no C compiler"), (("false",), "ended with 1"), (("true",), "cannot be loaded")]
)
def test_without_a_library_the_log_says_why(
    compilers: tuple[str, ...], cause: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_kernels, "COMPILERS", compilers)
    assert Build().wait() is None
    assert cause in capsys.readouterr().err


def test_a_compiler_without_openmp_builds_functions_of_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-fopenmp*) exit 3;; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(cpu_kernels, "COMPILERS", (str(compiler),))
    library = Build().wait()
    assert isinstance(library, ctypes.CDLL)
    x = torch.randn(37, 48)
    torch.testing.assert_close(Kernels(library).silu_and_mul(x), silu(x[:, :24]) * x[:, 24:])
