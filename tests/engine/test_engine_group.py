"""Several engines of one host: who gets which requests, and what goes to all. Real ones are in test_replicas."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mugrpo_megatron.engine import engine_group as groups
from mugrpo_megatron.engine.engine_group import Replicas, read_sums, write_sums
from mugrpo_megatron.files.tensors import tensor_checksums
from tests.engine.stub import StubEngine, record_commands


def test_requests_go_to_the_engine_with_the_fewest() -> None:
    engines = [StubEngine(), StubEngine()]
    group = Replicas(engines)

    async def ask() -> None:
        sizes = (4, 1, 1, 3)  # the second engine has fewer until the last one comes
        asked = [asyncio.create_task(group.generate([[7]] * size, rid=None)) for size in sizes]
        await asyncio.sleep(0)
        assert [[len(one["input_ids"]) for one in engine.asked] for engine in engines] == [[4], [1, 1, 3]]
        engines[1].answers.set()
        await asyncio.gather(*asked[1:])
        later = asyncio.create_task(group.generate([[7]], rid=None))
        await asyncio.sleep(0)
        assert len(engines[1].asked) == 4, "what it has answered does not count"
        engines[0].answers.set()
        await asyncio.gather(asked[0], later)

    group.run(ask())


def test_an_aborted_request_counts_no_more() -> None:
    engines = [StubEngine(), StubEngine()]
    group = Replicas(engines)

    async def ask() -> None:
        asked = asyncio.create_task(group.generate([[7]] * 9, rid=None))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        again = asyncio.create_task(group.generate([[7]], rid=None))
        await asyncio.sleep(0)
        assert [len(engine.asked) for engine in engines] == [2, 0]
        group.abort()
        [output] = await again
        assert output["meta_info"]["finish_reason"]["type"] == "abort"
        assert engines[1].reason == "abort"

    group.run(ask())


def test_what_all_engines_have_or_do(monkeypatch: pytest.MonkeyPatch) -> None:
    record_commands(monkeypatch)
    engines = [StubEngine(), StubEngine(busy=1)]
    engines[1].rid_to_state = {"two": SimpleNamespace(output_ids=[])}
    group = Replicas(engines)
    assert set(group.states) == {"one", "two"}
    load = group.run(group.load(70))
    assert (load.tokens, load.running, load.queued, load.kv_use) == (70, 10, 4, 0.25)
    with pytest.raises(RuntimeError, match="not idle after 600 s: pending requests"):
        group.flush_cache()
    group.flush_cache()
    group.release(["weights"])
    assert [engine.released for engine in engines] == [[["weights"]]] * 2


@pytest.mark.parametrize("differs", [False, True])
def test_replicas_that_hold_other_weights_are_an_error(differs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = [{"norm": ("float32", "00")}], [{"norm": ("float32", "01" if differs else "00")}]
    found = iter([own, other])

    async def asked(engine: object, serialized: list[bytes], load_format: str) -> None:
        assert (len(serialized), load_format) == (1, groups.SUMMING)

    async def nothing(engine: object) -> None: ...

    for name, function in {"begin_update": nothing, "update_weights": asked, "end_update": nothing}.items():
        monkeypatch.setattr(groups.sglang_compat, name, function)
    monkeypatch.setattr(groups, "read_sums", lambda: next(found))
    group = Replicas([StubEngine(), StubEngine()])
    if not differs:
        assert group.checksums() == own
        return
    with pytest.raises(RuntimeError, match="replicas hold different weights"):
        group.checksums()


def test_a_sync_is_one_update_of_many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 0.5.15 SGLang takes no bucket before an update has begun; a model is whole when it has ended."""
    calls: list[str] = []

    def recorded(name: str) -> Callable[..., Awaitable[None]]:
        async def call(engine: object, *_: object) -> None:
            calls.append(name)

        return call

    for name in ("begin_update", "update_weights", "end_update"):
        monkeypatch.setattr(groups.sglang_compat, name, recorded(name))
    engine: Any = StubEngine()
    engine.server_args.custom_weight_loader = []
    group = Replicas([engine])
    for _ in range(2):
        group.update_weights([b""])
        group.update_weights([b""])
        group.end_update()
        group.end_update()
    assert calls == ["begin_update", "update_weights", "update_weights", "end_update"] * 2


def test_scales_that_sglang_does_not_check_are_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed", SimpleNamespace(get_tp_group=lambda: alone))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    model = torch.nn.Linear(3, 2)
    wanted = tensor_checksums(model.named_parameters())
    scale = torch.nn.Parameter(torch.ones(()), requires_grad=False)
    model.k_scale = scale
    write_sums(model, [])
    assert read_sums()[0].keys() == {*wanted, "k_scale"}
    scale._skip_weight_check = True  # type: ignore[attr-defined]
    write_sums(model, [])
    assert read_sums() == [wanted]
