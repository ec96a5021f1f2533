"""A branch links or copies, removes nothing, and says in one sentence why it cannot be made.

`tests/commands/test_training.py` has what the command refuses of a source.
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mugrpo_megatron.errors import NO_ROOM, UserError
from mugrpo_megatron.run.branch import branch
from mugrpo_megatron.run.checkpoints import newest_cursor
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import open_directory
from mugrpo_megatron.run.record import read_record
from mugrpo_megatron.stages.manifest import read_manifest
from mugrpo_megatron.weights.families import fingerprint
from tests.hostile.rundir import GROUPS, PROMPTS, UPDATES, content, fill, group, make, recipe, stage_of
from tests.refusals import refuses


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("source") / "run").run.dir


STAGE, START = "stages/00001", "checkpoints/stage00001-age00000"


@pytest.mark.parametrize("number", NO_ROOM)
def test_a_full_disk_is_no_fault_of_the_source(
    number: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shutil.copytree` keeps no number of an error; the branch is made once there is room."""

    def link(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    def copy(source: str, target: str) -> None:
        raise OSError(number, os.strerror(number), target)

    with monkeypatch.context() as full:
        full.setattr(os, "link", link)
        full.setattr(shutil, "copy2", copy)
        with pytest.raises(UserError) as failure:
            branch(recipe(tmp_path / "b"), source, 1)
    sentence = "is larger than a file may be" if number == errno.EFBIG else "no space left for"
    assert sentence in str(failure.value)
    assert "partial" not in str(failure.value), "the file has its own name"
    assert not list((tmp_path / "b").rglob("*.partial"))
    branch(recipe(tmp_path / "b"), source, 1)
    assert newest_cursor(tmp_path / "b" / "checkpoints") == Cursor(1, 0, 2)


@pytest.mark.parametrize("links", [True, False])
def test_a_branch_names_its_source(links: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another file system the files are copied."""

    def link(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if not links:
        monkeypatch.setattr(os, "link", link)
    before = content(source)
    (source / STAGE / ".behaviour.parquet.0123abcd.partial").touch()  # its run may go on
    for _ in range(2):  # the second time there is nothing to do
        branch(recipe(tmp_path / "b"), source, 1)
    (source / STAGE / ".behaviour.parquet.0123abcd.partial").unlink()
    record, of = read_record(tmp_path / "b"), read_record(source)
    assert record
    assert of
    assert record.branch
    assert (record.branch.run, record.branch.stage, record.branch.id) == (str(source), 1, of.id)
    assert record.id != of.id
    assert [record.run_of_stage(stage) for stage in range(3)] == [record.id, of.id, record.id]
    assert newest_cursor(tmp_path / "b" / "checkpoints") == Cursor(1, 0, 2)
    for name in (f"{STAGE}/stage.parquet", f"{START}/.metadata"):
        assert (tmp_path / "b" / name).samefile(source / name) == links
    assert content(tmp_path / "b" / STAGE) == content(source / STAGE)
    assert content(source) == before
    refuses(r"already holds another branch, of .* at stage 1; choose", branch, recipe(tmp_path / "b"), source, 0)


def test_stage_0_is_refused_with_other_weights_than_those_that_sampled_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(b"first")
    own = f"model.path={tmp_path / 'model'}"
    with open_directory(recipe(tmp_path / "a", own)) as directory:
        fill(stage_of(directory, 0), 0)
        stage_of(directory, 0).seal(UPDATES, PROMPTS)
    branch(recipe(tmp_path / "b", own), tmp_path / "a", 0)
    record = read_record(tmp_path / "b")
    assert record
    assert record.weights == fingerprint(tmp_path / "model")
    weights.write_bytes(b"other")
    with pytest.raises(UserError, match=r"a: stage 0 used other weights than .*model holds now"):
        branch(recipe(tmp_path / "c", own), tmp_path / "a", 0)
    assert not (tmp_path / "c").exists()


def test_a_branch_of_a_branch_is_of_the_run_that_generated(source: Path, tmp_path: Path) -> None:
    branch(recipe(tmp_path / "b"), source, 1)
    branch(recipe(tmp_path / "c"), tmp_path / "b", 1)
    record, of = read_record(tmp_path / "c"), read_manifest(source / STAGE).origin
    assert record
    assert of
    assert record.run_of_stage(1) == of.run


def test_a_branch_has_updates_left_for_the_whole_stage(source: Path, tmp_path: Path) -> None:
    """Stage 1 begins after the 2 updates of stage 0, which the source has taken, whatever the branch's schedule."""
    for stages, epochs in ((2, 1), (2, 2), (9, 1)):
        schedule = [f"schedule.stages={stages}", f"schedule.epochs={epochs}"]
        branch(recipe(tmp_path / f"{stages}-{epochs}", *schedule), source, 1)
    with pytest.raises(
        UserError, match=r"ends the run after 2 updates, but stage 1 begins after 2 and needs 2 more; set .* to 2 or"
    ):
        branch(recipe(tmp_path / "b", "schedule.stages=1"), source, 1)
    with pytest.raises(UserError, match=r"after 4 updates, but stage 1 begins after 2 and needs 4 more; set .* to 2"):
        branch(recipe(tmp_path / "b", "schedule.stages=1", "schedule.epochs=2"), source, 1)
    assert not (tmp_path / "b").exists()


def test_learner_logprobs_of_other_experts_are_left_out(source: Path, tmp_path: Path) -> None:
    branch(recipe(tmp_path / "same"), source, 1)
    branch(recipe(tmp_path / "other", "learner.routing_replay=learner"), source, 1)
    same, other = ({path.name for path in (tmp_path / name / STAGE).iterdir()} for name in ("same", "other"))
    assert same - other == {"behaviour.parquet", "behaviour.json"}


def test_a_stage_without_logprobs_needs_the_learner_s(tmp_path: Path) -> None:
    with open_directory(recipe(tmp_path / "a")) as directory:
        store = stage_of(directory, 0)
        for index in range(GROUPS):
            store.append([replace(one, engine_logprobs=one.engine_logprobs * np.nan) for one in group(index, 0)])
        store.seal(UPDATES, PROMPTS)
    learner = "rollout.behaviour=learner"
    for changes in ([], [learner, "objective.mismatch=truncate"]):
        refuses("no log-probabilities of the engine", branch, recipe(tmp_path / "b", *changes), tmp_path / "a", 0)
    branch(recipe(tmp_path / "b", learner), tmp_path / "a", 0)


@pytest.mark.parametrize("name", ["hf", STAGE, START])
def test_what_lies_in_run_dir_is_not_removed(name: str, source: Path, tmp_path: Path) -> None:
    """Before the run has a record, and after it."""
    for prepared in (False, True):
        run = tmp_path / str(prepared)
        if prepared:
            branch(recipe(run), source, 0)
            (run / "run.json").unlink()
            shutil.copy(source / "run.json", run / "run.json")
        (run / name).mkdir(parents=True)
        (run / name / "precious.txt").write_text("mine")
        before = content(run)
        refuses(r"exists|was not written by this run", branch, recipe(run), source, 1)
        assert content(run).items() >= before.items()


def broken(source: Path, case: str) -> None:
    if case == "stages swapped":
        (source / "stages/00000").rename(source / "aside")
        (source / STAGE).rename(source / "stages/00000")
        (source / "aside").rename(source / STAGE)
    elif case == "no manifest":
        (source / STAGE / "manifest.json").unlink()
    elif case == "a start of another run":
        shutil.rmtree(source / START)
        shutil.copytree(make(source.parent / "another").run.dir / START, source / START)
    elif case == "a start without state":
        (source / START / "state.json").unlink()
    else:
        shutil.rmtree(source / START)


BROKEN = {
    "stages swapped": "holds stage 0",
    "no manifest": r"manifest\.json is missing",
    "a start of another run": "was saved by another run than .* was sampled by",
    "a start without state": "not a complete checkpoint",
    "no start": "is missing, and with it the weights at the start of stage 1",
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_source_is_named_before_anything_is_made(case: str, source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "source")
    (tmp_path / "source" / "stages" / "00000.bak").mkdir()
    broken(tmp_path / "source", case)
    refuses(BROKEN[case], branch, recipe(tmp_path / "b"), tmp_path / "source", 1)
    assert not (tmp_path / "b").exists()
    with pytest.raises(
        UserError, match=r"no sealed stage 7 .* its sealed stages \[0|holds stage|manifest\.json is missing"
    ):
        branch(recipe(tmp_path / "b"), tmp_path / "source", 7)
