"""Weight files that lie about what they hold: safetensors headers refused before data is read, GGUF never opened."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from checkpoints_convert import hf_to_megatron
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.weights.families import read_architecture
from mugrpo_megatron.weights.safetensors_dir import open_checkpoint
from tests.hostile.outcome import dry_run, refused
from tests.tiny import save_model, write_recipe

Header = dict[str, Any]
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


def of_tensor(**values: Any) -> Callable[[Header], object]:
    """Changes fields of the final norm's entry."""
    return lambda header: header[NORM].update(values)


def overlap(header: Header) -> None:
    """The final norm's data is said to lie in the embedding's."""
    begin, end = header[NORM]["data_offsets"]
    start = header[EMBEDDING]["data_offsets"][0]
    header[NORM]["data_offsets"] = [start, start + end - begin]


LIES: dict[str, Callable[[Header], object]] = {
    "data beyond the file": of_tensor(data_offsets=[1 << 40, (1 << 40) + 128]),
    "data that ends before it begins": of_tensor(data_offsets=[128, 0]),
    "negative offsets": of_tensor(data_offsets=[-128, 0]),
    "offsets beyond 64 bits": of_tensor(data_offsets=[0, 1 << 70]),
    "a shape of 2^62 numbers": of_tensor(shape=[1 << 31, 1 << 31]),
    "a shape whose size wraps to that of the data": of_tensor(shape=[1 << 62, 1 << 62, 32]),
    "a negative shape": of_tensor(shape=[-32]),
    "a shape of no numbers": of_tensor(shape=[0]),
    "another type of the same size": of_tensor(dtype="I32"),
    "a type of half the size": of_tensor(dtype="F16"),
    "a type that there is not": of_tensor(dtype="F4096"),
    "no shape": lambda header: header[NORM].pop("shape"),
    "an entry that is a list": lambda header: header.update({NORM: []}),
    "two tensors in one place": overlap,
    "a tensor less than its data": lambda header: header.pop(NORM),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("lies") / "model")


def rewritten(path: Path, change: Callable[[Header], object]) -> None:
    """Change the header of a safetensors file; the data stays."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def check_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A conversion refuses the model in one sentence that names it, and leaves nothing; a run reads it alike."""
    before = sorted(tmp_path.rglob("*"))
    assert hf_to_megatron.main(["--hf", str(model), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert str(model) in said, said
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(UserError, match=re.escape(str(model))):
        open_checkpoint(model, read_architecture(model))


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(
    lie: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    rewritten(copy / "model.safetensors", LIES[lie])
    check_refused(copy, tmp_path, capsys)


@pytest.mark.parametrize("length", [0, 1, 1 << 26, (1 << 63) - 1, (1 << 64) - 1])
def test_a_length_of_the_header_that_lies_is_refused(
    length: int, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    path = copy / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    check_refused(copy, tmp_path, capsys)


@pytest.mark.parametrize("kept", [-1, 1000, 4, 0])
def test_a_file_that_was_not_downloaded_to_its_end_is_found_by_a_dry_run(
    kept: int, model: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    recipe = write_recipe(tmp_path / "recipe.toml", copy, tmp_path / "run")
    dry_run(recipe)
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused("train", recipe, "--dry-run", says=f"{path} is truncated or not a safetensors file")


OPENED: list[str] = []


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """The names of all files that Python opens in the block."""
    OPENED.clear()
    if not getattr(opened_files, "hooked", False):  # an audit hook cannot be removed
        sys.addaudithook(lambda event, arguments: OPENED.append(str(arguments[0])) if event == "open" else None)
        opened_files.hooked = True  # type: ignore[attr-defined]
    yield OPENED


GGUF = b"GGUF" + (3).to_bytes(4, "little") + (1 << 62).to_bytes(8, "little") * 2
"""A header that promises 2^62 tensors and as many fields, and nothing behind it."""


@pytest.mark.parametrize("name", ["model.gguf", "pytorch_model.bin", "model.pt"])
def test_other_weights_are_not_opened(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone they are no model; beside safetensors nobody reads them, and a conversion does not take them along."""
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    (copy / name).write_bytes(GGUF if name.endswith("gguf") else b"\x80\x04cos\nsystem\n.")
    with opened_files() as files:
        assert hf_to_megatron.main(["--hf", str(copy), "--out", str(tmp_path / "out")]) == 0
        assert not (tmp_path / "out" / name).exists()
        (copy / "model.safetensors").unlink()
        shutil.rmtree(tmp_path / "out")
        check_refused(copy, tmp_path, capsys)
        assert any(file.endswith("config.json") for file in files)
        assert not any(file.endswith(name) for file in files), name


def test_a_path_of_a_gguf_is_no_model(model: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(GGUF)
    recipe = write_recipe(tmp_path / "recipe.toml", tmp_path / "model.gguf", tmp_path / "run")
    with opened_files() as files:
        refused("train", recipe, "--dry-run", says="model.gguf")
        assert not any(file.endswith("model.gguf") for file in files)
