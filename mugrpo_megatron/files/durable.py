"""Writes files and directories so that they are complete or absent (atomic, with fsync); checksums; checks of output
paths.

Temporaries are named `.NAME.XXXXXXXX.partial` with random hexadecimal digits, by which leftovers of killed writers are
recognised. A directory that several ranks fill, or that a later command continues, has no
random digits: its name is `resumable(path)`.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import resource
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from mugrpo_megatron.errors import NO_ROOM, REFUSALS, UserError
from mugrpo_megatron.files.json_text import parse_json

HASH_BLOCK = 1 << 20
MIN_FREE_BYTES = 1 << 20
"""Free bytes below which a disk counts as full."""
RANDOM_SUFFIX = "[0-9a-f]" * 8
OF_RUST = re.compile(r"\(os error (\d+)\)")
"""Matches the number of a system error in the text of an error of a Rust library, such as safetensors."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Arguments of renameat2(2) on Linux, by which two names are swapped."""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of bytes in a file, with its SHA-256."""

    start: int
    end: int
    sha256: str


class NameTaken(UserError):
    """Raised when an output must not replace a path that somebody has created meanwhile; the output stays under its
    temporary name."""


@contextmanager
def durable_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that replaces `path` at the block's end: temporary file, fsync, rename, fsync of the directory.

    If several processes write `path`, the content of the last one stays. If `path` is a link, the link itself is
    replaced, since somebody else may have made it; a file keeps its permissions. Raises UserError if `path` is not a
    regular file or cannot be written, or if the disk is full.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path} exists and is not a regular file; choose another path")
    temporary = _temporary(path)
    try:
        file = temporary.open("xb")
    except OSError as error:
        raise full_disk_error(error, path) or UserError(
            f"{path} cannot be written ({error.strerror}); choose another path, or make its directory writable"
        ) from error
    try:
        with file:
            if path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if full := full_disk_error(error, path):
            raise full from error
        raise


def open_nofollow(path: Path, mode: str, buffering: int = -1) -> IO[bytes]:
    """Open a file as `open` does, but not through a link, which somebody else may have put into the directory.

    Raises UserError if the file cannot be opened because it is a link, or not a regular file.
    """

    def opener(name: str, flags: int) -> int:
        # O_NONBLOCK, since opening a pipe would wait for a reader.
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    try:
        return cast(IO[bytes], open(path, mode, buffering, opener=opener))
    except OSError:
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise UserError(f"{path} cannot be written: it is a link, or not a regular file; remove it") from None
        raise


def refuse_linked_folders(directory: Path, names: Iterable[str]) -> None:
    """Raise UserError if one of the folders `names` in `directory` is a link to a directory, or has one directly in it.

    Somebody else may have made `directory` with such a link, and a write through the link would leave the directory.
    """
    for folder in (directory / name for name in names):
        for path in (folder, *sorted(folder.iterdir() if folder.is_dir() and not folder.is_symlink() else ())):
            if path.is_symlink() and path.is_dir():
                raise UserError(f"{path} is a link: nothing is written through it; move {path.resolve()} to its place")


@contextmanager
def durable_directory(path: Path, replace: bool = True) -> Iterator[Path]:
    """Yield a temporary directory that replaces `path` at the block's end.

    Raises UserError if the directory cannot be created, if the disk is full, and, without `replace`, if `path` was
    created meanwhile.
    """
    partial = _temporary(path)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise full_disk_error(error, path) or UserError(
            f"{path} cannot be created ({error.strerror}); choose another path, or make its directory writable"
        ) from error
    try:
        yield partial
        publish(partial, path, replace)
    except NameTaken:
        raise
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if full := full_disk_error(error, path):
            raise full from error
        raise


def publish(partial: Path, path: Path, replace: bool = True) -> None:
    """Fsync the finished directory `partial` and rename it to `path`, which it replaces.

    Without `replace` raises UserError if `path` exists, and keeps `partial`.
    """
    for folder, _, names in os.walk(partial):
        for name in names:
            fsync(Path(folder, name))
        fsync(Path(folder))
    if os.path.lexists(path):
        if not replace:
            raise NameTaken(
                f"{path} was created meanwhile; the output is in {partial}: rename {partial.name} as you like"
            )
        _exchange(partial, path)
        fsync(path.parent)
        remove(partial)
    else:
        partial.rename(path)
        fsync(path.parent)


def resumable(path: Path) -> Path:
    """Returns the temporary directory of `path` that several ranks or commands share until `publish` renames it."""
    return path.with_name(f".{path.name}.partial")


def remove_leftovers(directory: Path, names: str) -> None:
    """Remove the temporaries in `directory` that killed writers left, of outputs whose names match the pattern `names`.

    Call it only when no writer of such an output is alive. A directory that an unfinished swap moved aside gets its
    name back, unless the new one has that name already.
    """
    for aside in directory.glob(f".{names}.{RANDOM_SUFFIX}.old"):
        path = directory / aside.name[1 : -len(".XXXXXXXX.old")]
        if os.path.lexists(path):
            remove(aside)
        else:
            aside.rename(path)
    for leftover in directory.glob(f".{names}.{RANDOM_SUFFIX}.partial"):
        remove(leftover)


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` with `text`, atomically."""
    with durable_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Replace the content of `path` with indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_content(path: Path, content: Any) -> None:
    """Replace the content of `path` with bytes, or with a value as JSON, atomically."""
    if not isinstance(content, bytes):
        write_json(path, content)
        return
    with durable_file(path) as file:
        file.write(content)


