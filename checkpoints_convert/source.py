"""The checksums that a Megatron checkpoint has of itself, compared before its data is used."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from checkpoints_convert.command import MEGABYTE, advance
from checkpoints_convert.output import RECORD, converted_files
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import digest
from mugrpo_megatron.files.hf_config import STATE, read_state
from mugrpo_megatron.observe.progress import open_display


def check_sums(directory: Path, files: Collection[str]) -> None:
    """Compare the `files` that are read with the checksums of a training checkpoint or of a conversion's output.

    Raises UserError when one differs or has none. A checkpoint of other Megatron code has no checksums at all.
    """
    where, known = _checksums(directory)
    if known is None:
        return
    paths = {name: directory / name for name in sorted(files)}
    total = sum(path.stat().st_size for path in paths.values())
    done = 0
    with open_display() as display, display.bar("checksums", total // MEGABYTE, "MB") as bar:
        for name, path in paths.items():
            if name not in known:
                raise UserError(f"{where} has no checksum of {name}, so {directory} is damaged")
            if digest(path).sha256 != known[name]:
                raise UserError(f"{path} is damaged: its checksum is not that of {where.name}")
            advance(bar, done := done + path.stat().st_size)


def _checksums(directory: Path) -> tuple[Path, dict[str, str] | None]:
    """The file with the checksums, and them."""
    if (directory / STATE).exists():
        return directory / STATE, read_state(directory)["files"]
    record = directory / RECORD
    known = converted_files(directory)
    if known is None and record.exists():
        raise UserError(f"{record} is damaged, so the other files of {directory} cannot be checked; convert it again")
    return record, known
