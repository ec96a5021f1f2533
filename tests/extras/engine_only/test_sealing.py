"""A stage generated in shards and sealed is the stage that one process generates, and trains."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.engine_only.shards import seal
from mugrpo_megatron.run.checkpoints import newest_cursor
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.stages.manifest import manifest_name, read_manifest
from mugrpo_megatron.stages.store import StageStore
from tests.patience import PATIENCE_S
from tests.scaling.nodes import kill
from tests.tiny import COIN, mugrpo, rows, save_model, write_recipe, write_run

pytestmark = [pytest.mark.process, pytest.mark.slow]
PROMPTS = 4000
"""An update's prompts where processes are killed: enough for files on disk before a shard's end."""
UNSHARED = ("unshare", "--net", "--ipc", "--mount", "sh", "-c")
ALONE = 'ip link set lo up && mount -t tmpfs none /dev/shm && exec "$@"'
"""A machine of its own, but for the file system: only a loopback of its own to talk over, and its own shardd memory."""


def problems(stage: Path) -> list[tuple[str, list[int]]]:
    """Problem and prompt of every row of a sealed stage, in its order."""
    store = StageStore(stage)
    samples = [sample for update in range(store.updates) for sample in store.read_update(update)]
    return [(sample.problem, sample.prompt_ids.tolist()) for sample in samples]


def test_a_shard_makes_the_stage_that_a_run_makes_and_training_goes_on_from_it(
    finished_run: Path, tmp_path: Path
) -> None:
    """The second stage begins with the weights that `mugrpo optimize` left in hf/."""
    run = tmp_path / "run"
    recipe = write_run(
        tmp_path,
        finished_run.parent / "model",
        schedule={"stages": 2, "updates_per_stage": 2},
        rollout={"behaviour": "engine"},
    )
    stages = [run / "stages" / f"{number:05d}" for number in range(2)]
    for number in range(2):
        said = mugrpo("generate", recipe, "--engine-only", "--shard", "0/1", "--stage", number).stdout
        assert "shard 0/1 has all of its 8 groups" in said
        assert "is sealed: 8 groups" in mugrpo("seal", run).stdout
        mugrpo("optimize", recipe)
    both = [problem for stage in stages for problem in problems(stage)]
    assert both == problems(finished_run / "stages" / "00000")[: len(both)]
    assert newest_cursor(run / "checkpoints") == Cursor(2, 0, 4)
    assert [row["mismatch_max"] < 1e-4 for row in rows(run, "stage")] == [True, True], "hf/ is the learner"
    assert {row["skipped"] for row in rows(run, "update")} == {0}
    assert {sample.weight_version for sample in StageStore(stages[1]).read_update(0)} == {2}
    with pytest.raises(UserError, match="taken all of its 4 updates"):
        seal(run)


def finished(run: Path, number: int) -> int:
    """Groups of a shard that are on disk."""
    manifest = read_manifest(run / "stages" / "00000", manifest_name(number + 1))
    return sum(len(entry.groups) for entry in manifest.shards)


@contextmanager
def elsewhere(log: Path, recipe: Path, number: int) -> Iterator[psutil.Popen]:
    """One of four shards on a machine of its own (`ALONE`), as a user starts it; killed when the block ends."""
    words = ["generate", str(recipe), "--engine-only", "--shard", f"{number}/4"]
    command = [*UNSHARED, ALONE, "sh", sys.executable, "-m", "mugrpo_megatron", *words]
    with log.open("ab") as output:
        process = psutil.Popen(command, stdout=output, stderr=output)
    try:
        yield process
    finally:
        kill(process)
        process.wait()


@pytest.mark.night
def test_four_machines_that_share_a_directory_three_of_them_ended_and_run_again(tmp_path: Path) -> None:
    """One process is killed with its engine, as when a machine is lost; of another the command alone, as for memory.

    A third is asked to stop.
    """
    if subprocess.run([*UNSHARED, ALONE, "sh", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no right to make namespaces")
    folders = [tmp_path / name for name in ("whole", "shared")]
    for folder in folders:
        folder.mkdir()
        write_recipe(
            folder / "recipe.toml",
            save_model(folder / "model"),
            folder / "run",
            rollout={"prompts_per_update": PROMPTS, "responses_per_prompt": 4, "max_response_tokens": 6},
            reward=COIN,
        )
    mugrpo("generate", folders[0] / "recipe.toml")
    recipe, run = folders[1] / "recipe.toml", folders[1] / "run"
    logs = [tmp_path / f"shard-{shard}.log" for shard in range(4)]

    with ExitStack() as stack:
        machines = [stack.enter_context(elsewhere(logs[shard], recipe, shard)) for shard in range(4)]
        for shard in (1, 2, 3):
            while not finished(run, shard):
                psutil.wait_procs([machines[shard]], timeout=0.1)
                assert machines[shard].is_running(), logs[shard].read_text()
            family = machines[shard].children(recursive=True)
            assert any("mugrpo_megatron.engine.host" in process.cmdline() for process in family)
            if shard == 1:
                kill(machines[shard])
            machines[shard].send_signal(signal.SIGTERM if shard == 3 else signal.SIGKILL)
            assert machines[shard].wait() == (0 if shard == 3 else -signal.SIGKILL)
            assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == [], "nothing outlives the command"
        assert "the same command continues" in logs[3].read_text().lower()
        kept = {shard: finished(run, shard) for shard in (1, 2, 3)}
        assert all(0 < count < PROMPTS // 2 for count in kept.values()), kept
        with pytest.raises(UserError, match=r"is in use by|incomplete shards"):
            seal(run)
        again = {shard: stack.enter_context(elsewhere(logs[shard], recipe, shard)) for shard in kept}
        for shard, machine in enumerate([machines[0], *again.values()]):
            assert machine.wait(PATIENCE_S) == 0, logs[shard].read_text()
    assert "is sealed: 8,000 groups" in mugrpo("seal", run).stdout
    assert problems(run / "stages" / "00000") == problems(folders[0] / "run" / "stages" / "00000")
    mugrpo("optimize", recipe)
    assert newest_cursor(run / "checkpoints") == Cursor(1, 0, 2)