def write_checksummed_json(path: Path, name: str, body: Any, **head: Any) -> None:
    """Write a JSON value with its SHA-256: {**head, "sha256": ..., NAME: body}."""
    write_text(path, json.dumps({**head, "sha256": _sum(body), name: body}))


def read_checksummed_json(path: Path, name: str, **head: Any) -> Any:
    """Returns the body that `write_checksummed_json` wrote; ValueError if the file is not JSON, or if its checksum or a
    value of `head` differs."""
    stored = parse_json(path.read_bytes())
    try:
        if stored["sha256"] == _sum(stored[name]) and all(stored[key] == value for key, value in head.items()):
            return stored[name]
    except (KeyError, TypeError):
        pass
    raise ValueError(f"{path} is damaged, or is not a file of this format with `{name}` in it")


def fsync(path: Path) -> None:
    """Fsync a file, or a directory's renames and removals."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path, start: int = 0, end: int | None = None) -> Span:
    """Returns the range [start, end) of a file with the SHA-256 of its bytes; by default it ends with the file.

    Reads block by block.
    """
    end = path.stat().st_size if end is None else end
    sha = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        remaining = end - start
        while remaining > 0 and (block := file.read(min(HASH_BLOCK, remaining))):
            sha.update(block)
            remaining -= len(block)
    return Span(start, end, sha.hexdigest())


def _sum(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def remove(path: Path) -> None:
    """Remove a file, a link or a whole directory."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _exchange(new: Path, old: Path) -> None:
    """Swap two names; atomically if the file system can."""
    # NFS cannot swap two names in one step (RENAME_EXCHANGE). There the old directory is first renamed to a third name,
    # from which `remove_leftovers` restores it after a crash.
    if _exchange_atomically(new, old):
        return
    aside = old.with_name(f".{old.name}.{secrets.token_hex(4)}.old")
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        aside.rename(old)
        raise
    aside.rename(new)


def _exchange_atomically(first: Path, second: Path) -> bool:
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(first), os.fsencode(second)
    return bool(renameat2 and renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0)


@contextmanager
def full_disk_as_user_error(path: Path) -> Iterator[None]:
    """Turn the error of a full disk or of a limit of file sizes into UserError; the block writes `path`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if full := full_disk_error(error, path):
            raise full from error
        raise


def full_disk_error(error: BaseException, path: Path) -> UserError | None:
    """Returns a UserError if `error` comes from a full disk or a limit of file sizes, else None."""
    number = _no_room(error, path)
    if number is None:
        return None
    if number == errno.EFBIG:
        return UserError(f"{path} is larger than a file may be; all complete files are kept; {REFUSALS[number]}")
    return UserError(
        f"{path.parent}: no space left for {path.name}; all complete files are kept; "
        "free some space and run the same command again"
    )


def _no_room(error: BaseException, path: Path) -> int | None:
    """The errno of an error, or of one that caused it, if it means that there is no room (NO_ROOM); else None."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in NO_ROOM:
            return cause.errno
        if number := OF_RUST.search(str(cause)):
            if int(number[1]) in NO_ROOM:
                return int(number[1])
        # torch.save's writer in C++ raises errors without errno (caffe2/serialize/inline_container.cc), so look at the
        # free space and at the limit of file sizes instead.
        elif any(name in str(cause) for name in ("inline_container.cc", "iostream error")):
            if _free(path) < MIN_FREE_BYTES:
                return errno.ENOSPC
            if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
                return errno.EFBIG
        cause = cause.__cause__ or cause.__context__
    return None


def _free(path: Path) -> int:
    """Returns the free bytes of the disk of a path that may not exist yet."""
    return shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists())).free


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

    Allowed are a new path in a directory that can be written, and an existing file (or directory) that is the command's
    `own`: the command wrote it earlier, or the user allows it to be replaced. An input is never replaced, whatever link
    (hard or symbolic) leads to it; nor is a device, a pipe, or a file in place of a directory.

    Args:
        label: the user's name of the path, such as `--out out.jsonl`; sentences begin with it.
        remedy: end of the sentence about an existing path that is not the command's own.
    """
    try:
        if not os.path.lexists(path):
            _check_writable(path, label)
            return
        if path.exists() and not KINDS[kind](path):
            raise UserError(
                f"{label} exists and is not a {'regular file' if kind == 'file' else kind}; choose another path"
            )
        for source in inputs:
            if path.exists() and source.exists() and path.samefile(source):
                raise UserError(f"{label} is the input {source} itself; choose another path")
        if not own:
            raise UserError(f"{label} exists already; {remedy}")
        _check_writable(path, label)
    # For example, the name is too long or has a null character, or its links form a loop.
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{label} cannot be written ({reason}); choose another path") from None


def make_directory(path: Path, label: str) -> None:
    """Create a directory and its parents; UserError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{label}: {path} cannot be created ({error.strerror}); choose another path") from None


def _check_writable(path: Path, label: str) -> None:
    """Raise UserError unless the nearest existing parent of `path` can be written."""
    folder = path.resolve().parent
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(f"{label} cannot be written: {folder} is not a directory; choose another path")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{label} cannot be written: {folder} is read-only for this user; choose another path")
