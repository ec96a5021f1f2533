"""`~` in paths of recipes and of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mugrpo_megatron.files.home import expanded, expanded_words
from mugrpo_megatron.recipe import load_recipe


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_home_directory_stands_where_a_path_begins(home: Path) -> None:
    assert expanded("~/a.jsonl,gsm8k@~/b.parquet") == f"{home}/a.jsonl,gsm8k@{home}/b.parquet"
    assert expanded("python ~/agent.py") == f"python {home}/agent.py"
    assert expanded("~") == str(home)
    for text in ("a~b", "x/~y", "3~4", "~nobody-of-this-name/x"):
        assert expanded(text) == text


def test_words_of_a_command(home: Path) -> None:
    words = ["score", "~/in.jsonl", "--out=~/out.jsonl", "--set", "data.system_prompt=~/", "--grep", "a ~/ b"]
    assert expanded_words(words) == [
        "score",
        f"{home}/in.jsonl",
        f"--out={home}/out.jsonl",
        "--set",
        "data.system_prompt=~/",
        "--grep",
        "a ~/ b",
    ]


def test_every_path_of_a_recipe(home: Path) -> None:
    Path(home, "base.toml").write_text('[run]\ndir = "~/runs/one"\n', encoding="utf-8")
    Path("mine.toml").write_text('base = "~/base.toml"\n[data]\ntrain = "~/a.jsonl,~/b.jsonl"\n', encoding="utf-8")
    recipe = load_recipe(
        Path("mine.toml"),
        ["model.path=~/model", "sft.train=~/sft.jsonl", "data.system_prompt=~/kept", "rollout.agent=python ~/a.py"],
    )
    assert recipe.run.dir == home / "runs/one"
    assert recipe.data.train == f"{home}/a.jsonl,{home}/b.jsonl"
    assert recipe.model.path == home / "model"
    assert recipe.sft.train == f"{home}/sft.jsonl"
    assert recipe.rollout.agent == f"python {home}/a.py"
    assert recipe.data.system_prompt == "~/kept"
