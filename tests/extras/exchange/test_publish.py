"""A stage as a data set: training on it ends where training on the run's own stage ended, and it says what it is."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mugrpo_megatron.commands.training import optimize_alone
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.exchange import publish as module
from mugrpo_megatron.extras.exchange.local_paths import hub_name, without_local_paths
from mugrpo_megatron.extras.exchange.publish import publish, upload
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.run.branch import branch
from mugrpo_megatron.stages.store import StageStore
from tests.refusals import refuses
from tests.stages.test_signed import rewritten, tables_of
from tests.tiny import mugrpo


def quiet(line: str) -> None:
    """What a command says, unheard."""


@pytest.mark.process
@pytest.mark.parametrize("stage", [0, 1])
def test_training_on_a_published_stage_ends_bitwise_like_training_on_the_run_s_own(
    stage: int, finished_run: Path, tmp_path: Path
) -> None:
    """Stage 0 begins with the model, found under another name; stage 1 with the checkpoint published with it."""
    said: list[str] = []
    publish(finished_run, stage, tmp_path / "set", weights=True, say=said.append)
    assert "data.train" not in said[1]
    assert "model.path" in said[1]
    look = shlex.split(said[2].rpartition(": ")[2])
    assert look[:2] == ["mugrpo", "rollouts"]
    assert "holds no tokenizer" not in mugrpo(*look[1:]).stdout
    model = (finished_run.parent / "model").resolve()
    (tmp_path / "elsewhere").symlink_to(model)
    changes = [f"run.dir={tmp_path / 'b'}", f"model.path={tmp_path / 'elsewhere'}"]
    overrides = [word for change in changes for word in ("--set", change)]
    mugrpo("optimize", finished_run.parent / "recipe.toml", "--from", tmp_path / "set", *overrides)
    end = "checkpoints/stage00001-age00000/__0_0.distcp" if stage == 0 else "hf/model.safetensors"
    assert (tmp_path / "b" / end).read_bytes() == (finished_run / end).read_bytes()


@pytest.mark.process
def test_the_card_says_what_the_stage_is_and_nothing_of_the_machine(finished_run: Path, tmp_path: Path) -> None:
    folder, left = tmp_path / "set", tmp_path / ".set.0123abcd.partial"
    left.mkdir()
    said: list[str] = []
    publish(finished_run, 1, folder, say=said.append)
    assert (
        said[0]
        == f"{left} is of another command that writes {folder}, or wrote it and was killed; remove it if none runs"
    )
    assert left.is_dir()
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"README.md", "published.json", "recipe.toml", "stages/00001/stage.parquet"} <= written
    assert not any(name.startswith("checkpoints") for name in written), "only --weights takes them along"
    text = (folder / "README.md").read_text()
    assert text.startswith("---\nconfigs:\n- config_name: default\n  data_files: stages/00001/stage.parquet\n")
    sha = hashlib.sha256((finished_run.parent / "model" / "model.safetensors").read_bytes()).hexdigest()
    for fact in (json.loads((finished_run / "run.json").read_text())["run"]["id"], sha, "| `engine_logprobs` |"):
        assert fact in text
    assert StageStore(folder / "stages" / "00001").content in text
    assert "[objective]" in text
    for place in (str(finished_run.parent), "/tmp"):
        for name in ("README.md", "published.json", "recipe.toml"):
            assert place not in (folder / name).read_text(), name
    rows = pq.read_table(folder / "stages" / "00001" / "stage.parquet").to_pylist()
    assert rows == pq.read_table(finished_run / "stages" / "00001" / "stage.parquet").to_pylist()
    assert all(row["text"] is not None and row["gold"] and row["advantage"] is not None for row in rows)


@pytest.mark.process
def test_what_publish_did_not_write_stays(finished_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "README.md").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="it is not a published stage; choose another path"):
            publish(finished_run, 0, other, overwrite=overwrite, say=quiet)
    assert [path.read_text() for path in other.iterdir()] == ["mine"]
    publish(finished_run, 0, tmp_path / "set", say=quiet)
    refuses("--overwrite replaces it", publish, finished_run, 1, tmp_path / "set", say=quiet)
    assert (tmp_path / "set" / "stages" / "00000").exists()
    refuses("no sealed stage 7", publish, finished_run, 7, tmp_path / "seven", say=quiet)
    refuses("not a run directory", publish, tmp_path, 0, tmp_path / "seven", say=quiet)
    assert not (tmp_path / "seven").exists()
    to = tmp_path / "set"
    for name in ("precious.txt", ".git/HEAD", "stages/00000/notes.txt", "checkpoints/empty/x"):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_text("mine")
        with pytest.raises(UserError, match=r"move it, or choose another path|not a complete checkpoint"):
            publish(finished_run, 0, to, overwrite=True, say=quiet)
        assert (to / name).read_text() == "mine"
        (to / name).unlink()
        if name not in ("precious.txt", "stages/00000/notes.txt"):
            shutil.rmtree(to / name.split("/")[0])
    publish(finished_run, 1, to, overwrite=True, say=quiet)
    assert not (to / "stages" / "00000").exists()
    refuses("is inside the run", publish, finished_run, 0, finished_run / "stages" / "00009", say=quiet)


@pytest.mark.process
def test_nothing_but_listed_regular_files_is_published(finished_run: Path, tmp_path: Path) -> None:
    """N6: links were followed, and strays went along to the hub."""
    run = tmp_path / "run"
    shutil.copytree(finished_run, run, symlinks=True)
    secret = tmp_path / "secret"
    secret.write_text("SECRET KEY")
    for stray in (run / "stages" / "00001" / ".env", run / "checkpoints" / "stage00001-age00000" / ".env"):
        stray.write_text("TOKEN")
    (run / "stages" / "00001" / "notes.txt").symlink_to(secret)
    (run / "checkpoints" / "stage00001-age00000" / "notes.txt").symlink_to(secret)
    publish(run, 1, tmp_path / "set", weights=True, say=quiet)
    texts = [path.read_bytes() for path in (tmp_path / "set").rglob("*") if path.is_file()]
    assert not any(b"SECRET KEY" in text or text == b"TOKEN" for text in texts)
    stage = run / "stages" / "00001" / "stage.parquet"
    stage.rename(tmp_path / "moved.parquet")
    stage.symlink_to(tmp_path / "moved.parquet")
    refuses("it has to be a readable regular file, not a link", publish, run, 1, tmp_path / "other", say=quiet)
    assert not (tmp_path / "other").exists()


@pytest.mark.process
def test_a_damaged_file_is_named_by_its_own_name(finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run, symlinks=True)
    stage = run / "stages" / "00000" / "stage.parquet"
    content = bytearray(stage.read_bytes())
    content[len(content) // 2] ^= 1
    stage.write_bytes(content)
    with pytest.raises(UserError) as refusal:
        publish(run, 0, tmp_path / "set", say=quiet)
    assert str(stage) in str(refusal.value)
    assert ".partial" not in str(refusal.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.process
def test_a_token_that_the_model_lacks_is_named(finished_run: Path, tmp_path: Path) -> None:
    publish(finished_run, 0, tmp_path / "set", say=quiet)
    stage = tmp_path / "set" / "stages" / "00000"
    tables = tables_of(stage)
    ids = tables[0]["response_ids"].to_pylist()
    ids[0][0] = 10**6
    schema = tables[0].schema
    place = schema.names.index("response_ids")
    tables[0] = tables[0].set_column(place, schema.field(place), pa.array(ids, schema.field(place).type))
    rewritten(stage, tables)
    words = "--from", tmp_path / "set", "--set", f"run.dir={tmp_path / 'b'}"
    ended = mugrpo("optimize", finished_run.parent / "recipe.toml", *words, code=2)
    assert "the samples have token 1000000, and the model has" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.process
def test_a_published_stage_trains_only_with_what_made_it(finished_run: Path, tmp_path: Path) -> None:
    publish(finished_run, 0, tmp_path / "zero", say=quiet)
    publish(finished_run, 1, tmp_path / "one", say=quiet)
    recipe = finished_run.parent / "recipe.toml"
    here = f"run.dir={tmp_path / 'b'}"
    other = tmp_path / "other"
    shutil.copytree(finished_run.parent / "model", other)
    weights = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(weights[:-1] + b"!")
    with pytest.raises(UserError, match="has other weights than model, which sampled"):
        branch(load_recipe(recipe, [here, f"model.path={other}"]), tmp_path / "zero", 0)
    refuses("a stage that was published with --weights", branch, load_recipe(recipe, [here]), tmp_path / "one", 1)
    with pytest.raises(UserError, match=r"a branch cannot change rollout\.temperature"):
        optimize_alone(load_recipe(recipe, [here, "rollout.temperature=0.5"]), 0, tmp_path / "zero")
    damaged = tmp_path / "zero" / "published.json"
    damaged.write_text(damaged.read_text().replace("model", "modal", 1))
    refuses(r"published\.json: damaged", optimize_alone, load_recipe(recipe, [here]), 0, tmp_path / "zero")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("/home/me/hushed/rows.jsonl", "rows.jsonl"),
        ("mine@/home/me/hushed/rows.jsonl,gsm8k", "mine@rows.jsonl,gsm8k"),
        ("hushed/rows.parquet", "rows.parquet"),
        ("owner/name", "owner/name"),
        ("gsm8k,math", "gsm8k,math"),
    ],
)
def test_places_of_the_machine_are_cut_from_the_recipe(given: str, left: str) -> None:
    overrides = [f"data.train={given}", "model.path=/home/me/hushed/base", "run.dir=/home/me/hushed/run"]
    recipe = load_recipe(None, [*overrides, "track.wandb_project=hushed"])
    found, hidden = without_local_paths(recipe)
    assert found.data.train == left
    assert hidden == ["model.path", *(["data.train"] if given != left else [])]
    assert "hushed" not in found.model_dump_json()
    taught = load_recipe(None, ["objective.teacher=other", "auxiliary.other.model=/home/me/models/other"])
    published, hidden = without_local_paths(taught)
    assert published.auxiliary.by_name["other"].model == Path("other")
    assert "auxiliary.other" in hidden
    taught = load_recipe(None, ["objective.teacher=other", "auxiliary.other.model=Qwen/Qwen3-8B"])
    published, hidden = without_local_paths(taught)
    assert published.auxiliary.by_name["other"].model == Path("Qwen/Qwen3-8B")
    assert "auxiliary.other" not in hidden
    published, hidden = without_local_paths(load_recipe(None, ["model.path=Qwen/Qwen2.5-0.5B"]))
    assert hidden == []
    assert published.model.path == Path("Qwen/Qwen2.5-0.5B")


def test_a_model_from_the_hub_s_cache_is_named_with_its_revision() -> None:
    place = Path("/x/hub/models--Qwen--Qwen2.5-0.5B/snapshots/060db6499f32faf8b98477b0a26969ef7d8b9987")
    assert hub_name(place) == ("Qwen/Qwen2.5-0.5B", "060db6499f32faf8b98477b0a26969ef7d8b9987")
    assert hub_name(Path("/x/base")) == ("base", "")


class Hub:
    """The hub, as far as an upload asks it."""

    def __init__(self, files: list[str] | None) -> None:
        self.files, self.asked = files, list[tuple[str, Any]]()

    def repo_exists(self, name: str, repo_type: str) -> bool:
        return self.files is not None

    def file_exists(self, name: str, file: str, repo_type: str) -> bool:
        return file in (self.files or [])

    def create_repo(self, name: str, repo_type: str, private: bool) -> None:
        self.asked.append(("create", private))

    def upload_folder(self, **asked: Any) -> None:
        self.asked.append(("upload", asked["folder_path"]))


@pytest.mark.parametrize("public", [False, True])
def test_an_upload_is_private_unless_told_and_replaces_only_published_stages(
    public: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for files, created in ((None, [("create", not public)]), ([module.FILE_NAME], [])):
        hub = Hub(files)
        monkeypatch.setattr("huggingface_hub.HfApi", lambda hub=hub: hub)
        upload(tmp_path, "me/set", public, say=quiet)
        assert hub.asked == [*created, ("upload", tmp_path)]
    hub = Hub(["data.parquet"])
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    refuses("not a published stage", upload, tmp_path, "me/set", public, say=quiet)
    assert hub.asked == []
