"""Temporary directories that do not outlive their process for long: a later start removes what killed processes left.

The process that made a directory holds a lock on it (flock(2)), which the kernel releases when the process dies. After
locking it writes a mark into the directory. So a directory with a mark and without a lock has no living owner, and one
without a mark is somebody else's.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX, MARK = "mugrpo-", ".mugrpo-scratch"
SHARED_MEMORY = "shared-memory"
"""File in a scratch directory with the paths in /dev/shm that its owner has created, one a line: these paths are
removed with the directory."""
OF_LIBRARIES = re.compile(r"/dev/shm/(?:(?:torch|sgl_shm|sglang|psm)_|sem\.mp-)[\w.-]+")
"""Matches the paths in /dev/shm of torch, SGLang and multiprocessing. No other path is removed."""
MANAGER = "manager"
"""File in a scratch directory with the path of a socket: that of the process in which torch manages the shared memory
of the directory's owner. While that process lives, only it may remove the socket: it would end with an error if the
socket were gone."""
OF_MANAGERS = re.compile(r"/.+/torch-shm-dir-\w+/manager\.sock")
"""Matches the path of such a socket."""
WITH_SHARED_MEMORY = ("engine", "weights")
"""Kinds of scratch directories with which the paths in SHARED_MEMORY and MANAGER are removed. In other kinds a program
of a user or a model may have written these files, so they are ignored."""
SOCKET_PATH = 107
"""Most bytes of a socket's path on Linux (unix(7))."""
SHORT_DIRECTORIES = ("/tmp", "/var/tmp", "/dev/shm")
"""Parents of a socket's folder that are tried if the path of TMPDIR is too long."""


class Scratch:
    """A new directory that only this user can read; as a context manager it is removed at the block's end."""

    def __init__(self, kind: str, sweep: bool = True, parent: str | None = None) -> None:
        """Create `mugrpo-KIND-...` in `parent`, by default in the system's directory for temporary files.

        With `sweep`, first remove the directories of any kind there whose owners have died. Raises OSError if the new
        directory cannot be created.
        """
        if sweep:
            remove_abandoned(Path(parent or tempfile.gettempdir()))
        self.path, self._lock = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-", dir=parent)), -1
        try:
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # on a file system without locks; there `remove_abandoned` removes nothing
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.path / MARK).touch()
        except OSError:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the directory with its content and, for kinds in WITH_SHARED_MEMORY, the shared memory that it lists.

        Idempotent.
        """
        _remove_with_shared_memory(self.path)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def remove_abandoned(parent: Path) -> None:
    """Remove this user's `Scratch` directories in `parent` whose owner has died."""
    with suppress(OSError):
        for path in parent.glob(f"{PREFIX}*-*"):
            with suppress(OSError):  # its owner lives, another process is removing it, or its file system has no locks
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(directory).st_uid != os.geteuid() or not (path / MARK).is_file():
            return
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_socket_of_manager(path)
        _remove_with_shared_memory(path)
    finally:
        os.close(directory)


def _remove_socket_of_manager(path: Path) -> None:
    with suppress(OSError):  # its owner had no manager, or the manager is just removing the socket
        name = (path / MANAGER).read_text(encoding="utf-8")
        if _may_name_others(path) and OF_MANAGERS.fullmatch(name) and (socket := Path(name)).is_socket():
            socket.unlink()
            socket.parent.rmdir()


def _remove_with_shared_memory(path: Path) -> None:
    if _may_name_others(path):
        with suppress(OSError):  # its owner has shared no memory, so there is no list
            for name in (path / SHARED_MEMORY).read_text(encoding="utf-8").splitlines():
                if OF_LIBRARIES.fullmatch(name):
                    Path(name).unlink(missing_ok=True)
    remove_tree(path)


def _may_name_others(path: Path) -> bool:
    """Whether files outside a scratch directory that it lists are to be removed with it; its kind decides."""
    return path.name.startswith(tuple(f"{PREFIX}{kind}-" for kind in WITH_SHARED_MEMORY))


def remove_tree(directory: str | Path) -> None:
    """Remove a directory, even if programs have nested folders in it deeper than Python can recurse."""
    with suppress(RecursionError):
        shutil.rmtree(directory, ignore_errors=True)
    if os.path.lexists(directory):
        subprocess.run(["rm", "-rf", "--", directory], stderr=subprocess.DEVNULL, check=False)
