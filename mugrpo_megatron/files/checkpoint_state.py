"""Reads and writes `state.json` of a checkpoint: the run's position, the model, and the checksums of the other
files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files import durable
from mugrpo_megatron.files.durable import digest, read_checksummed_json, write_checksummed_json
from mugrpo_megatron.files.json_text import file_inside

STATE = "state.json"
"""Name of the file that is written last: a directory that has it is a complete checkpoint."""


Count = Annotated[int, Field(ge=0)]


@with_config(ConfigDict(strict=True, extra="forbid"))
class SavedCursor(TypedDict):
    stage: Count
    age: Count
    updates: Count
    repeated: NotRequired[Count]
    """`Cursor.repeated`: updates that used no new responses. Absent in checkpoints from before `schedule.epochs`, where
    it is 0."""
    nats: NotRequired[Annotated[float, Field(ge=0, allow_inf_nan=False)]]
    """`Cursor.nats`: how far the policy has moved in this stage, in nats a response. Absent in checkpoints from before
    `schedule.max_kl`, where it is 0."""


@with_config(ConfigDict(strict=True))
class Saved(TypedDict):
    run: NotRequired[str]
    """Id of the run that saved the checkpoint; a converted checkpoint has no id, and no run continues from it."""
    cursor: SavedCursor
    updates_done: Count
    steps_done: Count
    loss_scaler: NotRequired[dict[str, float]]
    """State of the loss scaler of a float16 learner; empty or absent otherwise."""
    model: dict[str, str | int]
    files: dict[str, str]
    """Name -> SHA-256 of every other file."""


SAVED, CURSOR = TypeAdapter(Saved), TypeAdapter(SavedCursor)


def file_checksums(directory: Path, rank: int, world: int) -> dict[str, str]:
    """Returns file name -> SHA-256 for this rank's share of the directory's files, without `state.json`. The shares of
    `world` ranks cover all of them."""
    files = sorted(path for path in directory.iterdir() if path.name != STATE)
    return {path.name: digest(path).sha256 for path in files[rank::world]}


def publish(partial: Path, directory: Path, state: Mapping[str, Any]) -> None:
    """Write `state` into the finished directory `partial` and rename that to `directory`, durably.

    `state["files"]` has the checksums that all ranks computed (`file_checksums`).
    """
    files: Mapping[str, str] = state["files"]
    # On a shared file system a file may become visible late, after the ranks shared out the files: it gets its
    # checksum here, since a file without one would count as damage.
    unlisted = sorted(path for path in partial.iterdir() if path.name not in {*files, STATE})
    late = {path.name: digest(path).sha256 for path in unlisted}
    write_checksummed_json(partial / STATE, "state", {**state, "files": {**files, **late}})
    durable.publish(partial, directory)


def read_state(directory: Path) -> Saved:
    """Returns the state of a complete checkpoint; UserError if it is missing or damaged."""
    path = directory / STATE
    if not path.is_file():
        raise UserError(
            f"{directory} is not a complete checkpoint: it has no {STATE}; use an older one or start a new run"
        )
    try:
        return SAVED.validate_python(read_checksummed_json(path, "state"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); use an older checkpoint") from None
    except ValidationError as error:
        field = ".".join(map(str, error.errors()[0]["loc"])) or "state"
        raise UserError(f"{path} is damaged: {field} is missing or wrong; use an older checkpoint") from None
    except ValueError:
        raise UserError(
            f"{path} is damaged: it is not JSON, or its checksum does not match; use an older checkpoint"
        ) from None


def first_damage(directory: Path, rank: int, world: int) -> str | None:
    """Returns a sentence about the first damage that is found in a checkpoint; None if none is found.

    Checked are the state, this rank's share of the files among `world` ranks, and the index of the tensors.
    """
    from mugrpo_megatron.files.torch_dist import INDEX, read_index  # imports torch

    try:
        listed = read_state(directory)["files"]
        for name in sorted(listed)[rank::world]:
            path = file_inside(directory / STATE, name)
            if digest(path).sha256 != listed[name]:
                return f"{path} is damaged: its checksum does not match"
        tensors = read_index(directory)
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"{directory} cannot be read ({error.strerror})"
    needed = {INDEX, *(chunk.file for tensor in tensors.values() for chunk in tensor.chunks)}
    if unknown := sorted(needed - listed.keys()):
        return f"{directory / STATE} has no checksum of {unknown[0]}"
    return None


def create_empty_directory(partial: Path, needed: int) -> None:
    """Create `partial`, or empty it; UserError if its disk has fewer than `needed` bytes free."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    free = shutil.disk_usage(partial).free
    if free < needed:
        partial.rmdir()
        raise UserError(
            f"{partial.parent}: a checkpoint takes about {needed / 2**20:,.1f} MiB and {free / 2**20:,.1f} MiB are "
            "free; free some space or move run.dir, then run the same command again to resume"
        )
