"""Files that an index names: an index is untrusted data, so it may name only files in its own directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError

LONGEST_NAME = 255
"""Bytes; Linux has no longer file names."""


def file_inside(index: Path, name: Any) -> Path:
    """The file `name` in the directory of `index`, which names it.

    Raises UserError when the file is missing, or `name` is not a plain file name: an index could otherwise make a
    command read outside its directory. A link in the directory is followed, as in the hub's cache of snapshots.
    """
    if not _is_plain(name):
        raise UserError(f"{index} names the file {name!r}, but only a file name of its own directory is allowed")
    path = index.parent / str(name)
    if not path.is_file():
        raise UserError(f"{path} is missing, though {index.name} names it")
    return path


def _is_plain(name: Any) -> bool:
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    try:
        encoded = name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return len(encoded) <= LONGEST_NAME and name.isprintable() and not {"/", "\\"} & set(name)
