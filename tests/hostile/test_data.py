"""Data files as no program should write them: each row is used, or named with its line."""

from __future__ import annotations

import decimal
import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.data.files import rows
from mugrpo_megatron.data.problems import load
from mugrpo_megatron.data.reading import kept_row
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.sections import DataSection
from tests.hostile.outcome import answered, command, listing, refused

GOOD = b'{"response": "1", "answer": 1}\n'
DEEP = b"[" * 100_000
NUMBER = b"9" * 5000

LINES: dict[str, tuple[bytes, str]] = {
    "text": (b"nonsense", "not JSON"),
    "half a row": (b'{"response": "1", "ans', "not JSON"),
    "array": (b"[1]", "expected a JSON object, found list"),
    "string": (b'"row"', "expected a JSON object, found str"),
    "null": (b"null", "expected a JSON object, found NoneType"),
    "deep array": (DEEP, "nested too deep"),
    "deep object": (b'{"a":' * 50_000, "nested too deep"),
    "deep value": (b'{"response": "1", "answer": 1, "x": ' + DEEP + b"]" * 100_000 + b"}", "nested too deep"),
    "long number": (b'{"response": "1", "answer": ' + NUMBER + b"}", "not JSON"),
    "surrogate": (b'{"response": "\\ud800", "answer": 1}', "surrogates not allowed"),
    "surrogate elsewhere": (b'{"response": "1", "answer": 1, "x": ["\\udfff"]}', "surrogates not allowed"),
    "surrogate key": (b'{"response": "1", "answer": 1, "\\udc00": 1}', "surrogates not allowed"),
    "not UTF-8": (b'{"response": "\xff\xfe", "answer": 1}', "not JSON"),
    "UTF-16": ('{"response": "1", "answer": 1}'.encode("utf-16"), "not JSON"),
    "NUL": (b'{"response": "1", "answer": 1}\0', "not JSON"),
    "raw control": (b'{"response": "\x01", "answer": 1}', "not JSON"),
    "escape": (b'{"\\u001b[2J": 1}', "field 'response' is missing"),
    "two objects": (b'{"response": "1", "answer": 1}{}', "not JSON"),
    "no answer": (b'{"response": "1"}', "field 'answer' is missing"),
    "null answer": (b'{"response": "1", "answer": null}', "field 'answer' is null"),
    "true answer": (
        b'{"response": "1", "answer": true}',
        "field 'answer' holds true or false, where text or a number belongs",
    ),
    "list answer": (
        b'{"response": "1", "answer": [1, [2]]}',
        "field 'answer' holds a list, where text or a number belongs",
    ),
    "object answer": (
        b'{"response": "1", "answer": {"a": 1}}',
        "field 'answer' holds an object, where text or a number belongs",
    ),
    "NaN answer": (b'{"response": "1", "answer": NaN}', "field 'answer' is nan"),
    "infinite answer": (b'{"response": "1", "answer": -Infinity}', "field 'answer' is -inf"),
    "overflowing answer": (b'{"response": "1", "answer": 1e999}', "field 'answer' is inf"),
    "blank answer": (b'{"response": "1", "answer": " \\n"}', "field 'answer' is empty"),
    "number response": (b'{"response": 1, "answer": 1}', "field 'response' is missing"),
    "list response": (b'{"response": ["1"], "answer": 1}', "field 'response' is missing"),
    "null response": (b'{"response": null, "answer": 1}', "field 'response' is missing"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_malformed_line_is_named_or_left_out(name: str, tmp_path: Path) -> None:
    line, reason = LINES[name]
    data = tmp_path / "in.jsonl"
    data.write_bytes(GOOD + line + b"\n" + GOOD)
    said = refused("score", data, "--out", tmp_path / "out.jsonl")
    assert f"{data}:2: " in said
    assert reason in said
    assert list(listing(tmp_path)) == ["in.jsonl"]
    ended = command("score", data, "--out", tmp_path / "out.jsonl", "--skip-malformed")
    assert ended.code == 0
    assert ended.out.startswith("2 rows, mean reward 1.0000, 0 without an answer, 1 malformed and skipped")


WELL_FORMED: dict[str, bytes] = {
    "byte order mark": b"\xef\xbb\xbf" + GOOD,
    "CRLF": GOOD.replace(b"\n", b"\r\n"),
    "no last newline": GOOD.rstrip(),
    "blank lines": b"\n \n\r\n" + GOOD + b"\n\t\n",
    "escaped control": b'{"response": "1", "answer": 1, "x": "\\u0000\\u001b"}\n',
    "escaped backslash before u": b'{"response": "1", "answer": 1, "x": "\\\\ud800"}\n',
    "surrogate pair": b'{"response": "1", "answer": 1, "x": "\\ud83d\\ude00"}\n',
    "repeated key": b'{"response": "2", "response": "1", "answer": 1}\n',
    "result columns": b'{"response": "1", "answer": 1, "reward": "x", "why": [], "seconds": {}}\n',
    "other columns": b'{"response": "1", "answer": 1, "x": [1, {"y": null}], "nan": NaN, "inf": [Infinity]}\n',
    "many digits": b'{"response": "1", "answer": 1, "x": ' + b"1" * 4000 + b"}\n",
    "long line": b'{"response": "' + b"x" * 2_000_000 + b'", "answer": 1}\n',
}


@pytest.mark.parametrize("name", WELL_FORMED)
def test_a_strange_but_right_file_is_scored(name: str, tmp_path: Path) -> None:
    data, out = tmp_path / "in.jsonl", tmp_path / "new" / "out.jsonl"
    data.write_bytes(WELL_FORMED[name])
    assert command("score", data, "--out", out).code == 0
    [line] = out.read_text(encoding="utf-8").splitlines()
    row = json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert {"response", "answer", "reward", "extracted", "why", "seconds"} <= row.keys()


MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
COLUMNS: dict[str, tuple[pa.Array, Any]] = {
    "timestamp": (pa.array([MOMENT, None], pa.timestamp("us", "UTC")), ["2026-01-02T03:04:05+00:00", None]),
    "plain timestamp": (
        pa.array([MOMENT.replace(tzinfo=None)] * 2, pa.timestamp("ms")),
        ["2026-01-02T03:04:05"] * 2,
    ),
    "nanoseconds": (pa.array([0, 10**9], pa.timestamp("ns")), ["1970-01-01T00:00:00", "1970-01-01T00:00:01"]),
    "date": (pa.array([date(2026, 1, 2)] * 2), ["2026-01-02"] * 2),
    "time": (pa.array([1, 2], pa.time32("s")), ["00:00:01", "00:00:02"]),
    "duration": (pa.array([timedelta(seconds=1.5)] * 2), [1.5, 1.5]),
    "binary": (pa.array([b"\xff\x00", b""]), ["/wA=", ""]),
    "decimal": (pa.array([decimal.Decimal("1.50"), None]), ["1.50", None]),
    "NaN": (pa.array([float("nan"), float("-inf")]), [None, None]),
    "list of NaN": (pa.array([[float("nan")], []]), [[None], []]),
    "struct": (pa.array([{"a": MOMENT.date()}, {"a": None}]), [{"a": "2026-01-02"}, {"a": None}]),
    "map": (pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())), [[["a", 1]], []]),
    "dictionary": (pa.array(["a", "b"]).dictionary_encode(), ["a", "b"]),
    "null": (pa.nulls(2), [None, None]),
    "large list": (pa.array([[1], None], pa.large_list(pa.int8())), [[1], None]),
}


