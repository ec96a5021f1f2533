"""Reads JSONL and Parquet files row by row, with line numbers."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.json_text import parse_json

SUFFIXES = (".jsonl", ".json", ".parquet")


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield (line from 1, row or why it is malformed); a Parquet row's line is its number from 1.

    Raises UserError for a file that is missing, unreadable or of another format.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: unknown file type; convert it to one of {', '.join(SUFFIXES)}")
    if not _is_file(path):
        raise UserError(f"{path} does not exist or is not a file: check the path")
    yield from _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # a name that is too long, a directory that this user may not enter
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path") from None


def field_at(row: dict[str, Any], path: str) -> Any:
    """Value of a column, or at a path inside one: `reward_model.ground_truth`, `prompt.0.content`.

    Raises KeyError naming the part that is missing.
    """
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise KeyError(part)
    return value


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    try:
        with path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                text = raw.removeprefix(codecs.BOM_UTF8) if line == 1 else raw
                if text.strip():
                    yield line, _json_row(text)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None


def _json_row(raw: bytes) -> dict[str, Any] | str:
    try:
        row = parse_json(raw)
    except ValueError as error:
        return f"not JSON ({error})"
    return row if isinstance(row, dict) else f"expected a JSON object, found {type(row).__name__}"


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    line = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in _python_rows(batch):
                    line += 1
                    yield line, row
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise UserError(f"{path} is not a readable Parquet file ({error}): write it again") from error


def _python_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | str]:
    """Rows of a batch; a row with a value that Python cannot hold (no UTF-8, no calendar date) is malformed."""
    try:
        yield from batch.to_pylist()
        return
    except (ValueError, OverflowError, pa.ArrowException):
        pass
    for place in range(batch.num_rows):
        row: dict[str, Any] = {}
        try:
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                row[name] = column[place].as_py()
        except (ValueError, OverflowError, pa.ArrowException) as error:
            yield f"column {name!r} holds a value that cannot be read ({error})"
        else:
            yield row
