"""Checks of output paths: a command replaces its own files, and other files only with an option."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from mugrpo_megatron.errors import UserError

KINDS = {"file": Path.is_file, "directory": Path.is_dir}


def check_output(
    path: Path,
    label: str,
    *,
    kind: Literal["file", "directory"] = "file",
    own: bool = False,
    inputs: Iterable[Path] = (),
    remedy: str = "choose another path",
) -> None:
    """Raise UserError, before any work is done, when a command must not write `path`.

    A new path in a writable directory is allowed, and an existing file (or directory) that is the command's `own`: it
    wrote it, or was allowed to replace it. An input is never replaced, through whatever hard or symbolic link; nor is a
    device, a pipe, or a file in place of a directory.

    Args:
        label: the user's name of the path, such as `--out out.jsonl`; sentences begin with it.
        remedy: end of the sentence about an existing path that is not the command's own.
    """
    try:
        if not os.path.lexists(path):
            _check_writable(path, label)
            return
        if path.exists() and not KINDS[kind](path):
            raise UserError(f"{label} exists and is not a {'regular file' if kind == 'file' else kind}")
        for source in inputs:
            if path.exists() and source.exists() and path.samefile(source):
                raise UserError(f"{label} is the input {source} itself; choose another path")
        if not own:
            raise UserError(f"{label} exists already; {remedy}")
        _check_writable(path, label)
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a null character, a loop of links
        raise UserError(f"{label} cannot be written ({getattr(error, 'strerror', None) or error})") from None


def make_directory(path: Path, label: str) -> None:
    """Create a directory and its parents; UserError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{label}: {path} cannot be created ({error.strerror})") from None


def _check_writable(path: Path, label: str) -> None:
    """Raise UserError unless the nearest existing parent of `path` can be written."""
    folder = path.resolve().parent
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(f"{label} cannot be written: {folder} is not a directory")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{label} cannot be written: {folder} is read-only for this user")
