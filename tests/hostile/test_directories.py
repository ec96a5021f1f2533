"""Directories of evaluations and warm starts: each command writes only into its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from mugrpo_megatron.commands.warm_start import locked_warm_start
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.run.directory import file_lock
from mugrpo_megatron.terminal import visible
from tests.hostile.outcome import listing, refused

FOREIGN = ["problems.jsonl", "summary.json", "table.md", "engine.log"]


@pytest.mark.parametrize("name", FOREIGN)
def test_an_evaluation_keeps_its_hands_off_other_files(name: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"problem": "1+1=", "answer": 2}\n')
    before = listing(tmp_path)
    refused("eval", model, "--data", "arithmetic", "--out", tmp_path, says=f"{name} exists already")
    if name == "problems.jsonl":
        refused("eval", model, "--data", tmp_path / name, "--out", tmp_path, says="is the input")
    assert listing(tmp_path) == before


def test_an_evaluation_where_no_directory_can_be(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder" / "settings.json").mkdir(parents=True)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "settings.json").touch()
    before = listing(tmp_path)
    for place in ("file", "file/x", "loop", "folder", "damaged", "/dev/null"):
        refused("eval", model, "--data", "arithmetic", "--out", tmp_path / place)
    assert listing(tmp_path) == before


def test_sets_of_one_file_are_one_set(model: Path, tmp_path: Path) -> None:
    """Files of one name in two folders are two sets (tests/commands/test_eval.py); one file by two names is one."""
    data = tmp_path / "test.jsonl"
    data.write_text('{"problem": "1+1=", "answer": 2}\n')
    (tmp_path / "link.jsonl").symlink_to(data)
    os.link(data, tmp_path / "hard.jsonl")
    for other in (tmp_path / "." / "x" / ".." / "test.jsonl", tmp_path / "link.jsonl", tmp_path / "hard.jsonl", data):
        (tmp_path / "x").mkdir(exist_ok=True)
        refused("eval", model, "--data", data, other, "--out", tmp_path / "out", says="name it once")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["7", "[1]", "new\nline", "\x1b[2J"])
def test_a_model_directory_of_any_name(name: str) -> None:
    refused("eval", name, "--data", "arithmetic", says=f"model.path = {visible(name).replace(chr(10), ' ')}: not a")


def sft(folder: Path, **section: Any) -> Path:
    (folder / "r.toml").write_text(tomli_w.dumps({"sft": {"output": str(folder / "warm"), **section}}))
    return folder / "r.toml"


@pytest.mark.parametrize("kind", ["directory", "file", "dangling link", "empty directory"])
def test_a_warm_start_replaces_nothing_and_says_so_first(kind: str, tmp_path: Path) -> None:
    hf = tmp_path / "warm" / "hf"
    hf.parent.mkdir()
    if "directory" in kind:
        hf.mkdir()
    if kind == "directory":
        (hf / "weights").write_text("x")
    elif kind == "file":
        hf.write_text("x")
    elif kind == "dangling link":
        hf.symlink_to("nowhere")
    recipe = sft(tmp_path)
    before = listing(tmp_path)
    refused("sft", recipe, says=f"{hf} exists")
    assert listing(tmp_path) == before


@pytest.mark.parametrize("content", ["[sft]\nhidden = 64\n", "x = 1\n", "["])
def test_a_warm_start_of_another_recipe_stays(content: str, tmp_path: Path) -> None:
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm" / "recipe.toml").write_text(content)
    refused("sft", sft(tmp_path))
    assert list(listing(tmp_path / "warm")) == ["recipe.toml"]


def test_a_warm_start_where_no_directory_can_be(tmp_path: Path) -> None:
    (tmp_path / "warm").write_text("precious")
    refused("sft", sft(tmp_path), says="exists and is not a directory")
    refused("sft", sft(tmp_path, output=str(tmp_path / "warm" / "x")), says="is not a directory")
    refused("sft", sft(tmp_path, output="/dev/null"), says="exists and is not a directory")


def test_two_commands_do_not_write_one_directory(tmp_path: Path) -> None:
    with (
        locked_warm_start(tmp_path / "warm"),
        pytest.raises(UserError, match="in use by process"),
        file_lock(tmp_path / "warm" / ".lock"),
    ):
        pass
    with file_lock(tmp_path / "warm" / ".lock"):
        pass
