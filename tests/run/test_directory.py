"""One run directory is one run's: a second process and another recipe are refused, what may change may change."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from mugrpo_megatron.checks.preflight import check_on_paper, check_run
from mugrpo_megatron.commands.training import generate_alone, optimize_alone
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import write_json
from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.run.checkpoints import check_stage_sealed
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import FOLDERS, InUse, RunDirectory, check_directory, file_lock, open_directory
from mugrpo_megatron.run.record import PROVENANCE, provenance, read_record
from tests.hostile.rundir import NOW, PROMPTS, UPDATES, make
from tests.refusals import refuses

HOLD = """
import sys
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.run.directory import open_directory
with open_directory(load_recipe(None, sys.argv[1:])):
    print("held", flush=True)
    sys.stdin.read()
"""


def recipe(directory: Path, *overrides: str) -> Recipe:
    return load_recipe(None, [f"run.dir={directory}", *overrides])


@pytest.mark.process
def test_a_second_start_is_refused_by_name_and_a_killed_first_one_leaves_nothing_locked(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, f"run.dir={tmp_path}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"in use by process {first.pid}"), open_directory(recipe(tmp_path)):
            pass
        first.kill()
    with open_directory(recipe(tmp_path)) as directory:
        assert directory.recipe.exists()


def test_another_recipe_is_refused_with_the_keys_that_differ(tmp_path: Path) -> None:
    with open_directory(recipe(tmp_path)):
        pass
    changed = recipe(tmp_path, "optimizer.lr=1e-3", "objective.trigger_ratio=0.9", "learner.routing_replay=learner")
    keys = r"learner\.routing_replay, objective\.trigger_ratio, optimizer\.lr"
    with pytest.raises(UserError, match=keys), open_directory(changed):
        pass


def test_another_rate_names_the_command_that_takes_the_stage_again(tmp_path: Path) -> None:
    sizes = ("schedule.stages=3", f"schedule.updates_per_stage={UPDATES}", f"rollout.prompts_per_update={PROMPTS}")
    make(tmp_path / "run")
    given = recipe(tmp_path / "run", "model.path=/none", *sizes, "optimizer.lr=3e-5", "objective.dual_clip=3.0")
    with pytest.raises(UserError) as caught:
        check_directory(given)
    command = shlex.split(str(caught.value).partition("with the new values: ")[2])
    assert command[:2] == ["mugrpo", "optimize"]
    assert {"--from", str(tmp_path / "run"), "--stage", "1", "optimizer.lr=3e-05", "objective.dual_clip=3.0"} <= {
        *command
    }
    new = load_recipe(Path(command[2]), [command[index + 1] for index, word in enumerate(command) if word == "--set"])
    assert (new.optimizer.lr, new.objective.dual_clip) == (3e-5, 3.0)
    assert new.run.dir == tmp_path / "run-branch"
    refuses("holds$", check_directory, recipe(tmp_path / "run", "model.path=/none", *sizes, "run.seed=9"))


def test_weights_that_changed_before_the_first_checkpoint_are_refused(tmp_path: Path) -> None:
    """Responses and the evaluation before the first update may be those of the weights that are gone."""
    run, model = tmp_path / "run", tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"first")
    own = recipe(run, f"model.path={model}")
    with open_directory(own):
        pass
    with open_directory(own):  # as they were
        pass
    (model / "model.safetensors").write_bytes(b"other")
    refuses(r"no checkpoint yet, used other weights than .*model holds now", check_directory, own)
    (run / "checkpoints" / "stage00000-age00004").mkdir()
    with open_directory(own):  # the run goes on from its own weights
        pass


def test_a_directory_in_hf_that_the_run_did_not_write_is_kept(tmp_path: Path) -> None:
    with open_directory(recipe(tmp_path)) as directory:
        record = read_record(directory.path)
        assert record
        directory.hf.mkdir()
        write_json(directory.hf / PROVENANCE, provenance(record))
    check_directory(recipe(tmp_path))
    (directory.hf / "eval").mkdir()
    with pytest.raises(UserError, match=r"hf/eval was not written by this run, which replaces .*move it elsewhere"):
        check_directory(recipe(tmp_path))


def test_how_the_work_is_done_may_change(tmp_path: Path) -> None:
    with open_directory(recipe(tmp_path)):
        pass
    changed = ("parallel.tensor=2", "engine.tensor=2", "checkpoint.keep=9", "schedule.stages=9", "sft.lr=1e-3")
    told = ("max_failure_share=1", "timeout_s=60", "workers=3", "worker_memory_mb=2048")  # what messages tell to raise
    with open_directory(recipe(tmp_path, *changed, *(f"reward.{one}" for one in told))) as directory:
        assert "keep = 9" in directory.recipe.read_text(encoding="utf-8")


def test_a_run_of_an_earlier_version_goes_on_unless_a_removed_key_changed_what_it_computes(tmp_path: Path) -> None:
    with open_directory(recipe(tmp_path)) as directory:
        as_now = directory.recipe.read_text(encoding="utf-8")
    for section, held, other in (
        ("learner", 'flash_attention = "fastest"', 'flash_attention = "torch"'),
        ("optimizer", "ess_power = 0.0", "ess_power = 0.5"),
    ):
        heading = f"[{section}]\n"
        directory.recipe.write_text(as_now.replace(heading, f"{heading}{other}\n"), encoding="utf-8")
        refuses(rf"recipe.toml: `{section}\.\w+` = .*: this key was removed on", check_directory, recipe(tmp_path))
        directory.recipe.write_text(as_now.replace(heading, f"{heading}{held}\n"), encoding="utf-8")
        with open_directory(recipe(tmp_path)):
            assert directory.recipe.read_text(encoding="utf-8") == as_now


def test_one_model_by_two_paths_is_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    with open_directory(recipe(tmp_path / "run", "model.path=model")):
        pass
    check_directory(recipe(tmp_path / "run", f"model.path={tmp_path}/model"))
    refuses(r"other values of model\.path", check_directory, recipe(tmp_path / "run", f"model.path={tmp_path}/other"))


def test_a_directory_in_which_nothing_was_generated_may_go(tmp_path: Path) -> None:
    with open_directory(recipe(tmp_path)) as directory:
        pass
    other = recipe(tmp_path, "optimizer.lr=1e-3")
    refuses("or remove this one, in which nothing was generated", check_directory, other)
    directory.stage(0).mkdir()
    refuses("or resume with the recipe it holds", check_directory, other)


def test_what_is_refused_at_the_end_is_refused_on_paper(tmp_path: Path) -> None:
    """`--dry-run` and the preflight say what export would find, and write nothing."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "precious").touch()
    for check in (check_run, check_on_paper):
        refuses("hf exists, but", check, recipe(tmp_path), lambda line: None)
        with pytest.raises(UserError, match="is where this run would write"):
            check(recipe(tmp_path, f"model.path={tmp_path}/hf", f"run.dir={tmp_path}/./"), lambda line: None)
    assert [path.name for path in tmp_path.rglob("*")] == ["hf", "precious"]


