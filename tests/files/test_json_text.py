"""JSON text of any content is a value or one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.json_text import parse_json, read_json
from tests.files.test_durable import JSON

WRONG = {
    "empty": (b"", "is not JSON (Expecting value"),
    "half": (b'{"a": ', "is not JSON (Expecting value"),
    "two values": (b"{} {}", "is not JSON (Extra data"),
    "nested": (b"[" * 100_000, "is not JSON (lists or objects are nested too deep)"),
    "nested and closed": (
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "is not JSON (lists or objects are nested too deep)",
    ),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "is not JSON ('utf-8' codec"),
    "a byte-order mark": (b"\xef\xbb\xbf{}", "is not JSON (Unexpected UTF-8 BOM"),
    "NUL": (b'{"a": 1}\0', "is not JSON (Extra data"),
    "half of a pair": (b'{"a": "\\ud800"}', "is not JSON ('utf-8' codec can't encode"),
    "a number of 5,000 digits": (b'{"a": 1' + b"0" * 5000 + b"}", "is not JSON (an integer has more than 4,300 digits"),
    "array": (b"[1]", "holds a JSON array where an object is needed"),
    "string": (b'"a"', "holds a JSON string where"),
    "boolean": (b"true", "holds a JSON boolean where"),
    "null": (b"null", "holds a JSON null where"),
    "number": (b"1e3", "holds a JSON number where"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_one_sentence_with_the_file(what: str, tmp_path: Path) -> None:
    content, sentence = WRONG[what]
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as refused:
        read_json(path)
    assert str(refused.value).startswith(f"{path} {sentence}")
    assert "\n" not in str(refused.value)


def test_a_path_that_is_no_readable_file_is_named(tmp_path: Path) -> None:
    os.symlink("loop", tmp_path / "loop")
    for name, reason in {"missing": "No such file", ".": "Is a directory", "loop": "Too many levels"}.items():
        with pytest.raises(UserError, match=f"cannot be read \\({reason}"):
            read_json(tmp_path / name)


@given(value=JSON)
@example(value={"emoji": "\U0001f600"})
def test_every_value_comes_back(value: object) -> None:
    for ascii_only in (True, False):
        text = json.dumps(value, ensure_ascii=ascii_only)
        assert parse_json(text) == parse_json(text.encode()) == value


@given(content=st.binary(max_size=40) | st.text(alphabet='[]{}",:\\u0189dD eE+-.tfn\0', max_size=40).map(str.encode))
def test_any_bytes_are_a_value_or_a_value_error(content: bytes) -> None:
    try:
        value = parse_json(content)
    except ValueError:
        return
    assert json.dumps(value, ensure_ascii=False).encode()
