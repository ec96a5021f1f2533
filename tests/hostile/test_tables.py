"""CSV files and JSON arrays that cannot be read, and any bytes under any suffix."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hostile.outcome import answered, refused

DEEP = b"[" * 100_000

TABLES: dict[str, tuple[str, bytes, str]] = {
    "two names": ("csv", b"response,answer,answer\n1,1,1\n", "two columns have one name"),
    "more fields": ("csv", b"response,answer\n1,1\n1,1,1\n", ".csv:3: has more fields than"),
    "fewer fields": ("csv", b"response,answer\n1,1\n1\n", ".csv:3: field 'answer' is missing"),
    "open quote": ("csv", b'response,answer\n"1,1\n', "is not a readable CSV file"),
    "quote inside": ("csv", b'response,answer\n"1"x,1\n', "is not a readable CSV file"),
    "not UTF-8": ("csv", b"response,answer\n\xff,1\n", "save it as UTF-8"),
    "UTF-16": ("csv", "response,answer\n1,1\n".encode("utf-16"), "save it as UTF-8"),
    "NUL": ("csv", b"response,answer\n1,\0\n\0", ""),
    "other columns": ("csv", b"a,b\n1,1\n", ".csv:2: field 'response' is missing"),
    "only a head": ("csv", b"response,answer\n", "holds no row to score"),
    "commas in a tab file": ("tsv", b"response,answer\n1,1\n", ".tsv:1: ',' separates the columns"),
    "array of numbers": ("json", b"[1]", ".json:1: expected a JSON object, found int"),
    "half an array": ("json", b'[{"response": "1"', "is not a JSON array"),
    "deep array": ("json", DEEP, "is not a JSON array (nested too deep)"),
    "array and more": ("json", b'[{"response": "1", "answer": 1}] x', "is not a JSON array"),
    "surrogate": ("json", b'[{"response": "\\ud800", "answer": 1}]', "is not a JSON array"),
    "empty array": ("json", b"[]", "holds no row to score"),
    "object over lines": ("json", b'{\n"response": "1",\n"answer": 1}\n', ".json:1: not JSON"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_or_an_array_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    suffix, content, reason = TABLES[name]
    data = tmp_path / f"in.{suffix}"
    data.write_bytes(content)
    refused("score", data, "--out", tmp_path / "out.jsonl", says=reason)
    assert not (tmp_path / "out.jsonl").exists()


@given(st.binary(max_size=60), st.sampled_from([".jsonl", ".json", ".csv", ".tsv", ".parquet"]))
def test_any_bytes_are_rows_or_reasons(tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str) -> None:
    data = tmp_path_factory.mktemp("bytes") / f"in{suffix}"
    data.write_bytes(content)
    answered("score", data, "--out", data.with_name("out.jsonl"))
