"""Pickles that run something when they are loaded freely, and checkpoints that hold them."""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from mugrpo_megatron.files.checkpoint_state import STATE, publish, read_state
from mugrpo_megatron.files.durable import digest

TORCH = "torch.distributed.checkpoint"


class Evil:
    """Makes the directory `marker` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def text(value: str | Path) -> bytes:
    encoded = str(value).encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded  # BINUNICODE


def calling(module: str, name: str, marker: Path) -> bytes:
    """Protocol 4, whose STACK_GLOBAL follows the dots of a name."""
    return b"\x80\x04" + text(module) + text(name) + b"\x93" + text(marker) + b"\x85R."


INDEXES: dict[str, Callable[[Path], bytes]] = {
    "a dotted name": lambda marker: calling(f"{TORCH}.filesystem", "os.mkdir", marker),
    "a dotted name in the metadata": lambda marker: calling(f"{TORCH}.metadata", "os.mkdir", marker),
    "a dotted name of torch": lambda marker: calling("torch", "os.mkdir", marker),
    "a dotted name of the layouts": lambda marker: calling("torch.serialization", "os.mkdir", marker),
    "a method of an allowed class": lambda marker: (
        b"\x80\x04" + text("pathlib") + text("PosixPath.mkdir") + b"\x93"
        + text("pathlib") + text("PosixPath") + b"\x93" + text(marker) + b"\x85R\x85R."
    ),
    "another module": lambda marker: calling("posix", "mkdir", marker),
    "a builtin": lambda marker: calling("builtins", "eval", Path(f"__import__('os').mkdir({str(marker)!r})")),
    "GLOBAL": lambda marker: b"cposix\nmkdir\n" + text(marker) + b"\x85R.",
    "INST": lambda marker: b"(" + text(marker) + b"iposix\nmkdir\n.",
    "OBJ": lambda marker: b"(cposix\nmkdir\n" + text(marker) + b"o.",
    "inside an index": lambda marker: pickle.dumps(Metadata({}, Evil(marker), {})),
    "as a tensor of an index": lambda marker: pickle.dumps(Metadata(cast(Any, {"a": Evil(marker)}), None, {})),
}  # fmt: skip
"""Contents of `.metadata` that make a marker."""


def saved_object(marker: Path) -> bytes:
    """What Megatron stores for an object, with an evil one."""
    stream = io.BytesIO()
    torch.save([Evil(marker)], stream)
    return stream.getvalue()


def saved_in_the_old_format(marker: Path) -> bytes:
    stream = io.BytesIO()
    torch.save([Evil(marker)], stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


ITEMS: dict[str, Callable[[Path], bytes]] = {
    "torch.save": saved_object,
    "torch.save's old format": saved_in_the_old_format,
    "a bare pickle": lambda marker: pickle.dumps(Evil(marker)),
}
"""Items of a data file that make a marker."""


def with_index(checkpoint: Path, index: bytes) -> None:
    (checkpoint / ".metadata").write_bytes(index)
    sign(checkpoint)


def with_items(checkpoint: Path, item: bytes, of_tensors: bool, declared: bool) -> None:
    """Point items of a checkpoint to `item`: those of its tensors, or those of its objects.

    `declared`: the index says that the tensors are objects; otherwise it stays as it is, but for the places.
    """
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    file = checkpoint / "__0_0.distcp"
    place = _StorageInfo(file.name, file.stat().st_size, len(item))
    with file.open("ab") as stream:
        stream.write(item)
    for index in list(metadata.storage_data):
        if (index.offset is not None) == of_tensors:
            metadata.storage_data[index] = place
            if declared:
                metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
                metadata.storage_data[MetadataIndex(index.fqn)] = place
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(checkpoint)


def sign(checkpoint: Path) -> None:
    """Make the checksums of a checkpoint fit again, or remove them, as anyone who edits one can."""
    (checkpoint / "conversion.json").unlink(missing_ok=True)
    if not (checkpoint / STATE).exists():
        return
    state: Any = read_state(checkpoint)
    state["files"] = {name: digest(checkpoint / name).sha256 for name in state["files"]}
    publish(checkpoint, checkpoint.with_name(f"{checkpoint.name}-signed"), state)
    checkpoint.with_name(f"{checkpoint.name}-signed").rename(checkpoint)


def with_common(checkpoint: Path, item: bytes) -> None:
    (checkpoint / "common.pt").write_bytes(item)
    sign(checkpoint)


def attacks(marker: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Every way to put code into a checkpoint: a name, and what it does to a copy of one."""
    for name, index in INDEXES.items():
        yield f"index: {name}", partial(with_index, index=index(marker))
    for name, item in ITEMS.items():
        yield f"object: {name}", partial(with_items, item=item(marker), of_tensors=False, declared=False)
        yield f"tensor: {name}", partial(with_items, item=item(marker), of_tensors=True, declared=False)
        yield f"declared: {name}", partial(with_items, item=item(marker), of_tensors=True, declared=True)
    yield "common.pt", partial(with_common, item=saved_object(marker))


HARMLESS = ("object", "common")
"""Attacks on what is never read: such a checkpoint is loaded, without them."""
