"""Where a stage has to come from, and which weights `hf/` has.

RUN_DIR/hf/mugrpo.json    {"run": ..., "cursor": ...}: the run, and where in it these weights are from
"""

from __future__ import annotations

from pydantic import ValidationError

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.checkpoint_state import CURSOR
from mugrpo_megatron.files.json_text import read_json
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.record import MARK, Record
from mugrpo_megatron.stages.manifest import Origin, read_manifest


def stage_origin(directory: RunDirectory, record: Record, cursor: Cursor) -> Origin:
    """Where the stage at which the cursor stands has to come from: the weights at its start sample it.

    A branch takes its first stage as it was sampled.
    """
    start, run = cursor.updates - cursor.age, record.run_of_stage(cursor.stage)
    branched = record.branch is not None and record.branch.stage == cursor.stage
    if branched:
        manifest = read_manifest(directory.stage(cursor.stage))
        origin = manifest.origin if manifest.sealed else None
        if origin and (origin.run, origin.stage) == (run, cursor.stage) and origin.updates <= start:
            return origin
    return Origin(run, cursor.stage, start)


def hf_cursor(directory: RunDirectory, record: Record) -> Cursor | None:
    """Where the weights in `hf/` are from; None where there is no `hf/`. UserError when it says nothing of this run."""
    path = directory.hf / MARK
    try:
        mark = read_json(path)
    except UserError:
        if not directory.hf.exists():  # none yet, or for the moment of a swap on a file system that cannot swap
            return None
        mark = read_json(path)  # that moment may have passed between the two looks
    try:
        if mark.get("run") == record.id:
            return Cursor(**CURSOR.validate_python(mark.get("cursor")))
    except ValidationError:
        pass
    raise UserError(
        f"{path} does not say at which update of this run its weights are; write hf/ with `mugrpo optimize`"
    )
