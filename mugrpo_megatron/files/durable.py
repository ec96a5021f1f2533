"""Files that are whole or absent, whatever happens, and checksums that tell whether they still are what was written."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mugrpo_megatron.errors import UserError

HASH_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """A range of a file's bytes and its SHA-256."""

    start: int
    end: int
    sha256: str


@contextmanager
def durable_file(path: Path) -> Iterator[IO[bytes]]:
    """Write `path` whole or not at all: a temporary name, fsync of file and directory, rename.

    Raises UserError when the disk is full.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{path.parent}: no space left for {path.name}; what was complete before is kept, "
                "so free some space and run the same command again"
            ) from error
        raise


def fsync(path: Path) -> None:
    """Make a file's bytes, or the renames and removals in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path, start: int = 0, end: int | None = None) -> Span:
    """Hash the bytes [start, end) of a file, to its end by default, block by block."""
    end = path.stat().st_size if end is None else end
    sha = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        left = end - start
        while left > 0 and (block := file.read(min(HASH_BLOCK, left))):
            sha.update(block)
            left -= len(block)
    return Span(start, end, sha.hexdigest())
