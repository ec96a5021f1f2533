"""A learner and processes that generate its next stage ahead: what the run logs, and kills on either side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.run.checkpoints import newest_cursor
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.record import MARK
from mugrpo_megatron.stages.manifest import manifest_name, read_manifest
from mugrpo_megatron.stages.store import StageStore
from tests.extras.prefetch.test_sealing import problems
from tests.forked import Command, started
from tests.tiny import COIN, mugrpo, save_model, write_recipe

pytestmark = [pytest.mark.process, pytest.mark.slow]
UPDATES = 4


def recipe_of(folder: Path, stages: int, age: int, prompts: int = 4, **sections: dict[str, Any]) -> Path:
    folder.mkdir()
    return write_recipe(
        folder / "recipe.toml",
        save_model(folder / "model"),
        folder / "run",
        schedule={"stages": stages, "updates_per_stage": UPDATES, "max_sample_age": age},
        rollout={"prompts_per_update": prompts, "responses_per_prompt": 4, "max_response_tokens": 6},
        reward=COIN,
        **sections,
    )


def follows(recipe: Path, share: str) -> list[object]:
    return ["generate", recipe, "--engine-only", "--follow", "--shard", share]


def check_run(run: Path, stages: int, age: int) -> None:
    """Every update was taken, on data as stale as the recipe says, and other weights are not told as a mismatch."""
    rows = read_rows(run / "metrics.jsonl")
    updates = {row["update"]: row for row in rows if row["kind"] == "update"}
    assert sorted(updates) == list(range(stages * UPDATES))
    early = [0, *[age] * (stages - 1)]
    assert [row["staleness"] for row in updates.values()] == [own + n for own in early for n in range(UPDATES)]
    assert {row["skipped"] for row in updates.values()} == {0}
    mismatched = {row["stage"]: "mismatch_max" in row for row in rows if row["kind"] == "stage"}
    assert mismatched == {stage: stage == 0 for stage in range(stages)}
    assert newest_cursor(run / "checkpoints") == Cursor(stages, 0, stages * UPDATES)


def until(command: Command, reached: Callable[[], bool]) -> None:
    while not reached():
        assert command.wait(0.05) is None, command.said


def kill(command: Command) -> None:
    """The command and its engine."""
    for process in command.family:
        with suppress(psutil.NoSuchProcess):  # an engine ends with its leader
            process.kill()
    command.wait()


@contextmanager
def pause(learner: Command, run: Path) -> Iterator[Path]:
    """Stop the learner between the writing of hf/ and the stage's end; what appears once the next stage is claimed."""
    until(learner, (run / "hf" / MARK).exists)
    psutil.Process(learner.pid).suspend()
    yield run / "ahead" / "00001"
    psutil.Process(learner.pid).resume()


def test_the_next_stage_is_generated_while_this_one_trains(tmp_path: Path) -> None:
    """One process follows from before the run begins; another one comes late and has nothing to do."""
    recipe = recipe_of(tmp_path / "early", stages=2, age=3, prompts=40)
    run = recipe.parent / "run"
    with started(*follows(recipe, "0/1")) as follower, started("train", recipe) as learner:
        with pause(learner, run) as claim:
            until(follower, claim.exists)
        for command in (learner, follower):
            assert command.wait() == 0, command.said
        assert "the run has no further stage; 1 were generated ahead" in follower.said
        assert "stage 0 of 2: generate" in learner.said
        assert "stage 1 of 2: generate" not in learner.said
    check_run(run, stages=2, age=3)
    assert "; 0 were generated ahead" in mugrpo(*follows(recipe, "0/1")).stdout


@pytest.mark.night
def test_kills_on_either_side_leave_a_run_with_the_same_data(tmp_path: Path) -> None:
    """Before hf/ is written, while both sides work, and while the learner waits."""
    recipe = recipe_of(tmp_path / "early", stages=2, age=3, prompts=1200, checkpoint={"every_updates": 1})
    run = recipe.parent / "run"
    directory = RunDirectory(run)

    def groups(share: int) -> int:
        manifest = read_manifest(run / "ahead" / "00001" / "stage", manifest_name(share + 1))
        return sum(len(shard.groups) for shard in manifest.shards)

    with ExitStack() as stack:

        def start(*words: object) -> Command:
            return stack.enter_context(started(*words))

        learner = start("train", recipe)
        until(learner, lambda: StageStore(directory.stage(0)).sealed)
        kill(learner)
        followers = [start(*follows(recipe, f"{share}/2")) for share in range(2)]
        learner = start("train", recipe)
        with pause(learner, run) as claim:  # a learner that finds nobody at work generates the stage itself
            until(followers[0], claim.exists)
            until(followers[1], lambda: groups(1) > 0)
            kill(followers[1])
            done = groups(1)
            assert 0 < done < 2400
            followers[1] = start(*follows(recipe, "1/2"))
            until(followers[1], lambda: groups(1) > done)
        until(learner, lambda: newest_cursor(directory.checkpoints) == Cursor(1, 0, 4))
        kill(learner)
        learner = start("train", recipe)
        for command in (learner, *followers):
            assert command.wait() == 0, command.said
    check_run(run, stages=2, age=3)
    usual = recipe_of(tmp_path / "usual", stages=2, age=0, prompts=1200)
    mugrpo("train", usual)
    for stage in range(2):
        assert problems(directory.stage(stage)) == problems(usual.parent / "run" / "stages" / f"{stage:05d}")
