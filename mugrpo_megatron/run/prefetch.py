"""`schedule.prefetch`: which weights sample a stage, when it is sampled while the learner still trains on the last one.

    RUN_DIR/hf/mugrpo.json    {"run": ..., "cursor": ..., "samples": ...}

`cursor` is where the weights in hf/ are from. `samples`, where it is there, is the start of the stage that they sample
`schedule.prefetch` updates early. Such a stage is *offered*: other processes generate it, and the learner waits for it.
A stage that is not offered is sampled with the weights at its start, as without prefetch.

Neither torch nor Megatron is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import CURSOR
from mugrpo_megatron.files.json_text import read_json
from mugrpo_megatron.recipe.sections import ScheduleSection
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.record import MARK, Record
from mugrpo_megatron.stages.manifest import Origin, origins


@dataclass(frozen=True, slots=True)
class Mark:
    """What the weights in `hf/` are."""

    cursor: Cursor
    """Where they are from."""
    samples: Cursor | None
    """The start of the stage that they sample, if it is offered."""


def read_mark(directory: RunDirectory, record: Record) -> Mark | None:
    """The mark of `hf/`; None where there is no `hf/`. UserError when it says nothing of this run."""
    path = directory.hf / MARK
    try:
        found = read_json(path)
    except UserError:
        if not directory.hf.exists():  # none yet, or for the moment of a swap on a file system that cannot swap
            return None
        found = read_json(path)  # that moment may have passed between the two looks
    samples = found.get("samples")
    try:
        if found.get("run") == record.id:
            return Mark(_cursor(found.get("cursor")), None if samples is None else _cursor(samples))
    except ValidationError:
        pass
    raise UserError(
        f"{path} does not say at which update of this run its weights are; write hf/ with `mugrpo optimize`"
    )


def _cursor(found: object) -> Cursor:
    return Cursor(**CURSOR.validate_python(found))


def stage_origin(directory: RunDirectory, record: Record, cursor: Cursor, schedule: ScheduleSection) -> Origin:
    """Where the stage at which the cursor stands has to come from.

    Its responses are of the weights at its start, or, with `schedule.prefetch`, of those that were offered for it: what
    is on disk of the stage says which, before that the mark. A branch takes its first stage as it was sampled.
    """
    start, run = cursor.updates - cursor.age, record.of_stage(cursor.stage)
    branched = record.branch is not None and record.branch.stage == cursor.stage
    earliest = 0 if branched else max(0, start - schedule.prefetch)
    if earliest < start:
        for found in _told(directory, record, cursor.stage):
            if (found.run, found.stage) == (run, cursor.stage) and earliest <= found.updates <= start:
                return found
    return Origin(run, cursor.stage, start)


def _told(directory: RunDirectory, record: Record, stage: int) -> Iterator[Origin]:
    """What the stage's files say of its origin, and then what the mark says."""
    yield from origins(directory.stage(stage))
    mark = read_mark(directory, record)
    if mark and mark.samples and mark.samples.stage == stage:
        yield Origin(record.id, stage, mark.cursor.updates)
