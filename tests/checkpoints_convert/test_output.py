"""A conversion replaces nothing that it did not write, checks what it continues, and refuses at its start."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from checkpoints_convert import hf_to_megatron, megatron_to_hf
from checkpoints_convert.output import RECORD, Output, open_output
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import resumable, write_checksummed_json
from tests import models
from tests.hostile.damage import flip
from tests.hostile.faults import permissions_count

Contents = dict[str, bytes]


@dataclass(frozen=True)
class Conversion:
    """Either command with its inputs."""

    main: Callable[[list[str]], int]
    given: list[str]
    source: Path

    def __call__(self, out: Path | str, *options: str) -> int:
        return self.main([*self.given, "--out", str(out), *options])


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "hf"
    models.save_model(directory, num_hidden_layers=2)
    return directory


@pytest.fixture(scope="module")
def megatron(hf: Path) -> Path:
    hf_to_megatron.convert(hf, hf.parent / "megatron")
    return hf.parent / "megatron"


@pytest.fixture(params=["hf_to_megatron", "megatron_to_hf"])
def convert(request: pytest.FixtureRequest, hf: Path, megatron: Path, monkeypatch: pytest.MonkeyPatch) -> Conversion:
    """Either conversion, in several files, as a function of --out and options."""
    monkeypatch.setattr(hf_to_megatron, "PART_BYTES", 20_000)
    monkeypatch.setattr(megatron_to_hf, "divide", lambda specs, _: divide(specs, 20_000))
    if request.param == "hf_to_megatron":
        return Conversion(hf_to_megatron.main, ["--hf", str(hf)], hf)
    return Conversion(megatron_to_hf.main, ["--megatron", str(megatron), "--like", str(hf)], megatron)


divide = megatron_to_hf.divide


def contents(directory: Path) -> Contents:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def data_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.suffix in (".distcp", ".safetensors"))


def refused(convert: Conversion, capsys: pytest.CaptureFixture[str], out: Path | str, *options: str) -> str:
    capsys.readouterr()
    assert convert(out, *options) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1, message
    return message


@contextmanager
def stop_after(count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C once `count` data files are finished."""
    finish = Output.finish

    def finish_and_stop(self: Output, *given: Any) -> None:
        nonlocal count
        finish(self, *given)
        count -= 1
        if count == 0:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Output, "finish", finish_and_stop)
        yield


SPOIL: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda file: None,
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "a flipped bit": flip,
    "missing": lambda file: file.unlink(),
    "a directory": lambda file: to_directory(file),
    "null": lambda file: file.write_text("null"),
}


