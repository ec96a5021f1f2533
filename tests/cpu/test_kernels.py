"""The compiled functions of decoding against torch's operations; `tests/engine` has an engine without them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import rms_norm, silu

from mugrpo_megatron.cpu import kernels as cpu_kernels
from mugrpo_megatron.cpu.batched_attention import attend, plan
from mugrpo_megatron.cpu.kernels import Build, Kernels, fits, use_large_pages
from mugrpo_megatron.cpu.sampler import LARGE_VOCABULARY, OTHER_SAMPLING, OTHER_SETTINGS, use_sampling

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
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=40)
def test_decoding_is_the_attention_of_the_batched_path(
    kernels: Kernels, lengths: list[int], heads: tuple[int, int], width: int, size: float, dtype: torch.dtype
) -> None:
    query_heads, kv_heads = heads
    generator = torch.Generator().manual_seed(sum(lengths))
    keys, values = torch.randn(2, 900, kv_heads, width, generator=generator).to(dtype)
    fused = (size * torch.randn(len(lengths), 3, query_heads, width, generator=generator)).to(dtype)
    query = fused[:, 1]  # rows are not next to each other, as in a fused projection
    requests = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
    slots = torch.randint(0, 900, (len(lengths) + 2, 100), generator=generator, dtype=torch.int32)
    key_lengths = torch.tensor(lengths)
    assert fits(query, keys, values)
    result = kernels.decode(query, keys, values, slots, requests, key_lengths, 0.2)
    batches = plan(slots, requests, torch.ones_like(key_lengths), key_lengths)
    expected = attend(query.float(), keys.float(), values.float(), batches, 0.2)
    assert result.dtype == dtype
    rounding = 0.0 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(result.float(), expected, atol=1e-5 * max(1.0, size), rtol=1e-4 + rounding)


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
    assert fits(query.bfloat16(), keys.bfloat16(), keys.bfloat16())
    assert not fits(query, keys.bfloat16(), keys.bfloat16())
    assert not fits(query.half(), keys.half(), keys.half())
    assert not fits(query, keys, torch.zeros(9, 2, 5))
    assert not fits(query.transpose(0, 1), keys, keys)
    assert not fits(query, keys.transpose(0, 1), keys.transpose(0, 1))


@pytest.mark.parametrize("elements", [0, 1000, 3 << 20])
def test_asking_for_large_pages_changes_no_number(elements: int) -> None:
    numbers = torch.arange(elements, dtype=torch.float32)
    before = numbers.clone()
    use_large_pages(numbers)
    assert torch.equal(numbers, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_functions_between_products(kernels: Kernels, threads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(threads)
    x, residual, weight = torch.randn(37, 48).to(dtype), torch.randn(37, 48).to(dtype), torch.randn(48).to(dtype)
    torch.testing.assert_close(kernels.rms_norm(x, None, weight, 1e-6), rms_norm(x, (48,), weight, 1e-6))
    summed = x + residual
    torch.testing.assert_close(kernels.rms_norm(x, residual, weight, 1e-6), rms_norm(summed, (48,), weight, 1e-6))
    assert torch.equal(residual, summed)

    gated = torch.cat([torch.tensor([[0.0, -200.0, 200.0, -87.5, 87.5, -1.0]]).repeat(37, 1), torch.randn(37, 6)], 1)
    gated = gated.to(dtype)
    torch.testing.assert_close(kernels.silu_and_mul(gated), silu(gated[:, :6]) * gated[:, 6:])

    angles = torch.randn(100, 4)
    cache, positions = torch.cat([angles.cos(), angles.sin()], 1).to(dtype), torch.randint(0, 100, (37,))
    rotated = x.clone()[:, 8:40]
    kernels.rotate(rotated, 8, cache, positions)
    a, b = x[:, 8:40].view(37, 4, 2, 4).unbind(2)
    cosine, sine = cache[positions].view(37, 2, 1, 4).unbind(1)
    expected = torch.stack([a * cosine - b * sine, b * cosine + a * sine], 2).view(37, 32)
    tolerance = 1e-6 if dtype == torch.float32 else 0.0
    torch.testing.assert_close(rotated, expected, atol=tolerance, rtol=tolerance)


def test_bfloat16_is_rounded_as_torch_rounds(kernels: Kernels) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32)
    sums = ((bits << 16) + torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)).view(torch.float32)
    upper = sums.bfloat16()
    lower = (sums - upper.float()).bfloat16()
    residual = upper.clone()[None]
    kernels.rms_norm(lower[None].clone(), residual, torch.ones_like(upper), 1e-6)
    torch.testing.assert_close(residual[0], upper + lower, atol=0, rtol=0, equal_nan=True)


@given(width=st.integers(1, 1500), size=st.sampled_from([0.0, 1.0, 40.0]), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_a_token_is_drawn_from_the_softmax(kernels: Kernels, width: int, size: float, seed: int) -> None:
    torch.manual_seed(seed)
    logits, temperatures = size * torch.randn(5, width), torch.rand(5, 1) + 0.5
    logits[0, 1:] = -torch.inf
    state = torch.get_rng_state()
    tokens, logprobs = kernels.sample(logits.clone(), temperatures)
    torch.set_rng_state(state)
    drawn = torch.rand(5, dtype=torch.float64)
    table = (logits.double() / temperatures).log_softmax(-1)
    probability = table.exp()
    above = probability.cumsum(-1).gather(1, tokens.long()[:, None])[:, 0]
    below = above - probability.gather(1, tokens.long()[:, None])[:, 0]
    assert ((below <= drawn + 1e-6) & (drawn <= above + 1e-6)).all()
    torch.testing.assert_close(logprobs.double(), table.gather(1, tokens.long()[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    assert tokens[0] == 0


def test_what_is_not_a_number_stays_visible(kernels: Kernels) -> None:
    x = torch.full((2, 16), torch.nan)
    assert kernels.rms_norm(x, None, torch.ones(16), 1e-6).isnan().all()
    assert kernels.silu_and_mul(x).isnan().all()
    slots, ones = torch.zeros(2, 4, dtype=torch.int32), torch.ones(2, dtype=torch.long)
    result = kernels.decode(x.view(2, 1, 16), torch.ones(3, 1, 16), torch.ones(3, 1, 16), slots, ones - 1, ones, 1.0)
    assert result.isnan().all()
    narrow = x.bfloat16()
    assert kernels.silu_and_mul(narrow).isnan().all()
    tokens, logprobs = kernels.sample(x, torch.ones(2, 1))
    assert tokens.tolist() == [0, 0]
    assert logprobs.isnan().all()


PLAIN = dict.fromkeys(OTHER_SAMPLING, False) | {"sampling_seed": None, "grammars": None}


@pytest.mark.parametrize(
    ("info", "width", "arguments", "drawn"),
    [
        ({}, LARGE_VOCABULARY, ([0, 0], [None, None]), True),
        ({}, LARGE_VOCABULARY - 1, ([0, 0], [None, None]), False),
        ({}, LARGE_VOCABULARY, ([0, 2], [None, None]), False),
        ({}, LARGE_VOCABULARY, ([0, 0], [None, [5]]), False),
        *(({name: True}, LARGE_VOCABULARY, ([0, 0], [None, None]), False) for name in OTHER_SAMPLING),
        *(({name: torch.ones(2)}, LARGE_VOCABULARY, ([0, 0], [None, None]), False) for name in OTHER_SETTINGS),
    ],
)
def test_only_the_whole_softmax_is_sampled_by_a_kernel(
    kernels: Kernels, info: dict[str, Any], width: int, arguments: tuple[Any, Any], drawn: bool
) -> None:
    sampler = SimpleNamespace(forward=lambda *_, **__: "SGLang's")
    use_sampling(sampler, kernels)
    output = SimpleNamespace(next_token_logits=torch.zeros(2, width), next_token_logprobs=None)
    settings = SimpleNamespace(**PLAIN | info, temperatures=torch.ones(2, 1))
    tokens = sampler.forward(output, settings, True, *arguments, torch.zeros(2))
    assert (tokens == "SGLang's") is not drawn
    if drawn:
        torch.testing.assert_close(output.next_token_logprobs, torch.full((2,), -math.log(width)))


@pytest.mark.parametrize(
    ("compilers", "cause"), [((), "no C compiler"), (("false",), "ended with 1"), (("true",), "cannot be loaded")]
)
def test_without_a_library_the_log_says_why(
    compilers: tuple[str, ...], cause: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_kernels, "COMPILERS", compilers)
    assert Build().wait() is None
    assert cause in capsys.readouterr().err


def test_a_compiler_that_builds_something_else_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends with 0, and its own temporary files are where ours are removed."""
    compiler = tmp_path / "compiler"
    script = f'#!/bin/sh\necho "$TMPDIR" > {tmp_path}/said\nfor out in "$@"; do case $out in *.so) break;; esac; done\n'
    compiler.write_text(script + 'echo "int x;" | cc -shared -xc - -o "$out"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(cpu_kernels, "COMPILERS", (str(compiler),))
    assert Build().wait() is None
    assert "cannot be loaded" in capsys.readouterr().err
    folder = Path((tmp_path / "said").read_text().strip())
    assert folder.name.startswith("mugrpo-kernels-")
    assert not folder.exists()


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