def test_every_parquet_column_is_kept(tmp_path: Path) -> None:
    table = pa.table({"response": ["1", "2"], "answer": [1, 2]} | {name: one for name, (one, _) in COLUMNS.items()})
    pq.write_table(table, tmp_path / "in.parquet")
    assert command("score", tmp_path / "in.parquet", "--out", tmp_path / "out.jsonl").code == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {name: [row[name] for row in rows] for name in COLUMNS} == {
        name: kept for name, (_, kept) in COLUMNS.items()
    }
    assert [row["reward"] for row in rows] == [1.0, 1.0]


UNREADABLE: dict[str, pa.Array] = {
    "not UTF-8": pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"1\xff")]
    ),
    "year 300000": pa.array([0, 2**62], pa.timestamp("us")),
    "year -300000": pa.array([0, -(2**62)], pa.timestamp("us")),
    "long duration": pa.array([0, 2**62], pa.duration("s")),
}


WHAT_IT_HOLDS = {
    "not UTF-8": "a value that cannot be read ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)"
}
"""The first value of the others is a time that Python can hold."""


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_parquet_value_that_cannot_be_read_stops_what_reads_it(name: str, tmp_path: Path) -> None:
    """In a column that nothing reads it stops nothing, and no row is lost."""
    data, out = tmp_path / "in.parquet", ("--out", tmp_path / "out.jsonl")
    pq.write_table(pa.table({"response": ["1", "1"], "answer": [1, 1], "x": UNREADABLE[name]}), data)
    assert command("score", data, *out).code == 0
    assert [json.loads(row)["reward"] for row in (tmp_path / "out.jsonl").read_text().splitlines()] == [1.0, 1.0]
    (tmp_path / "out.jsonl").unlink()
    pq.write_table(pa.table({"response": ["1", "1"], "answer": UNREADABLE[name]}), data)
    says = WHAT_IT_HOLDS.get(name, "a date, a time or a duration")
    refused("score", data, *out, says=f": field 'answer' holds {says}, where text ")


