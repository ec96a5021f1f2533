"""The host's commands on an engine that does as told, and its guard. SGLang is in test_client and test_faults."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mugrpo_megatron.engine import host
from mugrpo_megatron.engine.engine_group import Replicas
from mugrpo_megatron.engine.host import GenerateCommand, Host, first_cause, start_guard
from mugrpo_megatron.engine.process import Channel
from mugrpo_megatron.engine.wire import Request, Sampling, sampling_seeds
from mugrpo_megatron.files.scratch import SHARED_MEMORY
from mugrpo_megatron.samples import Response
from tests.engine.stub import StubEngine, record_commands
from tests.engine.tiny import group_processes
from tests.forked import fork
from tests.patience import PATIENCE_S

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=9, stop_ids=())


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), Channel(theirs)


@contextmanager
def generating(engine: StubEngine, ends: tuple[Channel, Channel], sampling: Sampling = SAMPLING) -> Iterator[Channel]:
    """The client's end of a generation in a thread; the block has to close it."""
    client, theirs = ends
    generation = GenerateCommand(Replicas([engine]), theirs, sampling, version=4)
    thread = threading.Thread(target=engine.loop.run_until_complete, args=[generation.run()])
    thread.start()
    yield client
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.process
@pytest.mark.parametrize("module", [host.__name__, "run_scripts.dev.bench.ten"])
def test_a_spawned_scheduler_does_not_find_megatron(module: str) -> None:
    """`multiprocessing` runs the parent's main module again in a process that it spawns, as `__mp_main__`."""
    code = f"import runpy, sys; runpy.run_module({module!r}, run_name='__mp_main__'); " + (
        "assert sys.modules['megatron'] is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_memory_is_not_released_before_the_engine_is_idle(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    record_commands(monkeypatch)
    engine = StubEngine(busy=2)
    served = Host(Replicas([engine]), ends[1])
    with pytest.raises(RuntimeError, match="not idle after 600 s: pending requests"):
        served.execute("sleep", ["weights"])
    with pytest.raises(RuntimeError, match="not idle"):
        served.execute("set_version", 3)
    assert engine.released == []
    assert served._version == 0, "keys and values of the old weights may be left"
    served.execute("sleep", ["weights"])
    assert engine.released == [["weights"]]


def test_the_client_hears_of_tokens_before_a_group_is_finished(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "PROGRESS_SECONDS", 0.01)
    engine = StubEngine()
    with generating(engine, ends) as client:
        client.send(("requests", [Request(0, [1, 2], 2)]))
        for tokens in (50, 100):
            engine.rid_to_state["one"].output_ids = [7] * tokens
            kind, load = client.receive(PATIENCE_S)
            assert (kind, load.tokens, load.running, load.queued, load.kv_use) == ("progress", tokens, 5, 2, 0.25)
        engine.rid_to_state.clear()
        engine.loop.call_soon_threadsafe(engine.answers.set)
        kind, groups = client.receive(PATIENCE_S)
        while kind == "progress":
            kind, groups = client.receive(PATIENCE_S)
        [(key, responses)] = groups.unpack()
        assert (key, [response.ids.tolist() for response in responses]) == (0, [[7] * 3] * 2)
        client.send(("close", None))


def test_a_group_that_cannot_be_sent_ends_the_generation_with_its_cause(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although another request would go on for hours."""

    def refuse(*arguments: object) -> None:
        raise ValueError("3 log-probabilities of 4 tokens")

    class Slow(StubEngine):
        async def async_generate(self, input_ids: list[list[int]], **named: Any) -> list[dict[str, Any]]:
            if input_ids == [[9]]:
                await asyncio.Event().wait()
            return await super().async_generate(input_ids, **named)

    monkeypatch.setattr(host, "pack", refuse)
    engine = Slow()
    engine.answers.set()
    generation = GenerateCommand(Replicas([engine]), ends[1], SAMPLING, version=4)
    monkeypatch.setattr(generation, "_read", lambda loop: None)
    generation._inbox.put_nowait(("requests", [Request(0, [9], 1), Request(1, [1], 1)]))
    with pytest.raises(ExceptionGroup) as raised:
        engine.loop.run_until_complete(asyncio.wait_for(generation.run(), PATIENCE_S))
    assert str(first_cause(raised.value)) == "3 log-probabilities of 4 tokens"


@pytest.mark.parametrize("value", [None, math.nan, -math.inf])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_group_with_a_logprob_that_is_no_number_is_sampled_again(
    value: float | None, times: int, ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage with one could never be trained on; the other groups are not asked for again."""
    asked: list[list[int]] = []

    class Unsound(StubEngine):
        async def async_generate(self, input_ids: list[list[int]], **named: Any) -> list[dict[str, Any]]:
            outputs = await super().async_generate(input_ids, **named)
            asked.append(input_ids[0])
            if input_ids[0] == [9] and asked.count([9]) <= times:
                outputs[-1]["meta_info"]["output_token_logprobs"][-1] = (value, 7, None)
            return outputs

    engine = Unsound()
    engine.answers.set()
    if times == host.MOST_ANSWERS:
        generation = GenerateCommand(Replicas([engine]), ends[1], SAMPLING, version=4)
        monkeypatch.setattr(generation, "_read", lambda loop: None)
        generation._inbox.put_nowait(("requests", [Request(0, [9], 2)]))
        with pytest.raises(ExceptionGroup) as raised:
            engine.loop.run_until_complete(asyncio.wait_for(generation.run(), PATIENCE_S))
        assert "3 times in a row a prompt of 1 tokens got log-probabilities" in str(first_cause(raised.value))
        return
    with generating(engine, ends) as client:
        client.send(("requests", [Request(0, [9], 2), Request(1, [1], 2)]))
        groups: dict[int, list[Response]] = {}
        while len(groups) < 2:
            kind, packed = client.receive(PATIENCE_S)
            groups |= dict(packed.unpack()) if kind == "groups" else {}
        client.send(("close", None))
    assert (asked.count([9]), asked.count([1])) == (times + 1, 1)
    assert all(np.isfinite(response.logprobs).all() for group in groups.values() for response in group)


def _end_with_a_guard(scratch: Path) -> None:
    os.setsid()
    tempfile.tempdir = str(scratch.with_name("elsewhere"))  # as where the disk of `scratch` is full
    guard = start_guard(str(scratch))
    assert psutil.Process().children() == [], "SGLang kills every child of the host when it ends by itself"
    os._exit(guard.closed)


@pytest.mark.process
def test_the_guard_removes_what_the_host_leaves(tmp_path: Path) -> None:
    scratch, shared, elsewhere = tmp_path / "scratch", tmp_path / "a name", tmp_path / "elsewhere"
    scratch.mkdir()
    elsewhere.mkdir()
    shared.touch()
    (scratch / SHARED_MEMORY).write_text(f"{shared}\n{tmp_path / 'gone'}\n")
    process = fork(_end_with_a_guard, scratch)
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    _, alive = psutil.wait_procs(group_processes(process.pid), timeout=PATIENCE_S)
    assert alive == []
    assert list(tmp_path.iterdir()) == [elsewhere], "it removes its own folder and no other"


def test_each_response_has_its_own_seed_where_there_is_a_stream(ends: tuple[Channel, Channel]) -> None:
    engine = StubEngine()
    engine.answers.set()
    work = Request(0, [1, 2], 2, seed_key=5)
    with generating(engine, ends, replace(SAMPLING, stream="0/train")) as client:
        client.send(("requests", [work]))
        assert client.receive(PATIENCE_S)[0] == "groups"
        client.send(("close", None))
    asked = engine.asked[0]["sampling_params"]
    assert [one["sampling_seed"] for one in asked] == sampling_seeds("0/train", 4, work)
    assert {one["max_new_tokens"] for one in asked} == {SAMPLING.max_tokens}


def test_a_prompt_may_have_a_limit_and_stop_texts_of_its_own(ends: tuple[Channel, Channel]) -> None:
    engine = StubEngine()
    engine.answers.set()
    with generating(engine, ends, replace(SAMPLING, stop=("a",))) as client:
        client.send(("requests", [Request(0, [1], 1, max_tokens=3, stop=("b",)), Request(1, [1], 1)]))
        assert client.receive(PATIENCE_S)[0] == "groups"
        client.send(("close", None))
    limited, plain = (one["sampling_params"] for one in engine.asked)
    assert (limited["max_new_tokens"], limited["stop"]) == (3, ["a", "b"])
    assert (plain["max_new_tokens"], plain["stop"]) == (SAMPLING.max_tokens, ["a"])
    assert "sampling_seed" not in plain
