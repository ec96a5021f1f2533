"""What the commands share: exit codes, the progress bar, room on the disk, a directory that appears complete."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files import durable
from mugrpo_megatron.files.durable import remove_leftovers, resumable, write_json
from mugrpo_megatron.observe.progress import Bar

DTYPES = {"keep": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MEGABYTE = 10**6
RECORD = "conversion.json"
"""What a partial directory is being made from; a later run continues it only if it would make the same."""


def run(name: str, command: Callable[[], None]) -> int:
    """Exit code of a command: 0 done, 2 the user's mistake in one sentence on stderr; anything else is a traceback."""
    torch.set_num_threads(1)  # copies and checksums: more threads gain nothing and cost memory
    try:
        command()
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
    return 0


def advance(bar: Bar, done: int) -> None:
    """Bring a bar that counts megabytes to `done` bytes."""
    bar.advance(done // MEGABYTE - bar.done)


def open_partial(out: Path, recipe: dict[str, Any], needed: int) -> Path:
    """The directory beside `out` that is filled first: a former run's, if that was making the same, else an empty one.

    Raises UserError when `out` exists or the disk has no room for the `needed` bytes.
    """
    if out.exists():
        raise UserError(f"{out} exists already; remove it or name another directory")
    partial = resumable(out)
    record = partial / RECORD
    if not _holds(record, recipe):
        shutil.rmtree(partial, ignore_errors=True)
    present = sum(path.stat().st_size for path in partial.glob("*")) if partial.is_dir() else 0
    parent = out.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if free + present < needed:
        raise UserError(f"{parent} has {free / 1e9:.1f} GB free, {out.name} takes {needed / 1e9:.1f} GB; make room")
    partial.mkdir(exist_ok=True)
    remove_leftovers(partial, "*")
    write_json(record, recipe)
    return partial


def publish(partial: Path, out: Path) -> None:
    """Give the finished directory its name, once everything in it has reached the disk."""
    (partial / RECORD).unlink()
    durable.publish(partial, out)


def _holds(record: Path, recipe: dict[str, Any]) -> bool:
    try:
        return bool(json.loads(record.read_text(encoding="utf-8")) == recipe)
    except (OSError, ValueError):
        return False


def fingerprint(directory: Path) -> dict[str, list[int]]:
    """Size and modification time of every file: whether a source is still what a former run read."""
    files = sorted(path for path in directory.glob("*") if path.is_file())
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
