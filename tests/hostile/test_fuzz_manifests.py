"""Stages whose manifest is signed and whose files hold anything: read as a stage, or refused in one sentence.

Whoever publishes a stage can sign what he likes. Nothing outside the stage's directory is read or written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.files.durable import write_checksummed_json
from mugrpo_megatron.run.published import FILE_NAME, have_logprobs, read_published
from mugrpo_megatron.run.published import FORMAT as PUBLISHED_FORMAT
from mugrpo_megatron.stages.store import StageStore
from tests.hostile.fuzz import changed
from tests.hostile.outcome import listing, sentence
from tests.hostile.rundir import GROUPS, PROMPTS, UPDATES
from tests.stages.test_signed import rewritten, signed, stage, tables_of

pytestmark = pytest.mark.night


@pytest.fixture(scope="module", params=[True, False], ids=["sealed", "open"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stage(tmp_path_factory.mktemp("whole") / "00000", request.param)


def read(directory: Path) -> None:
    """All that `publish`, `optimize` and `seal` read of a stage."""
    store = StageStore(directory)
    if store.sealed:
        store.verify()
        store.rewards()
        store.statistics()
        have_logprobs(store)
        for update in range(store.updates):
            assert store.read_update(update, with_text=True)
    elif not set(range(GROUPS)) - store.verified_groups():
        store.seal(UPDATES, PROMPTS)
        read(directory)


def judged(whole: Path, folder: Path, act: Callable[[Path], object]) -> str:
    """The sentence about a copy on which `act` was done; nothing beside the copy changes."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder / "00000")
    (folder / "secret.parquet").write_bytes((whole / next(whole.glob("*.parquet")).name).read_bytes())
    act(folder / "00000")
    before = {name: data for name, data in listing(folder).items() if not name.startswith("00000")}
    said = sentence(lambda: read(folder / "00000"))
    assert {name: data for name, data in listing(folder).items() if not name.startswith("00000")} == before
    return said


@given(st.data())
def test_a_manifest(whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    body = data.draw(changed(json.loads((whole / "manifest.json").read_text())["stage"]))
    judged(whole, tmp_path_factory.getbasetemp() / "manifest", lambda folder: signed(folder, body))


VALUES: dict[str, Callable[[list[Any]], list[Any]]] = {
    "nulls": lambda values: [None] * len(values),
    "one null": lambda values: [None, *values[1:]],
    "reversed": lambda values: values[::-1],
    "the first again": lambda values: values[:1] * len(values),
    "empty": lambda values: [type(one)() for one in values],
    "negative": lambda values: [[-one for one in row] if isinstance(row, list) else -row for row in values],
    "not finite": lambda values: [float("nan")] * len(values),
    "inner nulls": lambda values: [[None]] * len(values),
    "more": lambda values: [one * 2 for one in values],
}


def other(tables: list[pa.Table], kind: str, name: str, change: str) -> list[pa.Table]:
    """The tables with a change; ValueError, TypeError or an ArrowException where there is no such table."""
    names = tables[0].schema.names
    match kind:
        case "values":
            arrays = [pa.array(VALUES[change](one[name].to_pylist()), one[name].type) for one in tables]
            return [
                one.set_column(names.index(name), pa.field(name, array.type), array)
                for one, array in zip(tables, arrays, strict=True)
            ]
        case "types":
            return [one.set_column(names.index(name), name, pa.array([True] * len(one))) for one in tables]
        case "drop":
            return [one.drop_columns([name]) for one in tables]
        case "add":
            return [one.append_column("extra", pa.array([1] * len(one))) for one in tables]
        case "rename":
            return [one.rename_columns(["x" if each == name else each for each in names]) for one in tables]
        case "order":
            return [one.select(names[::-1]) for one in tables]
        case "more":
            return [*tables, tables[0]]
        case "fewer":
            return tables[:-1] or [tables[0].slice(0, 1)]
        case "rows":
            return [one.slice(0, len(one) - 1) for one in tables]
        case _:
            return [one.slice(0, 0) for one in tables]


KINDS = ["values"] * 6 + ["types", "drop", "add", "rename", "order", "more", "fewer", "rows", "none"]


@given(st.data())
def test_a_file_with_its_checksums(whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    tables = tables_of(whole)
    kind, change = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(sorted(VALUES)))
    name = data.draw(st.sampled_from(tables[0].schema.names))
    try:
        new = other(tables, kind, name, change)
    except (ValueError, TypeError, pa.ArrowException):
        return
    said = judged(whole, tmp_path_factory.getbasetemp() / "file", lambda folder: rewritten(folder, new))
    fails = kind not in ("values", "rows", "more") or (name == "reward" and change == "not finite")
    assert said or not fails


@given(changed({"run": "a", "stage": 0, "model": "m", "revision": "", "weights": {"a": "b"}, "hidden": ["x"],
                "logprobs": True}))  # fmt: skip
def test_what_a_published_stage_says(tmp_path_factory: pytest.TempPathFactory, body: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    write_checksummed_json(folder / FILE_NAME, "published", body, format=PUBLISHED_FORMAT)
    sentence(lambda: read_published(folder))
