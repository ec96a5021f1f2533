"""Rollouts that are not there, output that writes to the terminal, and policies that cannot be loaded."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.run.directory import open_directory
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.terminal import visible
from tests.commands.test_rollouts import sample
from tests.hostile.outcome import answered, command, refused
from tests.tiny import write_recipe

EVIL = "\x1b]0;owned\x07\x1b[2J\x1b]52;c;eA==\x07\r\x9b31m\u202e[bold]\u2028"


@pytest.fixture(scope="module")
def run_dir(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two groups; the first response of each writes to the terminal."""
    folder = tmp_path_factory.mktemp("run")
    shape = {"schedule": {"stages": 1, "updates_per_stage": 2}, "rollout": {"prompts_per_update": 1}}
    recipe = load_recipe(write_recipe(folder / "recipe.toml", model, folder / "run", **shape))
    with open_directory(recipe) as directory:
        store = StageStore(directory.stage(0))
        for group in range(2):
            store.append([sample(model, group, EVIL, 1.0), sample(model, group, "46", 0.0)])
        store.seal(2, 1)
    return folder / "run"


@pytest.mark.parametrize("options", ["", "--group 0", "--group 1 --policy {model}", "--json"])
def test_model_output_does_not_reach_the_terminal_raw(options: str, model: Path, run_dir: Path) -> None:
    ended = command("rollouts", run_dir, *options.format(model=model).split())
    assert ended.code == 0
    assert ended.out.replace("\n", "").isprintable()
    assert ("\\u001b]0;owned\\u0007" if options == "--json" else "\\x1b]0;owned\\x07") in ended.out


MISSING = ["--group 1000", "--group -1", "--limit -1", "--update 2", "--stage 1", "--stage 99999999999999999999"]
MISSING += ["--group 1.5", "--grep [", "--right --wrong", "--min-reward x", "--advantage none", "--vetoed"]
MISSING += ["--policy nowhere", "--policy /dev/null", "--set objective.veto=x"]


@pytest.mark.parametrize("options", MISSING)
def test_rollouts_that_are_not_there(options: str, run_dir: Path) -> None:
    refused("rollouts", run_dir, *options.split())


@pytest.mark.parametrize(
    "options", ["--limit 0", "--min-reward nan", "--max-reward -inf", "--limit 99999999999999999999"]
)
def test_selections_without_responses(options: str, run_dir: Path) -> None:
    assert len(re.findall(r"\s46\s", answered("rollouts", run_dir, *options.split()).out)) in (0, 2)


CODE = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
CONFIGS: dict[str, dict[str, Any]] = {
    "foreign code": {"auto_map": CODE, "model_type": "evil"},
    "another shape": {"intermediate_size": 128},
    "more layers": {"num_hidden_layers": 5},
}
WEIGHTS: dict[str, Callable[[Path], object]] = {
    "no weights": lambda path: path.unlink(),
    "a pickle": lambda path: path.rename(path.with_name("pytorch_model.bin")),
    "half the weights": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a long header": lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:]),
}


@pytest.mark.parametrize("name", [*CONFIGS, *WEIGHTS])
def test_a_policy_that_cannot_be_loaded(name: str, model: Path, run_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    (copy / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    if name in WEIGHTS:
        WEIGHTS[name](copy / "model.safetensors")
    else:
        config = json.loads((copy / "config.json").read_text())
        changed = CONFIGS[name]
        assert all(config.get(key) != value for key, value in changed.items())
        (copy / "config.json").write_text(json.dumps(config | changed))
    refused("rollouts", run_dir, "--policy", copy)
    assert not (tmp_path / "ran").exists()


def test_folders_next_to_the_stages(run_dir: Path) -> None:
    """A backup is not a stage, and a newer stage that is not sealed is mentioned."""
    (run_dir / "stages" / "00000.bak").mkdir()
    (run_dir / "stages" / "old").mkdir()
    (run_dir / "stages" / "00001").mkdir()
    ended = command("rollouts", run_dir)
    assert ended.code == 0
    assert "stage 1 is not sealed, so stage 0 is shown" in ended.out


def test_visible_text_shows_every_character(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    for code in [*range(0x100), 0x200E, 0x202E, 0x2028, 0x2066, 0xFEFF, 0xD800, 0x1F600, 0xE0041]:
        shown = visible(chr(code))
        assert shown.isprintable() or shown in "\n\t\xa0"
        assert shown == chr(code) or shown.startswith("\\")
    assert visible("naïve 数 ⟦«»⟧ 😀\n\t") == "naïve 数 ⟦«»⟧ 😀\n\t"
    assert tokenizer.decode(tokenizer.encode(EVIL)) == EVIL
