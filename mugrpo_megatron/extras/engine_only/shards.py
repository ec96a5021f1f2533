"""How processes that share only the run directory begin a stage, divide it into shards, and seal it.

    RUN_DIR/hf/mugrpo.json               run and cursor of the weights in hf/ (run/directory.py)
    stages/00003/shard-0002.json         the weights and problems of shard 1 of 4
    stages/00003/manifest-0002.json ...  its groups on disk, as for any writer of the stage

Neither torch's process groups nor Megatron are needed here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from mugrpo_megatron.data.prepare import Problems
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.checkpoint_state import STATE
from mugrpo_megatron.files.durable import read_checksummed_json, refuse_linked_folders, write_checksummed_json
from mugrpo_megatron.observe.progress import Display, open_display
from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.recipe.policy import ModelSection
from mugrpo_megatron.recipe.sections import ScheduleSection
from mugrpo_megatron.run.cursor import CHECKPOINTS, Cursor, checkpoint_name
from mugrpo_megatron.run.directory import (
    FOLDERS,
    InUse,
    RunDirectory,
    check_directory,
    file_lock,
    hf_cursor,
    open_directory,
)
from mugrpo_megatron.run.initial_model import with_model
from mugrpo_megatron.run.inputs import problem_sums as problems_fingerprint
from mugrpo_megatron.run.inputs import record_data
from mugrpo_megatron.run.record import RunRecord, read_record
from mugrpo_megatron.run.stopping import StopRequest, handle_signals
from mugrpo_megatron.stages.manifest import OTHER_MANIFESTS, Origin, check_stage
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.weights.families import fingerprint

SHARD = re.compile(r"(\d{1,4})/(\d{1,4})")
CLAIM_SECONDS = 600.0
"""Seconds that a process waits at most while another one makes the run directory."""


@dataclass(frozen=True, slots=True)
class GenerationShard:
    """Shard `number` of `of`: of a stage's groups, numbers `number`, `number + of`, `number + 2 * of` and so on."""

    number: int
    of: int

    @property
    def writer(self) -> int:
        """Writer number in the stage's store; writer 0 is the one that seals."""
        return self.number + 1

    def groups(self, count: int) -> set[int]:
        """The numbers of the shard's groups in a stage of `count` groups."""
        # Interleaved, not contiguous: every shard sees the same mixture of problems, so all end at about the same time.
        return set(range(self.number, count, self.of))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def parse_shard(text: str) -> GenerationShard:
    """Parse `I/N` with I from 0; raise UserError for anything else."""
    match = SHARD.fullmatch(text)
    if not match or not int(match[1]) < int(match[2]):
        raise UserError(f"--shard {text}: write it as I/N, with I from 0 to N - 1, as in --shard 0/4")
    return GenerationShard(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class NextStage:
    """The stage that a run generates next, and the weights that sample it."""

    record: RunRecord
    cursor: Cursor
    """The cursor at the start of the stage."""
    weights: Path
    directory: Path
    """Directory of the stage's files."""

    @property
    def origin(self) -> Origin:
        return Origin(self.record.run_of_stage(self.cursor.stage), self.cursor.stage, self.cursor.updates)


def next_stage(directory: RunDirectory, model: ModelSection, schedule: ScheduleSection) -> NextStage:
    """The stage that the run generates next; a run without `hf/` and without checkpoints begins with `model.path`.

    Raises UserError when there is no run, when it has taken all of its updates, and when `hf/` lacks the run's current
    weights.
    """
    record = read_record(directory.path)
    if record is None:
        raise UserError(f"{directory.path} holds no run; the first `mugrpo generate` with a recipe makes it")
    complete = sorted(path.parent.name for path in directory.checkpoints.glob(f"{CHECKPOINTS}/{STATE}"))
    cursor, weights = hf_cursor(directory, record), directory.hf
    newest = complete[-1] if complete else checkpoint_name(Cursor())
    if newest > checkpoint_name(cursor or Cursor()) or (cursor and cursor.age):
        raise UserError(
            f"{directory.path} is at {newest}, and its hf/ holds {checkpoint_name(cursor) if cursor else 'nothing'}: "
            "finish the stage with `mugrpo optimize`, which writes the weights at its end to hf/"
        )
    if cursor is None:
        cursor, weights = Cursor(), model.directory
    if cursor.finished(schedule):
        raise UserError(
            f"{directory.path} has taken all of its {cursor.updates} updates; a larger schedule.stages continues it"
        )
    return NextStage(record, cursor, weights, directory.stage(cursor.stage))


def begin(recipe: Recipe, problems: Problems) -> NextStage:
    """Return the stage that the run generates next; make the run directory if it is missing.

    Any number of processes may call it at once. Raises UserError when the directory belongs to another run, or to a run
    with other training problems, when another process holds its lock for too long, and as `next_stage` does.
    """
    deadline = time.monotonic() + CLAIM_SECONDS
    while True:
        try:
            with open_directory(recipe) as directory:
                record_data(directory.path, problems)
            break
        except InUse:  # another process holds the lock, such as one of another shard
            if read_record(recipe.run.dir) and (recipe.run.dir / "data.json").exists():
                check_directory(recipe)
                break
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    return next_stage(RunDirectory(recipe.run.dir), recipe.model, recipe.schedule)


def mark_shard(shard: GenerationShard, stage: NextStage, problems: Problems) -> None:
    """Record the shard's weights and problems.

    Raises UserError when the shard was begun with other weights or problems, or when the stage then had another number
    of shards.
    """
    path = stage.directory / f"shard-{shard.writer:04d}.json"
    digest = sha256(repr(sorted(problems_fingerprint(problems)["train"].items())).encode()).hexdigest()
    mark = {"shard": asdict(shard), "weights": fingerprint(stage.weights), "problems": digest}
    if path.exists() and _read_mark(path) != mark:
        raise UserError(
            f"{path}: this shard was begun as another part of the stage (another N in --shard I/N), or with other "
            f"weights or problems; run it as it was begun, or remove {stage.directory} to generate the stage again"
        )
    stage.directory.mkdir(parents=True, exist_ok=True)
    write_checksummed_json(path, "shard", mark)


@dataclass(frozen=True, slots=True)
class OpenShard:
    """A shard that this process fills, and the stage to which it belongs."""

    stage: NextStage
    directory: RunDirectory
    store: StageStore
    groups: frozenset[int]
    """Indices of the shard's groups."""
    missing: list[int]
    """Indices of the shard's groups that are not on disk, ascending; none once the stage is sealed."""
    stop: StopRequest
    display: Display


@contextmanager
def open_shard(recipe: Recipe, shard: GenerationShard, stage: int | None, problems: Problems) -> Iterator[OpenShard]:
    """Open the stage that the run generates next, for a process that fills one shard of it.

    Raises UserError when `stage` is given and is not that stage, when another process fills the same shard, while a
    learner holds the run, and when the shard was begun with other weights, other problems or another number of shards.
    """
    following = begin(recipe, problems)
    directory, cursor = RunDirectory(recipe.run.dir), following.cursor
    if stage not in (None, cursor.stage):
        raise UserError(f"{directory.path} is at stage {cursor.stage}, not at stage {stage}; omit --stage")
    with (
        # Shared: processes of other shards may hold the lock at the same time, a learner may not.
        file_lock(directory.path / ".lock", shared=True, wait=True),
        file_lock(directory.logs / f"shard-{shard.writer:04d}.lock"),
        handle_signals(is_main=True) as stop,
        open_display() as display,
    ):
        store = StageStore(following.directory, shard.writer, following.origin)
        groups = shard.groups(cursor.updates_sampled(recipe.schedule) * recipe.rollout.prompts_per_update)
        missing = [] if store.sealed else sorted(groups - store.verified_groups())
        if missing:
            check_stage(store.directory, following.origin)
            mark_shard(shard, following, problems)
        yield OpenShard(following, directory, store, frozenset(groups), missing, stop, display)


def marked_shards(stage: Path, weights: Path) -> list[GenerationShard]:
    """The shards of a stage that were begun, in order.

    Raises UserError unless all were begun with the same problems and with the weights in `weights`, and when groups are
    on disk without the file that says how their shard was begun.
    """
    paths = sorted(stage.glob("shard-[0-9][0-9][0-9][0-9].json"))
    marks = [_read_mark(path) for path in paths]
    for manifest in sorted(stage.glob(OTHER_MANIFESTS)):
        if (path := stage / manifest.name.replace("manifest", "shard")) not in paths:
            raise UserError(f"{path} is missing, so what its groups were sampled with is unknown; {_remedy(path)}")
    expected = fingerprint(weights)
    for path, mark in zip(paths, marks, strict=True):
        if mark["weights"] != expected:
            raise UserError(
                f"{path}: generated with other weights than {weights} holds; put the run's weights there, or remove "
                f"{stage} to generate the stage again"
            )
        if mark["problems"] != marks[0]["problems"]:
            raise UserError(
                f"{path} and {paths[0]} have different problems; remove {stage} to generate the stage again, with the "
                "same data for every shard"
            )
    return [GenerationShard(**mark["shard"]) for mark in marks]


def close_stage(stage: NextStage, updates: int, prompts_per_update: int) -> int:
    """Seal the stage, and return the number of its groups. The caller holds the run directory's lock, so
    no other process seals meanwhile.

    Raises UserError, with nothing changed, when a group is missing, when a file in the directory is of another run or
    stage, or when two shards had different weights or problems.
    """
    check_stage(stage.directory, stage.origin)
    store = StageStore(stage.directory, 0, stage.origin)
    count = updates * prompts_per_update
    if store.sealed:
        return count
    shards = marked_shards(stage.directory, stage.weights)
    if missing := set(range(count)) - store.verified_groups():
        incomplete = [f"{shard} ({n})" for shard in shards if (n := len(shard.groups(count) & missing))]
        never = missing.difference(*(shard.groups(count) for shard in shards))
        unclaimed = f"; of the missing groups, {len(never):,} are of shards that were not begun" if never else ""
        raise UserError(
            f"{stage.directory} lacks {len(missing):,} of {count:,} groups; incomplete shards and how many each lacks: "
            f"{', '.join(incomplete) or 'none'}{unclaimed}; run each shard that lacks groups: "
            "`mugrpo generate --engine-only --shard I/N`"
        )
    store.seal(updates, prompts_per_update)
    return count


def seal(run_dir: Path) -> str:
    """Seal the stage that the run generates next; return a sentence that says so.

    Raises UserError, with nothing changed, when `close_stage` does, when a process still generates, and while a learner
    works on the stage.
    """
    directory = RunDirectory(run_dir)
    directory.check_exists()
    refuse_linked_folders(run_dir, FOLDERS)
    recipe = with_model(load_recipe(directory.recipe), run_dir=run_dir)
    stage = next_stage(directory, recipe.model, recipe.schedule)
    with file_lock(directory.path / ".lock"):
        store = StageStore(stage.directory, 0, stage.origin)
        if store.sealed:
            store.remove_shards()
            return f"{stage.directory} is sealed already; `mugrpo optimize` takes its updates"
        count = close_stage(stage, stage.cursor.updates_sampled(recipe.schedule), recipe.rollout.prompts_per_update)
    after = (
        "run its shards again for its auxiliary models, or"
        if recipe.auxiliary.by_name
        else "go on with `mugrpo optimize` or"
    )
    return f"{stage.directory} is sealed: {count:,} groups; {after} `mugrpo train`"


def _read_mark(path: Path) -> dict[str, Any]:
    try:
        return dict(read_checksummed_json(path, "shard"))
    except (OSError, ValueError):
        raise UserError(f"{path}: damaged; {_remedy(path)}") from None


def _remedy(path: Path) -> str:
    number = path.stem.removeprefix("shard-")
    return f"remove it with manifest-{number}.json and shard-{number}-*.parquet, and run its shard again"
