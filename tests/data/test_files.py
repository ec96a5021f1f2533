"""Missing data files, and names like theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from mugrpo_megatron.data.files import check_file, names_alike, rows
from mugrpo_megatron.data.problems import absent, check_files, load
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.sections import DataSection


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for name in ("train.jsonl", "test.jsonl", "notes.md", "valid.parquet"):
        (tmp_path / "data" / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("missing", "alike"),
    [
        ("data/trian.jsonl", ["data/train.jsonl"]),
        ("data/Train.jsonl", ["data/train.jsonl"]),
        ("data/train.json", ["data/train.jsonl"]),
        ("dta/train.jsonl", ["data"]),
        ("data/train.jsonl/more.jsonl", []),
        ("data/problems.csv", []),
        ("elsewhere/deep/problems.csv", []),
    ],
)
def test_names_alike_are_those_where_the_path_goes_astray(folder: Path, missing: str, alike: list[str]) -> None:
    found = [str(path.relative_to(folder)) for path in names_alike(folder / missing)]
    assert found[:1] == alike[:1]
    assert (not found) == (not alike)


def test_a_relative_name_is_compared_with_the_current_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "data")
    with pytest.raises(UserError, match=r"^trian.jsonl does not exist; did you mean train.jsonl"):
        check_file(Path("trian.jsonl"))
    with pytest.raises(UserError, match=r"'train' is not a file, .*did you mean train.jsonl"):
        absent("train")
    with pytest.raises(UserError, match=r"did you mean gsm8k\?"):
        absent("gsm8kk")


def test_a_missing_file_is_refused_by_all_who_read_it(folder: Path) -> None:
    missing = f"{folder}/data/trian.jsonl"
    for refuses in (
        lambda: list(rows(Path(missing))),
        lambda: absent(f"arithmetic,{missing}"),
        lambda: check_files(f"gsm8k,{missing}"),
        lambda: check_files(f"gsm8k@{missing}"),
        lambda: load(missing, DataSection()),
    ):
        with pytest.raises(UserError, match=r"did you mean .*train\.jsonl"):
            refuses()


def test_sets_of_the_hub_are_absent_and_a_missing_file_is_refused(folder: Path) -> None:
    assert absent("arithmetic, gsm8k, owner/name") == ["gsm8k", "owner/name"]
    for refuses in (check_files, absent):
        with pytest.raises(UserError, match=r"problems.csv does not exist or is not a file: check the path"):
            refuses(f"gsm8k, {folder}/problems.csv")


def test_a_directory_is_told_by_its_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match=r"is a directory: name the files in it, such as .*data/test\.jsonl"):
        check_files(str(folder / "data"))
    with pytest.raises(UserError, match=r"of which it has none"):
        load(str(folder / "empty"), DataSection())
    monkeypatch.chdir(folder.parent)
    name = f"{folder.name}/data"  # as a set of the hub is written
    with pytest.raises(UserError, match=rf"is a directory.*, or {name}:SPLIT for the hub's"):
        load(name, DataSection())
