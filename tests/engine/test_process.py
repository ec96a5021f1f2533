"""A host process before its start, and messages over its socket pair: whole, in order, and no wait without a limit."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.engine import launch, process
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.launch import prelaunch_host
from mugrpo_megatron.engine.process import HEADER, Channel, HostProcess
from mugrpo_megatron.errors import EngineFailure, UserError
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.engine_spec import engine_spec
from tests.engine.tiny import group_processes
from tests.hostile.faults import disk
from tests.patience import PATIENCE_S


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


def test_a_limit_of_file_sizes_is_told_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(path: Path, data: bytes) -> int:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(process.Path, "write_bytes", too_large)
    with pytest.raises(UserError, match=r"cannot be written \(File too large\); raise .*ulimit -f"):
        process._scratch_folder()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [8, 60, 90, 200])
def test_sockets_fit_below_the_folder_for_temporary_files(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long TMPDIR is; where its path allows a socket, it is the user's directory."""
    directory = tmp_path / "/".join(["d" * 40] * (length // 40) + ["e" * max(1, length % 40)])
    directory.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    folder = process._scratch_folder()
    try:
        listener = folder.path / ("x" * (process.LONGEST_SOCKET - 1))
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(str(listener))
        fits = len(str(directory)) + len("/mugrpo-engine-xxxxxxxx") + process.LONGEST_SOCKET <= process.SOCKET_PATH
        assert (folder.path.parent == directory) == fits
        assert list(directory.iterdir()) == ([folder.path] if fits else [])
    finally:
        folder.remove()


def test_the_processes_of_a_group_are_found_without_reading_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine has thousands of processes, whose names and states are files of /proc."""
    asked: list[int] = []
    real = psutil.Process

    def process_of(*number: int) -> psutil.Process:
        asked.extend(number)
        return real(*number)

    monkeypatch.setattr(psutil, "Process", process_of)
    assert len(psutil.pids()) > 1
    states = list(process._group_states(os.getpgid(0)))
    assert any(f"({os.getpid()}) " in state for state in states)
    assert {os.getpgid(number) for number in asked if psutil.pid_exists(number)} == {os.getpgid(0)}
    assert list(process._group_states(2**22 - 1)) == []


def test_no_short_directory_for_sockets_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(process, "SOCKET_PATH", 20)
    monkeypatch.setattr(process, "SHORT_DIRECTORIES", (str(tmp_path / "missing"),))
    with pytest.raises(UserError, match=r"a path of a socket has at most 20 bytes; No such file.*TMPDIR"):
        process._scratch_folder()
    assert list(tmp_path.iterdir()) == []


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
        found = [receiver.receive(PATIENCE_S) for _ in range(2 * len(sizes))]
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
        ends[0].receive(PATIENCE_S)
    with pytest.raises(OSError, match="Broken pipe"):
        ends[0].send(("requests", MORE_THAN_FITS), 600)


@pytest.mark.parametrize("call", ["send", "receive"])
def test_a_wait_is_given_up_when_asked(call: str, ends: tuple[Channel, socket.socket]) -> None:
    def stop() -> None:
        raise InterruptedError("stop")

    channel = ends[0]
    with pytest.raises(InterruptedError, match="stop"):
        channel.send(("", MORE_THAN_FITS), PATIENCE_S, stop) if call == "send" else channel.receive(PATIENCE_S, stop)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize(
    ("cuda", "rank", "local_world", "section"),
    [(True, 0, 1, {}), (False, 1, 2, {"tensor": 2}), (False, 0, 1, {"tensor": 2, "nodes": 2})],
    ids=["the learner loads first", "the rank leads no engine", "the engine waits for other nodes"],
)
def test_there_is_none(
    cuda: bool,
    rank: int,
    local_world: int,
    section: dict[str, int],
    tiny_recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "may_find_cuda", lambda: cuda)
    world = {"RANK": rank, "LOCAL_RANK": rank % local_world, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": local_world}
    for name, value in world.items():
        monkeypatch.setenv(name, str(value))
    recipe = tiny_recipe.model_copy(update={"engine": tiny_recipe.engine.model_copy(update=section)})
    with prelaunch_host(recipe.engine, recipe.model.directory) as host:
        assert host is None


@pytest.mark.process
def test_the_first_start_of_an_engine_takes_it_and_later_ones_do_not(tiny_recipe: Recipe, tmp_path: Path) -> None:
    recipe = tiny_recipe
    with prelaunch_host(recipe.engine, recipe.model.directory) as host:
        assert host
        engine = Engine.start(engine_spec(recipe), recipe.model.directory, tmp_path / "engine.log", prelaunched=host)
        assert engine._host is host
        engine.restart()
        other = engine._host
        assert other
        assert other is not host
        assert group_processes(host.pid) == []
        engine.stop()
        assert group_processes(other.pid) == []
    with prelaunch_host(recipe.engine, recipe.model.directory) as unused:
        assert unused
        assert psutil.pid_exists(unused.pid)
    assert group_processes(unused.pid) == []
    assert not psutil.pid_exists(unused.pid)
    unused.end()


@pytest.mark.process
def test_what_it_said_before_it_had_a_log_is_in_the_log(tmp_path: Path) -> None:
    """SGLang cannot be imported, and the process ends before it is told what to load."""
    broken = tmp_path / "broken" / "sglang"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("print('half way'); raise OSError('libnuma is missing')\n", encoding="utf-8")
    host = HostProcess({**os.environ, "PYTHONPATH": str(broken.parent)}, cuda=False)
    host._process.wait()
    log = tmp_path / "logs" / "engine.log"
    host.load([{}], log, lambda: False)
    with pytest.raises(EngineFailure, match=r"OSError: libnuma is missing"):
        host.receive(60, "start")
    assert "half way" in log.read_text(encoding="utf-8")
    assert "Traceback" in log.read_text(encoding="utf-8")
