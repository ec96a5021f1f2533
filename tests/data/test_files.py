"""Missing data files and names like theirs; rows of multiple choice whose options the model would not see."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.data.files import check_file, names_alike, rows, unseen_options
from mugrpo_megatron.data.prepare import read_problems
from mugrpo_megatron.data.problems import absent, check_files, load
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.scoring import RewardSection
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


TEXTS = ["Paris", "Rome", "Oslo", "Bern"]
SHAPES: dict[str, dict[str, Any]] = {
    "MMLU": {"choices": TEXTS},
    "ARC": {"choices": {"text": TEXTS, "label": ["A", "B", "C", "D"]}},
    "AQuA": {"options": [f"{letter}){text}" for letter, text in zip("ABCD", TEXTS, strict=True)]},
    "by letter": {"options": dict(zip("ABCD", TEXTS, strict=True))},
    "objects": {"options": [{"label": "A", "text": text} for text in TEXTS]},
    "printed": {"options": str(TEXTS)},
    "JSON text": {"choices": json.dumps(TEXTS)},
    "numbers": {"choices": [12, 3.5]},
    "MedMCQA": dict(zip(("opa", "opb", "opc", "opd"), TEXTS, strict=True)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_options_are_found_unless_they_stand_in_the_question(shape: str) -> None:
    row = SHAPES[shape]
    named = f"`{next(iter(row))}`"
    assert unseen_options(row, "Capital of Norway?").startswith(named)
    seen = "Capital of Norway? 12 3.5 " + " ".join(
        f"{letter}){text}" for letter, text in zip("ABCD", TEXTS, strict=True)
    )
    assert unseen_options(row, seen) == ""
    assert unseen_options(row, "Paris or Rome, or Oslo?").startswith(named)


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"options": None},
        {"options": ""},
        {"options": "any"},
        {"options": ["one"]},
        {"options": {"strict": True}},
        {"options": "[broken"},
        {"options": [None, {}]},
        {"choices": 4},
        {"opa": "x", "opb": "y"},
        {"A": "x", "B": "", "C": "z", "D": "w"},
    ],
)
def test_other_columns_of_such_names_are_left_alone(row: dict[str, Any]) -> None:
    assert unseen_options(row, "Which?") == ""


def test_they_are_told_once_for_each_set(tmp_path: Path) -> None:
    seen = {"question": "Which of Paris, Rome?", "answer": "1", "choices": ["Paris", "Rome"]}
    rows = [{"question": f"Which {n}?", "answer": "1", "choices": TEXTS} for n in range(3)]
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, seen]))
    read = load(f"{tmp_path / 'a.jsonl'}, {tmp_path / 'b.jsonl'}", DataSection())
    unseen = [note for note in read.notes if "options" in note]
    assert [note[:60] for note in unseen] == [
        f"{name}: 3 rows have options in `choices` that are not in the quest"[:60] for name in "ab"
    ]
    assert "write each row's options into its question" in unseen[0]
    section = DataSection(train=str(tmp_path / "a.jsonl"), eval="arithmetic")
    assert len([note for note in read_problems(section, RewardSection()).notes if "options" in note]) == 1


def test_a_chat_may_hold_them_in_another_turn(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": " ".join(TEXTS)}, {"role": "user", "content": "Which?"}]
    row = {"prompt": messages, "answer": "1", "choices": TEXTS}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    assert [note for note in load(str(tmp_path / "a.jsonl"), DataSection()).notes if "options" in note] == []


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_said_to_be_missing(make: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a\n")
    make(tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match=r"rows\.jsonl does not exist or is not a file: check the path"):
        check_file(tmp_path / "rows.jsonl")
