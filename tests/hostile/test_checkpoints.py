"""Damaged checkpoints: every command ends with one sentence and nothing written, or rightly accepts what it read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints_convert import hf_to_megatron, megatron_to_hf, output, verify
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files import checkpoint_state
from mugrpo_megatron.files.durable import resumable
from tests import models
from tests.hostile.damage import ODD_JSON, ODD_TEXTS, damages
from tests.hostile.faults import disk, make_read_only, permissions_count

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint in two shards, with a tokenizer."""
    directory = tmp_path_factory.mktemp("hf")
    model = models.save_model(directory, num_hidden_layers=1, vocab_size=272, hidden_size=16, intermediate_size=24)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="25KB")
    build_arithmetic_tokenizer().save_pretrained(directory)
    (directory / "added_tokens.json").write_text('{"a": 3}')
    return directory


@pytest.fixture(scope="module")
def megatron(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted") / "megatron"
    hf_to_megatron.convert(hf, directory)
    return directory


@pytest.fixture(scope="module")
def trained(megatron: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that make a training checkpoint."""
    directory = tmp_path_factory.mktemp("trained") / "checkpoint"
    partial = resumable(directory)
    partial.mkdir()
    for name in (".metadata", "__0_0.distcp", "common.pt", "metadata.json"):
        shutil.copy(megatron / name, partial)
    state: dict[str, Any] = {"cursor": {"stage": 0, "age": 1, "updates": 1}, "updates_done": 1, "steps_done": 1}
    files = checkpoint_state.file_checksums(partial, 0, 1)
    checkpoint_state.publish(partial, directory, {**state, "model": {"family": "qwen2"}, "files": files})
    return directory


def to_megatron(hf: Path, out: Path) -> int:
    return hf_to_megatron.main(["--hf", str(hf), "--out", str(out)])


def to_hf(megatron: Path, like: Path, out: Path) -> int:
    return megatron_to_hf.main(["--megatron", str(megatron), "--out", str(out), "--like", str(like)])


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.fixture
def ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., bool]:
    """`ended_well` with the test's folder."""
    return partial(ended_well, tmp_path / "out", capsys)


def ended_well(
    out: Path, capsys: pytest.CaptureFixture[str], command: Callable[..., int], *inputs: Path, late: bool = False
) -> bool:
    """Whether the command accepts its inputs; otherwise it says one sentence and leaves nothing behind.

    With `late` it may have begun to write, as where it meets a value that is no number.
    """
    capsys.readouterr()
    code = command(*inputs, out)
    said = capsys.readouterr().err
    assert code in (0, 2), said
    assert said.count("\n") == (1 if code else 0), said
    assert said.isprintable() or said[:-1].isprintable(), repr(said)
    assert out.exists() == (code == 0)
    assert late or "NaN" in said or not resumable(out).exists(), said
    for left in (out, resumable(out)):
        shutil.rmtree(left, ignore_errors=True)
    return code == 0


def versions(clean: Path, count: int, seed: int, names: Collection[str] = ()) -> Iterator[tuple[str, Path]]:
    """(file, the directory with that file damaged), `count` for each file or those of `names`; whole in the end."""
    for number, path in enumerate(sorted(path for path in clean.iterdir() if path.name in names or not names)):
        whole = path.read_bytes()
        texts = ODD_TEXTS if path.suffix == ".json" else ODD_TEXTS[:3]
        for damaged in (*texts, *damages(whole, count, seed + number)):
            path.write_bytes(damaged)
            yield path.name, clean
        path.write_bytes(whole)


def test_weights_that_are_not_numbers(hf: Path, tmp_path: Path, ends_well: Callable[..., bool]) -> None:
    """They were converted without a word."""
    copy = Path(shutil.copytree(hf, tmp_path / "copy"))
    file = sorted(copy.glob("*.safetensors"))[0]
    values = load_file(file)
    values[sorted(values)[0]].view(-1)[1] = torch.nan
    save_file(values, file, metadata={"format": "pt"})
    assert not ends_well(to_megatron, copy, late=True)


READ = {".metadata", "__0_0.distcp", "config.json", output.RECORD}
"""Files of a converted checkpoint that are read."""

COUNTS = [pytest.param(3, 0, id="few"), pytest.param(100, 1, id="many", marks=pytest.mark.night)]
"""Damages for each file, and the seed."""


@pytest.mark.parametrize(("count", "seed"), COUNTS)
def test_a_damaged_hugging_face_checkpoint(
    hf: Path, tmp_path: Path, count: int, seed: int, ends_well: Callable[..., bool]
) -> None:
    clean = Path(shutil.copytree(hf, tmp_path / "copy"))
    for _, directory in versions(clean, count, seed):
        ends_well(to_megatron, directory)  # a damaged weight may be a weight, and what is not read is copied as it is
    assert to_megatron(clean, tmp_path / "out") == 0


@pytest.mark.parametrize("kind", ["megatron", "trained"])
@pytest.mark.parametrize(("count", "seed"), COUNTS)
def test_a_damaged_megatron_checkpoint_is_refused_or_still_gives_its_weights(
    hf: Path,
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    count: int,
    seed: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clean = Path(shutil.copytree(request.getfixturevalue(kind), tmp_path / "copy"))
    out, expected = tmp_path / "out", tensors(hf)
    for name, directory in versions(clean, count, seed, [*READ, "common.pt", checkpoint_state.STATE]):
        capsys.readouterr()
        code = to_hf(directory, hf, out)
        said = capsys.readouterr().err
        assert code in (0, 2)
        assert said.count("\n") == (1 if code else 0), said
        assert not resumable(out).exists()
        if code == 0:
            found = tensors(out)
            assert found.keys() == expected.keys()
            assert all(torch.equal(value, found[key]) for key, value in expected.items()), name
            shutil.rmtree(out)
            assert name not in (".metadata", "__0_0.distcp", "state.json"), "a checksum tells"
        assert verify.main(["--hf", str(hf), "--megatron", str(directory), "--no-logits"]) == code, name


@pytest.mark.parametrize(("count", "seed"), COUNTS)
def test_a_damaged_checkpoint_without_checksums(
    hf: Path, megatron: Path, tmp_path: Path, count: int, seed: int, ends_well: Callable[..., bool]
) -> None:
    """As other Megatron code writes them: then the index and the archives themselves have to be read with care."""
    clean = Path(shutil.copytree(megatron, tmp_path / "copy"))
    (clean / output.RECORD).unlink()
    for name in (".metadata", "__0_0.distcp"):
        whole = (clean / name).read_bytes()
        for damaged in damages(whole, 8 * count, seed):
            (clean / name).write_bytes(damaged)
            ends_well(to_hf, clean, hf, late=True)
        (clean / name).write_bytes(whole)


@pytest.mark.parametrize(
    "name", ["../model-00001-of-00002.safetensors", "/etc/passwd", "..", "", "a\0b", "x" * 300, "no such"]
)
def test_an_index_names_only_files_of_its_directory(
    hf: Path, tmp_path: Path, name: str, ends_well: Callable[..., bool]
) -> None:
    copy = Path(shutil.copytree(hf, tmp_path / "hf" / "copy"))
    for shard in copy.glob("*.safetensors"):
        shutil.copy(shard, copy.parent)
    index = json.loads((copy / INDEX).read_text())
    for tensor, file in index["weight_map"].items():
        if file.startswith("model-00001"):
            index["weight_map"][tensor] = name
    (copy / INDEX).write_text(json.dumps(index))
    assert not ends_well(to_megatron, copy)


def test_odd_values_in_an_index(hf: Path, tmp_path: Path, ends_well: Callable[..., bool]) -> None:
    copy = Path(shutil.copytree(hf, tmp_path / "copy"))
    index = json.loads((copy / INDEX).read_text())
    first = next(iter(index["weight_map"]))
    for odd in ODD_JSON[::3]:
        for spoiled in (odd, {"weight_map": odd}, {**index, "weight_map": {**index["weight_map"], first: odd}}):
            (copy / INDEX).write_text(json.dumps(spoiled))
            assert not ends_well(to_megatron, copy)


def test_odd_values_in_a_state(trained: Path, tmp_path: Path) -> None:
    """A state whose checksum fits is still checked: someone may have edited it."""
    copy = Path(shutil.copytree(trained, tmp_path / "copy"))
    state = checkpoint_state.read_state(copy)
    accepted = 0
    for field in state:
        for odd in ODD_JSON[::2]:
            if isinstance(odd, float) and odd != odd:
                continue
            checkpoint_state.write_checksummed_json(copy / checkpoint_state.STATE, "state", {**state, field: odd})
            with suppress(UserError):
                checkpoint_state.read_state(copy)
                accepted += 1
            checkpoint_state.first_damage(copy, 0, 1)
    assert accepted < 40
    for name in ("../checkpoint/.metadata", "/etc/passwd", "a\0b", "no such"):
        checkpoint_state.write_checksummed_json(
            copy / checkpoint_state.STATE, "state", {**state, "files": {**state["files"], name: "0"}}
        )
        assert name.split("/")[-1] in repr(checkpoint_state.first_damage(copy, 0, 1)).replace("\\\\", "\\").replace(
            "\\x00", "\0"
        )
    for name in state["files"]:
        fewer = {file: sha256 for file, sha256 in state["files"].items() if file != name}
        checkpoint_state.write_checksummed_json(copy / checkpoint_state.STATE, "state", {**state, "files": fewer})
        if name in (".metadata", "__0_0.distcp"):
            assert f"has no checksum of {name}" in str(checkpoint_state.first_damage(copy, 0, 1))


def test_a_full_disk_is_one_sentence_wherever_it_fills(
    hf: Path, megatron: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check for room is fooled, as by another process that writes meanwhile."""
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**40, 0, 2**40))
    codes: list[list[int]] = []
    for command in (lambda out: to_megatron(hf, out), lambda out: to_hf(megatron, hf, out)):
        codes.append([])
        for pages in (1, 2, 4, 7, 11, 15, 20, 26, 33, 59):
            with disk(tmp_path / "disk", pages * 4096) as place:
                capsys.readouterr()
                codes[-1].append(command(place / "out"))
                said = capsys.readouterr().err
                assert codes[-1][-1] in (0, 2)
                assert (place / "out").exists() == (codes[-1][-1] == 0)
                assert ("no space left" in said.lower() and said.count("\n") == 1) == (codes[-1][-1] == 2), said
    for each in codes:
        assert each[0] == 2
        assert each[-1] == 0
        assert each == sorted(each, reverse=True), "with more room it succeeds"


def test_a_read_only_disk(
    hf: Path, megatron: Path, tmp_path: Path, ends_well: Callable[..., bool], capsys: pytest.CaptureFixture[str]
) -> None:
    with disk(tmp_path / "disk", 2**22) as place:
        shutil.copytree(hf, place / "hf")
        shutil.copytree(megatron, place / "megatron")
        make_read_only(place)
        assert ends_well(to_megatron, place / "hf"), "only read"
        assert ends_well(to_hf, place / "megatron", place / "hf")
        assert not ended_well(place / "out", capsys, to_megatron, hf)
        assert not ended_well(place / "out", capsys, to_hf, megatron, hf)


def test_files_that_may_not_be_read(hf: Path, megatron: Path, tmp_path: Path, ends_well: Callable[..., bool]) -> None:
    like, source = (Path(shutil.copytree(clean, tmp_path / clean.name)) for clean in (hf, megatron))
    with permissions_count():
        for file in sorted(like.iterdir()):
            file.chmod(0)
            assert not ends_well(to_megatron, like), file
            file.chmod(0o600)
        for file in sorted(source.iterdir()):
            file.chmod(0)
            assert ends_well(to_hf, source, like) == (file.name not in READ), file
            file.chmod(0o600)
        for directory in (like, source):
            directory.chmod(0)
            assert not ends_well(to_hf, source, like)
            directory.chmod(0o700)


def test_directories_and_links_where_files_are_expected(
    hf: Path, megatron: Path, tmp_path: Path, ends_well: Callable[..., bool]
) -> None:
    for clean in (hf, megatron):
        for name in sorted(path.name for path in clean.iterdir()):
            for target in ("", "nowhere", name, "/dev/null"):  # a directory, and links: dangling, a loop, a device
                copy = Path(shutil.copytree(clean, tmp_path / "copy"))
                (copy / name).unlink()
                if target:
                    (copy / name).symlink_to(target)
                else:
                    (copy / name).mkdir()
                if clean is hf:
                    ends_well(to_megatron, copy)
                elif not ends_well(to_hf, copy, hf):
                    assert name in READ
                shutil.rmtree(copy)
