"""The directory that a conversion writes: it replaces only what a conversion wrote, and continues a stopped one.

A conversion fills `.NAME.partial`. In it, `conversion.json` has the inputs, and each finished data file has a
`FILE.done` with its size and checksum. At the end `conversion.json` lists the checksums of all files, and the directory
gets its name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files import durable
from mugrpo_megatron.files.durable import (
    digest,
    full_disk_as_user_error,
    read_checksummed_json,
    remove_leftovers,
    resumable,
    write_checksummed_json,
)

RECORD = "conversion.json"
DONE = ".done"
MALFORMED = (ValueError, KeyError, TypeError)
"""Errors that reading a note or a record raises if its JSON has other fields, as another version may write them."""


@dataclass(frozen=True)
class Output:
    directory: Path

    def finish(self, file: str, body: Any = None) -> None:
        """Write the note that a data file is complete; `body` is a JSON value about it."""
        span = digest(self.directory / file)
        note = {"bytes": span.end, "sha256": span.sha256, "body": body}
        write_checksummed_json(self.directory / f"{file}{DONE}", "file", note)

    def finished(self, file: str) -> dict[str, Any] | None:
        """Return the note about a data file if the file matches it; otherwise remove both and return None."""
        data, noted = self.directory / file, self.directory / f"{file}{DONE}"
        try:
            note = read_checksummed_json(noted, "file")
            span = digest(data)
            if (span.end, span.sha256) == (note["bytes"], note["sha256"]):
                return dict(note)
        except (OSError, *MALFORMED):
            pass
        durable.remove(data)
        durable.remove(noted)
        return None

    def seal(self) -> None:
        """Complete the output: list the checksums of all files in `conversion.json`, and remove the notes."""
        names = names_below(self.directory) - {RECORD}
        notes = {name for name in names if name.endswith(DONE)}
        known = {
            name.removesuffix(DONE): read_checksummed_json(self.directory / name, "file")["sha256"] for name in notes
        }
        files = {name: known.get(name) or digest(self.directory / name).sha256 for name in sorted(names - notes)}
        write_checksummed_json(self.directory / RECORD, "conversion", {"files": files})
        for name in notes:
            (self.directory / name).unlink()


def names_below(directory: Path) -> set[str]:
    """The names of all files in the directory and the folders in it, as paths relative to the directory."""
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()}


def checked_output(out: Path, inputs: Mapping[str, Path], overwrite: bool) -> Path:
    """Return `out` as an absolute path, after everything was checked that could refuse it at the end.

    inputs: option -> directory. Raises UserError when `out` exists and `overwrite` is false or no conversion wrote it;
    when it is an input, holds one or is inside one; and when it cannot be made.
    """
    out = out.parent.resolve() / out.name if out.name not in ("", "..") else out.resolve()
    for option, path in inputs.items():
        if path.exists() and (_holds(out, path) or _holds(path, out)):
            raise UserError(f"--out {out} and {option} {path} are one directory, or inside one another; name another")
    if os.path.lexists(out):
        if not overwrite:
            raise UserError(f"{out} exists already; remove it, name another directory, or replace it with --overwrite")
        _check_replaceable(out)
    above = _existing(out.parent)
    if not above.is_dir():
        raise UserError(f"{above} is not a directory, so {out} cannot be made; name another directory")
    if not os.access(above, os.W_OK | os.X_OK, effective_ids=True):
        raise UserError(f"{above} cannot be written, so {out} cannot be made; name another directory")
    return out


@contextmanager
def open_output(out: Path, recipe: Mapping[str, Any], needed: int, overwrite: bool) -> Iterator[Output]:
    """Yield the directory to fill, which becomes `out` when the block ends.

    A stopped conversion with the same `recipe` (JSON values) is continued in its directory. Raises UserError when the
    disk has no room for the `needed` bytes or fills up, or when another process writes `out`.
    """
    partial = resumable(out)
    present = sum(path.stat().st_size for path in partial.glob("*")) if partial.is_dir() else 0
    free = shutil.disk_usage(_existing(out.parent)).free
    if free + present < needed:
        raise UserError(
            f"{out.parent} has {free / 1e9:.1f} GB free, {out.name} takes {needed / 1e9:.1f} GB; free some space"
        )
    with full_disk_as_user_error(out):
        partial.mkdir(parents=True, exist_ok=True)
        with _locked(partial, out):
            output = _opened(partial, dict(recipe))
            yield output
            output.seal()
            if os.path.lexists(out) and overwrite:
                _check_replaceable(out)
            durable.publish(partial, out, replace=overwrite)


def _opened(partial: Path, recipe: dict[str, Any]) -> Output:
    remove_leftovers(partial, "*")
    names = {path.name for path in partial.iterdir()}
    if names and RECORD not in names:
        raise UserError(f"{partial} has files that no conversion wrote ({sorted(names)[0]!r}); move them and try again")
    try:
        same = bool(read_checksummed_json(partial / RECORD, "recipe") == recipe)
    except (OSError, ValueError):
        same = False
    if not same:
        for path in sorted(partial.iterdir(), key=lambda path: path.name == RECORD):
            durable.remove(path)
        write_checksummed_json(partial / RECORD, "recipe", recipe)
    return Output(partial)


@contextmanager
def _locked(partial: Path, out: Path) -> Iterator[None]:
    """Hold a lock on the directory during the block; on a file system without locks, do without."""
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise UserError(
                    f"another conversion is writing {out}; wait for it, or name another directory"
                ) from None
        if not partial.exists() or not os.path.samestat(os.fstat(descriptor), partial.stat()):
            raise UserError(f"another conversion has just finished {out}; nothing was written")
        yield
    finally:
        os.close(descriptor)


def converted_files(directory: Path) -> dict[str, str] | None:
    """Name -> SHA-256 of the files that a conversion wrote to the directory; None if it is not the output of one."""
    try:
        return dict(read_checksummed_json(directory / RECORD, "conversion")["files"])
    except (OSError, *MALFORMED):
        return None


def _check_replaceable(out: Path) -> None:
    """Raise UserError unless a conversion wrote every file in `out`."""
    written = converted_files(out)
    if written is None:
        raise UserError(f"{out} is not the output of a conversion, so it is not replaced; remove it yourself")
    if foreign := sorted(names_below(out) - written.keys() - {RECORD}):
        raise UserError(
            f"{out} also holds {foreign[0]!r}, which no conversion wrote; move it, or name another directory"
        )


def _holds(outer: Path, inner: Path) -> bool:
    inner = inner.resolve()
    return outer.exists() and any(path.exists() and path.samefile(outer) for path in (inner, *inner.parents))


def _existing(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    return next(ancestor for ancestor in (path, *path.parents) if os.path.lexists(ancestor))
