"""Makes branches: runs that begin at the start of another run's stage, with that stage's responses."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.checkpoint_state import STATE, read_state
from mugrpo_megatron.files.durable import digest, durable_directory, full_disk_as_user_error
from mugrpo_megatron.observe.log import FILE_NAME
from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.recipe.sections import ScheduleSection
from mugrpo_megatron.run.cursor import Cursor, checkpoint_name
from mugrpo_megatron.run.directory import RunDirectory, changed_keys, open_directory
from mugrpo_megatron.run.initial_model import check_initial_weights, hub_model, with_model
from mugrpo_megatron.run.published import check_logprobs, check_start, read_published
from mugrpo_megatron.run.record import Branch, HubModel, RunRecord, claim, read_record, write_record
from mugrpo_megatron.stages.columns import LogprobColumn
from mugrpo_megatron.stages.manifest import Origin, check_stage, manifest_name, read_manifest
from mugrpo_megatron.stages.store import StageStore


def branch(recipe: Recipe, source: Path, stage: int) -> None:
    """Make `run.dir` a run that stands at the start of `stage` of the run in `source`, and has that sealed stage.

    The stage's files become hard links, or copies on another file system; neither run changes a file in place. Does
    nothing when `run.dir` is that branch already. Raises UserError when the source lacks the stage or the checkpoint at
    its start, when the recipe changes what the responses were made with, or when `run.dir` holds another run.
    """
    recipe, source_run = with_model(recipe, run_dir=source), RunDirectory(source)
    origin, source_recipe = _check(recipe, source_run, stage)
    new = Branch(str(source.resolve()), stage, origin.run)
    with open_directory(recipe) as directory:
        record = claim(directory.path)
        if _is_branch(directory.path, record, new):
            return
        # With another routing replay the learner is another policy, so its stored log-probabilities are not taken over:
        # the branch computes its own.
        behaviour = LogprobColumn(source_run.behaviour(stage), {})
        same_routes = source_recipe.learner.routing_replay == recipe.learner.routing_replay
        skipped = [] if same_routes else [behaviour.path.name, behaviour.index.name]
        _link(source_run.stage(stage), directory.stage(stage), manifest_name(0), skipped)
        if stage > 0:
            start = checkpoint_name(Cursor(stage))
            _link(source_run.checkpoints / start, directory.checkpoints / start, STATE)
        if recipe.auxiliary.by_name:
            from mugrpo_megatron.extras.auxiliary.auxiliary_columns import link_columns

            link_columns(recipe, source_run, directory, stage)
        # The record is written last: if the process is killed before that, the next start makes the missing links.
        write_record(directory.path, replace(record, branch=new))


def branch_stage(source: Path, stage: int | None) -> int:
    """The number of the stage to branch at: `stage`, or by default the one stage of a published directory.

    Raises UserError when `source` is neither a run directory nor a published one, and when `stage` is None and `source`
    is not published.
    """
    RunDirectory(source).check_exists("--from ")
    if stage is not None:
        return stage
    published = read_published(source)
    if published is None:
        raise UserError("--from needs --stage: the stage of that run to optimize again")
    return published.stage


def check_branch(recipe: Recipe, source: Path, stage: int) -> Origin:
    """Check that `branch` can make the branch, and change nothing; returns the origin of the stage to branch at.

    Raises UserError if it cannot, with the reason.
    """
    return _check(recipe, RunDirectory(source), stage)[0]


def _is_branch(directory: Path, record: RunRecord, expected: Branch) -> bool:
    """Whether the run in the directory is the branch `expected`; False for a run that has not begun. UserError for
    another branch, and for another run that has begun."""
    if record.branch == expected:
        return True
    if record.branch:
        raise UserError(
            f"run.dir = {directory} already holds another branch, of {record.branch.run} at stage "
            f"{record.branch.stage}; choose another run.dir"
        )
    if (directory / FILE_NAME).exists():
        raise UserError(f"run.dir = {directory} already holds a run; choose another run.dir for the branch")
    return False


def _check(recipe: Recipe, source: RunDirectory, stage: int) -> tuple[Origin, Recipe]:
    """Check that `branch` can make the branch; returns the origin of the stage to branch at, and the source run's
    recipe."""
    source.check_exists("--from ")
    if recipe.run.dir.resolve() == source.path.resolve():
        raise UserError(f"run.dir = {source.path} is the run of --from itself; choose another run.dir for the branch")
    record, published = read_record(source.path), read_published(source.path)
    source_recipe = load_recipe(source.recipe)
    if record is not None:
        _check_commit(hub_model(recipe.model), record, source.path)
    origin, start = _check_stage(source, stage)
    if stage == 0 and record is not None:
        check_initial_weights(record, recipe.model, f"{source.path}: stage 0")
    store = StageStore(source.stage(stage))
    check_logprobs(store, recipe.rollout, recipe.objective)
    if published:
        check_start(published, recipe.model)
    present = read_record(recipe.run.dir)
    # The length of the schedule is checked for a new branch only. One that has begun keeps the schedule it began with.
    if present is None or present.branch is None:
        _check_length(recipe.schedule, source_recipe.schedule, start, store.updates)
    hidden = tuple(published.hidden) if published else ()
    changed = [
        key for key in changed_keys(source_recipe, recipe) if not (Recipe.changes_of(key) or key.startswith(hidden))
    ]
    if changed:
        raise UserError(f"a branch cannot change {', '.join(changed)}; take these keys from {source.recipe}")
    if present is not None:
        _is_branch(recipe.run.dir, present, Branch(str(source.path.resolve()), stage, origin.run))
    return origin, source_recipe


def _check_stage(source: RunDirectory, stage: int) -> tuple[Origin, Cursor]:
    """Check the stage to branch at; returns its origin, and the cursor at its start.

    Raises UserError unless the stage is sealed and is in the directory of its own number, and the checkpoint at its
    start exists and is of the run that sampled the stage. Stage 0 needs no checkpoint.
    """
    directory = source.stage(stage)
    check_stage(directory)
    if not StageStore(directory).sealed:
        sealed = [number for number, path in source.stages().items() if StageStore(path).sealed]
        raise UserError(
            f"{source.path} has no sealed stage {stage} (stages count from 0); "
            + (f"choose among its sealed stages {sealed}" if sealed else "wait until its first stage is sealed")
        )
    checkpoint = source.checkpoints / checkpoint_name(Cursor(stage))
    if stage > 0 and not checkpoint.exists():
        raise UserError(
            f"{checkpoint} is missing, and with it the weights at the start of stage {stage}; take a stage whose "
            "checkpoint is still there (a run keeps its newest `checkpoint.keep`), a stage that was published "
            "with --weights, or stage 0, which needs none"
        )
    origin = read_manifest(directory).origin
    if origin is None or origin.stage != stage:
        raise UserError(f"the manifest of {directory} does not say that it is stage {stage}; restore it from a copy")
    if stage == 0:
        return origin, Cursor()
    state = read_state(checkpoint)
    if state.get("run") != origin.run:
        raise UserError(
            f"{checkpoint} was saved by another run than {directory} was sampled by; restore both from a copy"
        )
    return origin, Cursor(**state["cursor"])


def _check_length(schedule: ScheduleSection, source: ScheduleSection, start: Cursor, stage_updates: int) -> None:
    """Raise UserError when the branch's schedule has other `stages` or `epochs` than the source's, and ends before all
    epochs over the stage are taken."""
    # The schedule counts also the updates before this stage, which the source run took. With fewer stages or epochs
    # than the source's, it could be over before the branch has taken its first update.
    needed = stage_updates * schedule.epochs
    remaining = start.updates_taken(schedule, stage_updates)
    changed = (schedule.stages, schedule.epochs) != (source.stages, source.epochs)
    if changed and remaining < needed:
        fitting = math.ceil((start.updates + needed) / schedule.updates_on_stage)
        raise UserError(
            f"schedule.stages = {schedule.stages} with schedule.epochs = {schedule.epochs} ends the run after "
            f"{schedule.total_updates:,} updates, but stage {start.stage} begins after {start.updates:,} and needs "
            f"{needed:,} more; set schedule.stages to {fitting} or more"
        )


def _link(source: Path, target: Path, key: str, skipped: Sequence[str] = ()) -> None:
    """Make `target` a directory with the files of `source` except those named in `skipped`, completely or not at all.

    If `target` has a file `key` that equals the source's, it was made before and is kept. Raises UserError when
    something else is at `target`, and when a file cannot be copied, for instance since the source changes meanwhile.
    """
    if os.path.lexists(target):
        if (target / key).is_file() and digest(target / key) == digest(source / key):
            return  # an earlier start of this branch, which was killed, has linked it
        raise UserError(f"{target} exists and is not what {source} holds; move it away, or choose another run.dir")
    ignored = shutil.ignore_patterns("*.partial", *skipped)  # `*.partial`: a file that another process is writing
    with durable_directory(target, replace=False) as partial:

        def copy(one: str, other: str) -> None:
            # A full disk is reported here, since `copytree` turns errors of the system into texts of one shutil.Error.
            with full_disk_as_user_error(target / Path(other).relative_to(partial)):
                link_or_copy(one, other)

        try:
            shutil.copytree(source, partial, copy_function=copy, ignore=ignored, dirs_exist_ok=True)
        except shutil.Error as error:
            raise UserError(
                f"{source} cannot be copied ({error.args[0][0][2]}); mend this, or if its run is still in progress, "
                "wait until it has ended; then run the same command again"
            ) from None


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Make `target` a hard link to `source` or, where that is not possible, a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _check_commit(now: HubModel | None, record: RunRecord, source: Path) -> None:
    """Raise UserError when the branch would start from another commit of the hub's model than its source run did."""
    first = record.model
    if first and now and first.name == now.name and first.commit != now.commit:
        raise UserError(
            f"{source} began with {first.name} at {first.commit}, and model.revision now stands for {now.commit}; "
            f"begin the branch with --set model.revision={first.commit}"
        )
