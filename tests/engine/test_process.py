"""A host process before its start, and messages over its socket pair: whole, in order, and no wait without a limit."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.engine.process import HEADER, Channel, HostProcess
from mugrpo_megatron.errors import UserError
from tests.hostile.places import disk


def test_a_full_disk_of_temporary_files_is_told_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder can still be made there, so that SGLang would put its files elsewhere."""
    with disk(tmp_path / "small", 1 << 16) as small:
        (small / "fill").write_bytes(bytes((1 << 16) - 4096))
        monkeypatch.setattr(tempfile, "tempdir", str(small))
        with pytest.raises(UserError, match=f"written to {small} .*No space left on device.*TMPDIR"):
            HostProcess(dict(os.environ), cuda=False)
        assert [path.name for path in small.iterdir()] == ["fill"]


def test_no_directory_for_temporary_files_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    with pytest.raises(UserError, match=r"No usable temporary directory found.*TMPDIR"):
        HostProcess(dict(os.environ), cuda=False)


MORE_THAN_FITS = b"x" * (16 << 20)
BRIEF_S = 0.02


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel and the bare other end."""
    mine, other = socket.socketpair()
    with mine, other:
        yield Channel(mine), other


@settings(max_examples=20)
@given(sizes=st.lists(st.integers(0, 300_000), max_size=8))
def test_messages_of_two_threads_arrive_whole(sizes: list[int]) -> None:
    mine, other = socket.socketpair()
    with mine, other:
        sender, receiver = Channel(mine), Channel(other)

        def send(name: str) -> None:
            for place, size in enumerate(sizes):
                sender.send((name, (place, bytes(size))))

        threads = [threading.Thread(target=send, args=[name]) for name in "ab"]
        for thread in threads:
            thread.start()
        found = [receiver.receive(600) for _ in range(2 * len(sizes))]
        for thread in threads:
            thread.join()
    for name in "ab":
        assert [value for kind, value in found if kind == name] == [(n, bytes(size)) for n, size in enumerate(sizes)]


def test_an_end_that_reads_nothing(ends: tuple[Channel, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        ends[0].send(("requests", MORE_THAN_FITS), BRIEF_S)


@pytest.mark.parametrize("sent", [0, 3, HEADER.size, HEADER.size + 5])
def test_an_end_that_falls_silent_before_and_in_a_message(sent: int, ends: tuple[Channel, socket.socket]) -> None:
    content = pickle.dumps(("groups", 1))
    ends[1].send((HEADER.pack(len(content)) + content)[:sent])
    with pytest.raises(TimeoutError):
        ends[0].receive(BRIEF_S)


@pytest.mark.parametrize("sent", [b"", HEADER.pack(10) + b"xx"])
def test_an_end_that_is_closed(sent: bytes, ends: tuple[Channel, socket.socket]) -> None:
    ends[1].send(sent)
    ends[1].close()
    with pytest.raises(EOFError):
        ends[0].receive(600)
    with pytest.raises(OSError, match="Broken pipe"):
        ends[0].send(("requests", MORE_THAN_FITS), 600)


@pytest.mark.parametrize("call", ["send", "receive"])
def test_a_wait_is_given_up_when_asked(call: str, ends: tuple[Channel, socket.socket]) -> None:
    def stop() -> None:
        raise InterruptedError("stop")

    channel = ends[0]
    with pytest.raises(InterruptedError, match="stop"):
        channel.send(("", MORE_THAN_FITS), 600, stop) if call == "send" else channel.receive(600, stop)
