"""A model of the hub is downloaded once, pinned to its commit, and its failures are sentences."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mugrpo_megatron.checks.preflight import check_on_paper, check_run
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import Recipe, dump_recipe, load_recipe
from mugrpo_megatron.recipe.load import validate
from mugrpo_megatron.run.branch import branch
from mugrpo_megatron.run.directory import open_directory
from mugrpo_megatron.run.initial_model import hub_model, with_cached_model, with_model
from mugrpo_megatron.run.record import HubModel, read_record
from tests.hub import FIRST, NAME, SECOND, Hub, serving, used
from tests.refusals import refuses
from tests.tiny import save_model, write_recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(tmp_path_factory.mktemp("hub") / "model")
    (directory / "modeling_own.py").write_text("raise SystemExit('code of a repository ran')")
    (directory / "consolidated.safetensors").write_bytes(b"the same weights once more")
    return directory


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with used(model, tmp_path, monkeypatch) as hub:
        yield hub


def recipe_for(tmp_path: Path, *overrides: str) -> Recipe:
    return load_recipe(write_recipe(tmp_path / "recipe.toml", Path(NAME), tmp_path / "run"), overrides)


def test_a_model_is_downloaded_once_without_code_and_its_commit_is_known(hub: Hub, tmp_path: Path) -> None:
    said: list[str] = []
    recipe, found = check_run(recipe_for(tmp_path), said.append)
    assert found is not None
    assert (recipe.model.path, recipe.model.commit, recipe.model.directory.name) == (Path(NAME), FIRST, FIRST)
    names = {path.name for path in recipe.model.directory.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & {"modeling_own.py", "consolidated.safetensors"}
    assert any(line.startswith(f"model: {NAME} of the Hugging Face hub") for line in said)
    assert load_recipe(None, []).model.commit is None
    asked = len(hub.asked)
    assert with_model(recipe) is recipe
    assert with_cached_model(recipe_for(tmp_path)).model.directory == recipe.model.directory
    assert len(hub.asked) == asked
    assert validate(recipe.model_dump(mode="json"), "r") == recipe_for(tmp_path)
    assert FIRST not in dump_recipe(recipe)


def test_a_run_keeps_the_commit_that_it_began_with(hub: Hub, tmp_path: Path) -> None:
    recipe = with_model(recipe_for(tmp_path), run_dir=tmp_path / "run")
    with open_directory(recipe):
        pass
    record = read_record(tmp_path / "run")
    assert record is not None
    assert record.model == hub_model(recipe.model) == HubModel(NAME, FIRST)
    hub.refs["main"] = SECOND
    assert with_model(recipe_for(tmp_path), run_dir=tmp_path / "run").model.commit == FIRST
    assert with_model(recipe_for(tmp_path), run_dir=tmp_path / "other").model.commit == SECOND
    refuses(r"other values of model\.revision", check_run, recipe_for(tmp_path, "model.revision=v1"))


def test_a_branch_begins_with_the_commit_of_its_run(hub: Hub, tmp_path: Path) -> None:
    with open_directory(with_model(recipe_for(tmp_path))):
        pass
    moved = with_model(recipe_for(tmp_path, f"run.dir={tmp_path}/branch", "model.revision=v1"))
    refuses(rf"began with {NAME} at {FIRST}.* --set model.revision={FIRST}", branch, moved, tmp_path / "run", 0)


@pytest.mark.parametrize(
    ("revision", "commit"), [("main", FIRST), ("v1", SECOND), (FIRST, FIRST), (SECOND, SECOND), (None, FIRST)]
)
@pytest.mark.usefixtures("hub")
def test_revisions(revision: str | None, commit: str, tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, *([f"model.revision={revision}"] if revision else []))
    assert with_model(recipe).model.commit == commit


def test_what_cannot_be_had_is_a_sentence(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(says: str, *overrides: str) -> None:
        with pytest.raises(UserError, match=f"^model.path = .*{says}.*check the name and the network.*directory"):
            with_model(recipe_for(tmp_path, *overrides))

    refused("no such repository", "model.path=someone/else")
    refused("no revision 'v9'", "model.revision=v9")
    hub.gated = True
    refused("the repository is gated: accept its terms")
    hub.gated = False
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    refused(r"could not be downloaded from the Hugging Face hub \(Got: ConnectError")
    said: list[str] = []
    check_on_paper(recipe_for(tmp_path), said.append)
    assert said[0].startswith("model: not on this machine")


@pytest.mark.usefixtures("hub")
def test_a_directory_that_is_called_as_a_model_is_the_directory(tmp_path: Path, model: Path) -> None:
    (tmp_path / "someone").mkdir()
    assert with_model(recipe_for(tmp_path)).model.commit is None  # a folder here, so a mistyped path is not looked up
    (tmp_path / NAME).symlink_to(model)
    assert check_run(recipe_for(tmp_path))[0].model.directory == Path(NAME)
    refuses("a directory has no revisions", recipe_for, tmp_path, f"model.path={model}", "model.revision=v1")


@pytest.mark.process
@pytest.mark.night
def test_train_and_eval_take_a_model_of_the_hub(model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path / "recipe.toml",
        Path(NAME),
        tmp_path / "run",
        schedule={"stages": 1, "updates_per_stage": 1},
        eval={"every_stages": 5},
    )
    with serving(model) as hub:
        home = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        mugrpo = [sys.executable, "-W", "ignore", "-m", "mugrpo_megatron"]

        def run(*arguments: object) -> None:
            done = subprocess.run(
                [*mugrpo, *map(str, arguments)], env=os.environ | home, cwd=Path.cwd(), capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr

        run("train", recipe)
        assert json.loads((tmp_path / "run/hf/mugrpo.json").read_text())["model"] == {"name": NAME, "commit": FIRST}
        assert FIRST in (tmp_path / "run/run.json").read_text()
        hub.refs.clear()  # the name stands for nothing any more, and the cache is enough
        run(
            *("eval", NAME, "--data", "arithmetic", "--out", tmp_path / "eval", "--set", f"model.revision={FIRST}"),
            *("--set", "data.eval_problems=2", "--set", "rollout.max_response_tokens=4"),
        )
        assert json.loads((tmp_path / "eval/settings.json").read_text())["model"] == {"name": NAME, "commit": FIRST}
