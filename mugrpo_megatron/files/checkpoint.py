"""The files of a checkpoint: checksums, the file that marks it complete, and safe unpickling of its index.

metadata.json, common.pt, .metadata, __R_0.distcp   Megatron's `torch_dist` format, one data file a rank
state.json                                          counters, cursor, model, checksums of all the others
"""

from __future__ import annotations

import io
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files import durable
from mugrpo_megatron.files.durable import digest, read_sealed, write_sealed

STATE = "state.json"
"""Written last, so a directory that has it is complete."""
INDEX = ".metadata"

PICKLED_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "megatron.core.dist_checkpointing.mapping",
    "megatron.core.dist_checkpointing.strategies.torch",
)
PICKLED_NAMES = (("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"))
PICKLED_OBJECTS = (type, torch.dtype, torch.layout)
"""All that the index may name: a pickle must not run foreign code."""


def checksums(directory: Path, rank: int, world: int) -> dict[str, str]:
    """File name -> SHA-256 of the files assigned to `rank` of `world`; all ranks together cover every file."""
    files = sorted(path for path in directory.iterdir() if path.name != STATE)
    return {path.name: digest(path).sha256 for path in files[rank::world]}


def publish(partial: Path, directory: Path, state: dict[str, Any]) -> None:
    """Write the state into `partial` and rename it to `directory`; durable when this returns."""
    write_sealed(partial / STATE, "state", state)
    durable.publish(partial, directory)


def read_state(directory: Path) -> dict[str, Any]:
    """The state of a complete checkpoint; UserError when it is missing or damaged."""
    path = directory / STATE
    if not path.is_file():
        raise UserError(
            f"{directory} is not a complete checkpoint: it has no {STATE}; use an older one or start a new run"
        )
    try:
        return dict(read_sealed(path, "state"))
    except ValueError:
        raise UserError(f"{path} is damaged: its checksum does not match; use an older checkpoint") from None


def damage(directory: Path, rank: int, world: int) -> str | None:
    """What is wrong with the files of a checkpoint assigned to `rank` of `world`; None if nothing is."""
    try:
        written = read_state(directory)["files"]
    except UserError as error:
        return str(error)
    for name in sorted(written)[rank::world]:
        path = directory / name
        if not path.is_file():
            return f"{path} is missing"
        if digest(path).sha256 != written[name]:
            return f"{path} is damaged: its checksum does not match"
    try:
        read_index(directory)  # Megatron will unpickle it without these checks
    except UserError as error:
        return str(error)
    return None


def read_index(directory: Path) -> Any:
    """The index (torch.distributed.checkpoint's Metadata), unpickled with only the classes of its format.

    Raises UserError when it is absent, damaged, or names any other class.
    """
    path = directory / INDEX
    if not path.is_file():
        raise UserError(f"{directory} is not a Megatron distributed checkpoint: it has no {INDEX}")
    try:
        return _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(f"{path} is damaged or not checkpoint metadata ({error})") from error


def make_room(partial: Path, needed: int) -> None:
    """Make `partial` an empty directory; UserError when its disk has less than `needed` bytes free."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    free = shutil.disk_usage(partial).free
    if free < needed:
        partial.rmdir()
        raise UserError(
            f"{partial.parent}: a checkpoint takes about {needed / 2**30:.1f} GiB but {free / 2**30:.1f} GiB are free; "
            "free some space or move run.dir, then run the same command again to resume"
        )


class _IndexUnpickler(pickle.Unpickler):
    """Loads only the classes of checkpoint metadata."""

    def find_class(self, module: str, name: str) -> Any:
        of_torch = module == "torch" and isinstance(getattr(torch, name, None), PICKLED_OBJECTS)
        if of_torch or module in PICKLED_MODULES or (module, name) in PICKLED_NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")
