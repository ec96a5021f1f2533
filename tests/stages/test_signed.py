"""Stages whose manifest was signed again around other files: refused in one sentence, wherever they are read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mugrpo_megatron.files.durable import digest, write_checksummed_json
from mugrpo_megatron.stages.manifest import FORMAT, parquet_spans, read_manifest
from mugrpo_megatron.stages.schema import training_columns
from mugrpo_megatron.stages.store import StageStore
from tests.hostile.rundir import GROUPS, PROMPTS, UPDATES, fill, group
from tests.refusals import refuses

Tables = list[pa.Table]


def stage(folder: Path, sealed: bool) -> Path:
    store = StageStore(folder)
    fill(store, 0)
    if sealed:
        store.seal(UPDATES, PROMPTS)
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["sealed", "open"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stage(tmp_path_factory.mktemp("whole") / "00000", request.param)


def read(directory: Path) -> None:
    """All that `publish`, `optimize` and `seal` read of a stage."""
    store = StageStore(directory)
    if not store.sealed:
        assert store.verified_groups() == set(range(GROUPS))
        store.seal(UPDATES, PROMPTS)
    store.verify()
    store.rewards()
    for update in range(UPDATES):
        assert len(store.read_update(update, with_text=True)) == 2 * PROMPTS


def signed(directory: Path, body: Any) -> None:
    write_checksummed_json(directory / "manifest.json", "stage", body, format=FORMAT)


def tables_of(directory: Path) -> Tables:
    manifest = read_manifest(directory)
    with pq.ParquetFile(directory / (manifest.sealed or manifest.shards[0]).file) as file:
        return [file.read_row_group(index) for index in range(file.num_row_groups)]


def rewritten(directory: Path, tables: Tables) -> None:
    """Put the tables into the stage's first file, each as a row group, and sign what they are."""
    manifest = read_manifest(directory)
    file = directory / (manifest.sealed or manifest.shards[0]).file
    with pq.ParquetWriter(file, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(1, len(table)))
    body = asdict(manifest)
    if manifest.sealed:
        first, told, footer = parquet_spans(file, training_columns(tables[0].schema))
        spans = {
            "row_groups": list(map(asdict, first)),
            "text_columns": list(map(asdict, told)),
            "footer": asdict(footer),
        }
        body["sealed"] |= spans
    else:
        body["shards"][0]["span"] = asdict(digest(file))
    signed(directory, body)


def column(name: str, change: Callable[[list[Any]], list[Any]]) -> Callable[[Tables], Tables]:
    """The tables with other values in a column."""

    def act(tables: Tables) -> Tables:
        place = tables[0].schema.names.index(name)
        new = [pa.array(change(one[name].to_pylist()), one[name].type) for one in tables]
        fields = [pa.field(name, array.type) for array in new]
        return [one.set_column(place, *both) for one, *both in zip(tables, fields, new, strict=True)]

    return act


FILES: dict[str, tuple[Callable[[Tables], Tables], str]] = {
    "a column less": (
        lambda tables: [one.drop_columns(["reward"]) for one in tables],
        "its columns are not those of a stage",
    ),
    "a column more": (
        lambda tables: [one.append_column("extra", pa.array([1] * len(one))) for one in tables],
        "its columns are not those of a stage",
    ),
    "another order": (
        lambda tables: [one.select(one.schema.names[::-1]) for one in tables],
        "its columns are not those of a stage",
    ),
    "another type": (
        lambda tables: [one.set_column(0, "group", one["group"].cast(pa.int64())) for one in tables],
        "its columns are not those of a stage",
    ),
    "rows less": (lambda tables: [one.slice(0, len(one) - 2) for one in tables], "do not match its manifest"),
    "no rows": (lambda tables: [one.slice(0, 0) for one in tables], "do not match its manifest"),
    "other groups": (
        column("group", lambda values: [one + 1 for one in values]),
        "groups do not match",
    ),
    "groups reversed": (column("group", lambda values: values[::-1]), "groups do not match"),
    "NaN": (column("reward", lambda values: [float("nan")] * len(values)), "rewards are not finite"),
    "no reward": (column("reward", lambda values: [None, *values[1:]]), "reward is empty"),
    "no token": (column("response_ids", lambda values: [[]] * len(values)), "has no token"),
    "a token more": (column("response_ids", lambda values: [[*one, 1] for one in values]), "more or fewer values"),
    "null tokens": (column("prompt_ids", lambda values: [[None]] * len(values)), "prompt_ids is empty"),
    "null components": (column("components", lambda values: [[None]] * len(values)), "components is empty"),
    "negative tokens": (column("prompt_ids", lambda values: [[-1]] * len(values)), "negative numbers"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_holds_something_else(name: str, whole: Path, tmp_path: Path) -> None:
    change, says = FILES[name]
    copy = Path(shutil.copytree(whole, tmp_path / "00000"))
    rewritten(copy, change(tables_of(whole)))
    refuses(says, read, copy)


def test_a_shard_whose_columns_may_be_null_is_sealed(tmp_path: Path) -> None:
    """Another program's schema; with nulls it is refused as above."""
    store = StageStore(tmp_path / "00000")
    for index in range(GROUPS):
        store.append(group(index, 0))
        if index == 0:
            store.flush()
    store.flush()
    rewritten(store.directory, column("reward", list)(tables_of(store.directory)))
    read(store.directory)


def test_an_update_more(tmp_path: Path, whole: Path) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "00000"))
    tables = tables_of(whole)
    rewritten(copy, [*tables, tables[0]])
    if read_manifest(whole).sealed:
        refuses(r"damaged|row groups do not match its manifest", read, copy)
    else:
        read(copy)  # of a shard only the groups count that the manifest lists


BODIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another directory": lambda one: one.update(file="../00001/stage.parquet"),
    "an absolute path": lambda one: one.update(file="/etc/passwd"),
    "a file that is a list": lambda one: one.update(file=["a"]),
    "words for numbers": lambda one: one.update({"updates": "2"} if "updates" in one else {"rows": ["2"]}),
    "a negative number": lambda one: one.update({"prompts_per_update": -1} if "updates" in one else {"groups": [-1]}),
    "more groups than rows": lambda one: one.update({"updates": 3} if "updates" in one else {"rows": [2]}),
    "a place of no number": lambda one: one.get("footer", one.get("span")).update(start="0"),
    "a place before the file": lambda one: one.get("footer", one.get("span")).update(start=-4),
    "a key more": lambda one: one.update(extra=1),
    "a key less": lambda one: one.pop("file"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_manifest_that_says_something_else(name: str, whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "00000"))
    body = json.loads((copy / "manifest.json").read_text())["stage"]
    BODIES[name](body["sealed"] or body["shards"][0])
    signed(copy, body)
    refuses("damaged", read, copy)
