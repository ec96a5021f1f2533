"""What the commands share: exit codes, progress, the check for disk space, output directories that appear complete."""

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
"""The inputs of a partial directory; a later run continues it only if its own are the same."""


def run(name: str, command: Callable[[], None]) -> int:
    """Run a command; returns its exit code: 0 done, 2 for an error in the input, with one sentence on stderr."""
    torch.set_num_threads(1)  # copies and checksums: more threads gain nothing and cost memory
    try:
        command()
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    return 0


def advance(bar: Bar, done: int) -> None:
    """Set a bar that counts megabytes to `done` bytes."""
    bar.advance(done // MEGABYTE - bar.done)


def open_partial(out: Path, recipe: dict[str, Any], needed: int) -> Path:
    """The directory next to `out` to write first: an earlier run's with the same inputs, else an empty one.

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
        raise UserError(
            f"{parent} has {free / 1e9:.1f} GB free, {out.name} takes {needed / 1e9:.1f} GB; free some space"
        )
    partial.mkdir(exist_ok=True)
    remove_leftovers(partial, "*")
    write_json(record, recipe)
    return partial


def publish(partial: Path, out: Path) -> None:
    """Rename the finished directory to `out`, once all its files are on disk."""
    (partial / RECORD).unlink()
    durable.publish(partial, out)


def _holds(record: Path, recipe: dict[str, Any]) -> bool:
    try:
        return bool(json.loads(record.read_text(encoding="utf-8")) == recipe)
    except (OSError, ValueError):
        return False


def fingerprint(directory: Path) -> dict[str, list[int]]:
    """Size and modification time of every file, to tell whether a source has changed since an earlier run."""
    files = sorted(path for path in directory.glob("*") if path.is_file())
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