def test_data_that_is_not_a_data_file(tmp_path: Path) -> None:
    """Everything that a path may lead to; nothing is looked up on the hub, and nothing hangs."""
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "device.jsonl").symlink_to("/dev/zero")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "dangling.jsonl").symlink_to("nowhere")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "x.arrow").write_text("problem,answer\n1,1\n")
    (tmp_path / "m" / "empty.csv").touch()
    (tmp_path / "x.parquet").write_bytes(b"PAR1 nothing PAR1")
    (tmp_path / "empty.parquet").touch()
    pq.write_table(pa.table({"problem": pa.array([], pa.string())}), tmp_path / "no-rows.parquet")
    (tmp_path / "half.parquet").write_bytes((tmp_path / "no-rows.parquet").read_bytes()[:-5])
    names = [path.name for path in tmp_path.iterdir() if path.name != "m"]
    for name in [
        *names,
        "nowhere.jsonl",
        "m/x.arrow",
        "m/empty.csv",
        "m/none.tsv",
        "x" * 300 + ".jsonl",
        "a\tb.jsonl",
        "m/x.jsonl.gz",
    ]:
        with pytest.raises(UserError) as error:
            load(str(tmp_path / name), DataSection())
        assert "could not be downloaded" not in str(error.value), name
        refused("score", tmp_path / name, "--out", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_damaged_parquet_file_is_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, place: int, flip: int
) -> None:
    data = tmp_path_factory.mktemp("parquet") / "in.parquet"
    pq.write_table(pa.table({"response": ["1", "2"], "answer": [1, 2], "x": [0.5, None]}), data)
    content = bytearray(data.read_bytes())
    content[place % len(content)] ^= flip
    data.write_bytes(content)
    said = str(data)
    try:
        for _, row in rows(data):
            json.dumps(row if isinstance(row, str) else kept_row(row), allow_nan=False)
    except UserError as error:
        said = str(error)
    assert said.startswith(str(data))


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
    "deep array": ("json", DEEP, "is not a JSON array (lists or objects are nested too deep)"),
    "array and more": ("json", b'[{"response": "1", "answer": 1}] x', "is not a JSON array"),
    "surrogate": ("json", b'[{"response": "\\ud800", "answer": 1}]', "is not a JSON array"),
    "empty array": ("json", b"[]", "holds no row to score"),
    "no line": ("jsonl", b"", "holds no row to score"),
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