def to_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("of", ["data", "note", "record"])
def test_a_continued_conversion_trusts_only_what_is_whole(
    convert: Conversion, of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert convert(tmp_path / "whole") == 0
    expected = contents(tmp_path / "whole")
    for number, (what, spoil) in enumerate(SPOIL.items()):
        out = tmp_path / str(number)
        with stop_after(2, monkeypatch):
            assert convert(out) == 130
        partial = resumable(out)
        first, second = data_files(partial)
        target = {"data": first, "note": partial / f"{first.name}.done", "record": partial / RECORD}[of]
        spoil(target)
        for file in data_files(partial):
            os.utime(file, (1, 1))
        if of == "record" and what == "missing":
            target.touch()  # without any record the directory is taken for a user's
        assert convert(out) == 0, what
        assert contents(out) == expected, what
        kept = {file.name for file in data_files(out) if file.stat().st_mtime == 1}
        if what == "nothing":
            assert kept == {first.name, second.name}
        elif of != "record":
            assert kept == {second.name}, "only what was spoilt is written again"


def test_another_source_or_option_starts_over(tmp_path: Path) -> None:
    for recipe in ({"source": "old"}, {"source": "new"}):
        with suppress(ZeroDivisionError), open_output(tmp_path / "out", recipe, 0, False) as opened:
            assert [path.name for path in opened.directory.iterdir()] == [RECORD]
            (opened.directory / "leftover").touch()
            raise ZeroDivisionError


def spellings(path: Path, folder: Path) -> Iterator[Path | str]:
    """The same directory, written differently."""
    folder.mkdir(exist_ok=True)
    yield path
    yield f"{path}/"
    yield f"{path}/../{path.name}"
    (folder / "link").symlink_to(path)
    yield folder / "link"
    (folder / "to the parent").symlink_to(path.parent)
    yield folder / "to the parent" / path.name
    yield os.path.relpath(path)


def test_an_input_is_never_the_output(
    convert: Conversion, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(hf.parent)
    for number, out in enumerate(spellings(convert.source, tmp_path / "links")):
        assert "are one directory" in refused(convert, capsys, out, "--overwrite"), out
        assert "inside one another" in refused(convert, capsys, Path(out) / f"inside-{number}", "--overwrite")
    for above in (hf.parent, hf.parent.parent, Path("/")):
        assert "inside one another" in refused(convert, capsys, above, "--overwrite")
    assert contents(hf.parent) == before


def test_what_exists_is_not_replaced(convert: Conversion, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("a user's")
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "precious").write_text("a user's")
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    before = contents(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    for name in names:
        assert "exists already" in refused(convert, capsys, tmp_path / name)
        assert "is not the output of a conversion" in refused(convert, capsys, tmp_path / name, "--overwrite")
    assert contents(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_overwrite_replaces_a_conversion_and_nothing_else(
    convert: Conversion, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert convert(out) == 0
    expected = contents(out)
    (out / "config.json").write_text("edited")
    assert convert(out, "--overwrite") == 0
    assert contents(out) == expected
    (out / "notes.txt").write_text("a user's")
    assert "also holds 'notes.txt'" in refused(convert, capsys, out, "--overwrite")
    assert (out / "notes.txt").read_text() == "a user's"
    (out / "notes.txt").unlink()
    (out / RECORD).write_text("{}")
    assert "is not the output of a conversion" in refused(convert, capsys, out, "--overwrite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_what_appears_meanwhile_is_kept(
    convert: Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    seal = Output.seal

    def seal_too_late(self: Output) -> None:
        seal(self)
        out.mkdir()
        (out / "precious").touch()

    monkeypatch.setattr(Output, "seal", seal_too_late)
    assert "was created meanwhile" in refused(convert, capsys, out)
    assert [path.name for path in out.iterdir()] == ["precious"]
    assert data_files(resumable(out))


def test_a_directory_with_the_temporary_name_is_not_emptied(
    convert: Conversion, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    partial = resumable(tmp_path / "out")
    partial.mkdir()
    (partial / "precious").touch()
    assert "has files that no conversion wrote ('precious')" in refused(convert, capsys, tmp_path / "out")
    assert (partial / "precious").exists()
    shutil.rmtree(partial)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / RECORD).touch()
    partial.symlink_to("elsewhere")
    refused(convert, capsys, tmp_path / "out")
    assert (tmp_path / "elsewhere" / RECORD).exists()


def test_two_at_once_do_not_write_one_directory(
    convert: Conversion, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(ZeroDivisionError), open_output(tmp_path / "out", {}, 0, False) as other:
        (other.directory / ".x.0123abcd.partial").touch()
        assert "another conversion is writing" in refused(convert, capsys, tmp_path / "out")
        assert (other.directory / ".x.0123abcd.partial").exists()
        raise ZeroDivisionError
    assert convert(tmp_path / "out") == 0


def test_a_note_of_another_shape_costs_its_file(tmp_path: Path) -> None:
    output = Output(tmp_path)
    for body in (3, {}, {"bytes": 1, "sha256": "0"}):
        (tmp_path / "x").write_bytes(b"1")
        write_checksummed_json(tmp_path / "x.done", "file", body)
        assert output.finished("x") is None
        assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_refused_at_the_start(
    convert: Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir(mode=0o500)
    for module in (hf_to_megatron, megatron_to_hf):
        monkeypatch.setattr(module, "open_output", pytest.fail)
    assert "is not a directory" in refused(convert, capsys, tmp_path / "file" / "a" / "out")
    with permissions_count():
        assert "cannot be written" in refused(convert, capsys, tmp_path / "closed" / "a" / "out")
    assert not list((tmp_path / "closed").iterdir())


def test_the_output_lists_its_checksums(convert: Conversion, tmp_path: Path) -> None:
    assert convert(tmp_path / "out") == 0
    body = json.loads((tmp_path / "out" / RECORD).read_text())["conversion"]
    assert body["files"].keys() == {path.name for path in (tmp_path / "out").iterdir()} - {RECORD}


def test_a_damaged_record_is_not_passed_over(
    hf: Path, megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(megatron, tmp_path / "m")
    sealed: list[bytes] = []
    for body in (3, {}, {"files": [1]}):
        write_checksummed_json(tmp_path / "sealed", "conversion", body)
        sealed.append((tmp_path / "sealed").read_bytes())
    for content in (b"", b"{}", b"[" * 100_000, b"\xff", *sealed):
        (tmp_path / "m" / RECORD).write_bytes(content)
        given = ["--megatron", str(tmp_path / "m"), "--like", str(hf)]
        message = refused(Conversion(megatron_to_hf.main, given, megatron), capsys, tmp_path / "out")
        assert "conversion.json is damaged" in message


def test_an_error_of_ours_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no space left"), open_output(tmp_path / "out", {}, 0, False):
        raise RuntimeError from OSError(28, "full")
    with pytest.raises(RuntimeError, match="a bug"), open_output(tmp_path / "out", {}, 0, False):
        raise RuntimeError("a bug")