def test_a_run_inside_a_stage_needs_it_whole(tmp_path: Path) -> None:
    """Its first weights are gone, so nothing can generate the stage again; `generate` and `optimize` say so too."""
    made = make(tmp_path / "run")
    directory = RunDirectory(made.run.dir)
    check_stage_sealed(directory, NOW)
    shutil.rmtree(directory.stage(NOW.stage))
    check_stage_sealed(directory, Cursor(1, 0, 2))
    way_out = r"remove the checkpoints after stage00001-age00000 from .*checkpoints: the run then resumes"
    for command in (
        lambda: check_stage_sealed(directory, NOW),
        lambda: generate_alone(made, None, None),
        lambda: optimize_alone(made, None),
    ):
        refuses(way_out, command)


def test_a_lock_is_shared_by_those_who_ask_for_it(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with file_lock(path, shared=True), file_lock(path, shared=True), pytest.raises(InUse), file_lock(path):
        pass
    with file_lock(path), pytest.raises(InUse), file_lock(path, shared=True):
        pass


def test_a_lock_that_is_a_link_is_refused_and_its_target_kept(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "keys")
    with (
        pytest.raises(UserError, match=r"\.lock cannot be written: it is a link"),
        file_lock(tmp_path / "run" / ".lock"),
    ):
        pass
    assert (tmp_path / "keys").read_text() == "precious"


@pytest.mark.parametrize("name", [*FOLDERS, "stages/00000", "checkpoints/.stage00000-age00002.partial", "logs/old"])
def test_a_link_to_a_directory_is_refused_and_its_target_kept(name: str, tmp_path: Path) -> None:
    """tar and `cp -r` keep links; so a run directory of somebody else must not lead elsewhere."""
    made = recipe(tmp_path / "run")
    with open_directory(made):
        pass
    link, target = tmp_path / "run" / name, tmp_path / "target"
    if link.exists():
        link.rename(target)
    else:
        target.mkdir()
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(target)
    for command in (lambda: open_directory(made).__enter__(), lambda: generate_alone(made, None, None)):
        refuses(f"{re.escape(str(link))} is a link: nothing is written through it; move ", command)
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("again", [False, True])
def test_a_lock_that_was_removed_or_replaced_is_noticed(tmp_path: Path, again: bool) -> None:
    with open_directory(recipe(tmp_path)) as directory:
        directory.check_lock()
        (tmp_path / ".lock").unlink()
        with open_directory(recipe(tmp_path)) if again else nullcontext(), pytest.raises(UserError, match="removed or"):
            directory.check_lock()
