"""The files of a checkpoint: checksums, the marker that completes it, and an index that may name nothing foreign.

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
"""What the index may name, in torch and beside it, and nothing else: a pickle is not to run foreign code."""


def checksums(directory: Path, rank: int, world: int) -> dict[str, str]:
    """File name -> SHA-256 of the files that fall to `rank` of `world`; all ranks together cover every file."""
    files = sorted(path for path in directory.iterdir() if path.name != STATE)
    return {path.name: digest(path).sha256 for path in files[rank::world]}


def publish(partial: Path, directory: Path, state: dict[str, Any]) -> None:
    """Complete the files in `partial` with their state and give them their name; durable when this returns."""
    write_sealed(partial / STATE, "state", state)
    durable.publish(partial, directory)


def read_state(directory: Path) -> dict[str, Any]:
    """The state of a complete checkpoint; UserError when there is none or it is damaged."""
    path = directory / STATE
    if not path.is_file():
        raise UserError(f"{directory} is no complete checkpoint: it has no {STATE}; take an older one or start afresh")
    try:
        return dict(read_sealed(path, "state"))
    except ValueError:
        raise UserError(f"{path}: damaged, its checksum does not fit; take an older checkpoint") from None


def damage(directory: Path, rank: int, world: int) -> str | None:
    """What is wrong with the files of a checkpoint that fall to `rank` of `world`; None when they are unharmed."""
    try:
        written = read_state(directory)["files"]
    except UserError as error:
        return str(error)
    for name in sorted(written)[rank::world]:
        path = directory / name
        if not path.is_file():
            return f"{path}: missing"
        if digest(path).sha256 != written[name]:
            return f"{path}: damaged, its checksum does not fit"
    try:
        read_index(directory)  # Megatron loads it as it stands
    except UserError as error:
        return str(error)
    return None


def read_index(directory: Path) -> Any:
    """The index (torch.distributed.checkpoint's Metadata), which is a pickle: names outside torch's own are refused.

    Raises UserError when it is absent, damaged, or names anything else.
    """
    path = directory / INDEX
    if not path.is_file():
        raise UserError(f"{directory} is no Megatron distributed checkpoint: it has no {INDEX}")
    try:
        return _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(f"{path} is damaged or no checkpoint metadata ({error})") from error


def make_room(partial: Path, needed: int) -> None:
    """An empty directory to write to; UserError when its disk has less than `needed` bytes free."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    free = shutil.disk_usage(partial).free
    if free < needed:
        partial.rmdir()
        raise UserError(
            f"{partial.parent}: a checkpoint takes about {needed / 2**30:.1f} GiB but {free / 2**30:.1f} GiB are free; "
            "make room or move run.dir, then start the same command again to resume"
        )


class _IndexUnpickler(pickle.Unpickler):
    """Knows the classes of checkpoint metadata alone."""

    def find_class(self, module: str, name: str) -> Any:
        of_torch = module == "torch" and isinstance(getattr(torch, name, None), PICKLED_OBJECTS)
        if of_torch or module in PICKLED_MODULES or (module, name) in PICKLED_NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")
