"""Stages whose manifest is signed and whose files hold anything: read as a stage, or refused in one sentence.

Whoever publishes a stage can sign what he likes. Nothing outside the stage's directory is read or written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.files.durable import digest, write_sealed
from mugrpo_megatron.run.published import FILE_NAME, have_logprobs, read_published
from mugrpo_megatron.run.published import FORMAT as PUBLISHED_FORMAT
from mugrpo_megatron.stages.manifest import FORMAT, parquet_spans, read_manifest
from mugrpo_megatron.stages.schema import training_columns
from mugrpo_megatron.stages.store import StageStore
from tests.hostile.fuzz import changed
from tests.hostile.outcome import listing, sentence
from tests.hostile.rundir import GROUPS, PROMPTS, UPDATES, group

pytestmark = pytest.mark.night


def stage(folder: Path, sealed: bool) -> Path:
    store = StageStore(folder)
    for index in range(GROUPS):
        store.append(group(index, 0))
    store.flush()
    if sealed:
        store.seal(UPDATES, PROMPTS)
    return folder


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
            assert store.read_update(update, whole=True)
    elif not set(range(GROUPS)) - store.present():
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


def signed(directory: Path, body: Any) -> None:
    write_sealed(directory / "manifest.json", "stage", body, format=FORMAT)


@given(st.data())
def test_a_manifest(whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    body = data.draw(changed(json.loads((whole / "manifest.json").read_text())["stage"]))
    judged(whole, tmp_path_factory.getbasetemp() / "manifest", lambda folder: signed(folder, body))


VALUES: dict[str, Callable[[pa.Table, str], pa.Array]] = {
    "other types": lambda table, name: (
        table[name].cast(pa.string()) if name == "reward" else pa.array([1] * len(table))
    ),
    "nulls": lambda table, name: pa.array([None] * len(table), table[name].type),
    "one null": lambda table, name: pa.array([None, *table[name].to_pylist()[1:]], table[name].type),
    "reversed": lambda table, name: pa.array(table[name].to_pylist()[::-1], table[name].type),
    "the first again": lambda table, name: pa.array(table[name].to_pylist()[:1] * len(table), table[name].type),
    "empty": lambda table, name: pa.array([type(one)() for one in table[name].to_pylist()], table[name].type),
    "negative": lambda table, name: pa.array(
        [[-one for one in row] if isinstance(row, list) else -row for row in table[name].to_pylist()], table[name].type
    ),
    "not finite": lambda table, name: pa.array(np.full(len(table), np.nan), pa.float64()),
    "inner nulls": lambda table, name: pa.array([[None] for _ in range(len(table))], table[name].type),
}
HARMLESS = {"advantage", "components", "text", "gold", "extracted", "why", "row", "problem", "finish_reason"}


def rewritten(directory: Path, tables: list[pa.Table]) -> None:
    """Put the tables into the stage's first file, each as a row group, and sign what they are."""
    manifest = read_manifest(directory)
    file = manifest.sealed.file if manifest.sealed else manifest.shards[0].file
    with pq.ParquetWriter(directory / file, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(1, len(table)))
    body = asdict(manifest)
    if manifest.sealed:
        spans = parquet_spans(directory / file, training_columns(tables[0].schema))
        parts = [[asdict(one) for one in part] for part in spans[:2]]
        body["sealed"] |= {"row_groups": parts[0], "told": parts[1], "footer": asdict(spans[2])}
    else:
        body["shards"][0]["whole"] = asdict(digest(directory / file))
    signed(directory, body)


@given(st.data())
def test_a_file_with_its_checksums(whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    manifest = read_manifest(whole)
    with pq.ParquetFile(whole / (manifest.sealed.file if manifest.sealed else manifest.shards[0].file)) as file:
        tables = [file.read_row_group(index) for index in range(file.num_row_groups)]
    kind = data.draw(st.sampled_from(["values", "drop", "add", "rename", "order", "more", "fewer", "rows", "empty"]))
    name = data.draw(st.sampled_from(tables[0].schema.names))
    change = data.draw(st.sampled_from(sorted(VALUES)))
    place = tables[0].schema.names.index(name)

    def act(directory: Path) -> None:
        new = list(tables)
        match kind:
            case "values":
                new = [one.set_column(place, name, VALUES[change](one, name)) for one in tables]
            case "drop":
                new = [one.drop_columns([name]) for one in tables]
            case "add":
                new = [one.append_column("extra", pa.array([1] * len(one))) for one in tables]
            case "rename":
                names = ["x" if one == name else one for one in tables[0].schema.names]
                new = [one.rename_columns(names) for one in tables]
            case "order":
                new = [one.select(one.schema.names[::-1]) for one in tables]
            case "more":
                new = [*tables, tables[0]]
            case "fewer":
                new = tables[:-1] or [tables[0].slice(0, 1)]
            case "rows":
                new = [one.slice(0, len(one) - 1) for one in tables]
            case "empty":
                new = [one.slice(0, 0) for one in tables]
        rewritten(directory, new)

    try:
        said = judged(whole, tmp_path_factory.getbasetemp() / "file", act)
    except (pa.ArrowException, TypeError, ValueError) as error:
        if "VALUES" in str(error) or isinstance(error, pa.ArrowException | TypeError):
            return  # the change does not fit this column's type, so there is no such file
        raise
    assert said or kind == "values"


@given(changed({"run": "a", "stage": 0, "model": "m", "revision": "", "weights": {"a": "b"}, "hidden": ["x"],
                "logprobs": True}))  # fmt: skip
def test_what_a_published_stage_says(tmp_path_factory: pytest.TempPathFactory, body: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    write_sealed(folder / FILE_NAME, "published", body, format=PUBLISHED_FORMAT)
    sentence(lambda: read_published(folder))
