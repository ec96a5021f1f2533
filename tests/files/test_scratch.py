"""Temporary directories: what a killed owner left is removed by the next start, and nothing else is."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from pathlib import Path

import pytest

from mugrpo_megatron.files.scratch import MANAGER, MARK, SHARED_MEMORY, Scratch, remove_abandoned


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_removed_at_the_end_and_only_its_user_can_read_it(temporary: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Scratch("agent") as path:
        assert path.parent == temporary
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "deep").mkdir()
    scratch = Scratch("agent")
    scratch.remove()
    scratch.remove()
    assert not list(temporary.iterdir())
    assert len(os.listdir("/proc/self/fd")) == before


def test_others_files_stay(temporary: Path) -> None:
    """A directory without a mark, a file, a link to a marked directory, and one whose owner is alive."""
    (temporary / "mugrpo-my-experiments").mkdir()
    (temporary / "mugrpo-agent-notes").touch()
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / MARK).touch()
    (temporary / "mugrpo-agent-link").symlink_to(elsewhere)
    with Scratch("agent"):
        before = sorted(temporary.iterdir())
        remove_abandoned(temporary)
        assert sorted(temporary.iterdir()) == before
        assert (elsewhere / MARK).exists()


@pytest.mark.parametrize(("kind", "stays"), [("weights", False), ("engine", False), ("program", True)])
def test_shared_memory_goes_with_the_folder_that_names_it(temporary: Path, kind: str, stays: bool) -> None:
    """Only what libraries create there, and only from a folder that no program of others writes to."""
    mine = [Path(f"/dev/shm/{name}_{os.getpid()}_{kind}") for name in ("torch", "psm")]
    others = [temporary / "torch_1", Path(f"/dev/shm/mine_{os.getpid()}_{kind}")]
    traps = ["/dev/shm/torch_/../mine", "/dev/shm/torch_nosuch", "", f"/dev/shm/../..{temporary}/torch_1", "\0"]
    scratch = Scratch(kind)
    try:
        for path in (*mine, *others):
            path.touch()
        (scratch.path / SHARED_MEMORY).write_text("\n".join(map(str, [*others, *traps, *mine])), encoding="utf-8")
        scratch.remove()
        assert [path.exists() for path in mine] == [stays, stays]
        assert all(path.exists() for path in others)
    finally:
        for path in (*mine, *others):
            path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("kind", "name", "stays"),
    [("weights", "torch-shm-dir-x", False), ("program", "torch-shm-dir-x", True), ("weights", "mine", True)],
)
def test_only_a_later_start_removes_the_socket_of_a_manager(kind: str, name: str, stays: bool, short: Path) -> None:
    """At its owner's own end the manager removes it, and a manager whose socket is gone ends with an error."""
    folder = short / name
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(folder / "manager.sock"))
    for _ in range(2):
        scratch = Scratch(kind, parent=str(short))
        (scratch.path / MANAGER).write_text(str(folder / "manager.sock"), encoding="utf-8")
        scratch.remove()
        assert (folder / "manager.sock").is_socket()
    scratch = Scratch(kind, parent=str(short))
    (scratch.path / MANAGER).write_text(str(folder / "manager.sock"), encoding="utf-8")
    os.close(scratch._lock)  # as the kernel does when the owner dies
    remove_abandoned(short)
    assert [path.name for path in short.iterdir()] == [name] * stays


@pytest.mark.process
def test_a_start_removes_what_a_killed_owner_left(temporary: Path) -> None:
    """Only once its owner is dead, whatever is in it; a second start at the same time does no harm."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        owned = Scratch("agent").path
        os.chdir(owned)
        for _ in range(2000):
            os.mkdir("d")
            os.chdir("d")
        os.write(write, b"x")
        signal.pause()
    os.read(read, 1)
    with Scratch("kernels"):
        assert len(list(temporary.iterdir())) == 2
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    starts = []
    for _ in range(3):
        if (start := os.fork()) == 0:
            remove_abandoned(temporary)
            os._exit(0)
        starts.append(start)
    assert all(os.waitpid(start, 0)[1] == 0 for start in starts)
    assert not list(temporary.iterdir())


def test_a_full_disk_leaves_nothing(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(self: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "touch", touch)
    with pytest.raises(OSError, match="No space"):
        Scratch("agent")
    assert not list(temporary.iterdir())
