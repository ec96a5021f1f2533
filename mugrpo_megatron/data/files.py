"""Reads JSON, Parquet and CSV files row by row, with line numbers."""

from __future__ import annotations

import codecs
import csv
import difflib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.json_text import parse_json

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv")
"""`.json` is an array of objects, or JSON lines like `.jsonl`."""

MOST_ALIKE = 3
"""Names that are suggested for one that does not exist."""
ALIKE = 0.7
"""How much alike they have to be, as `difflib` measures."""

csv.field_size_limit(sys.maxsize)  # by default 128 KiB, which a row of tests or a worked solution may exceed


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield (line from 1, row or why it is malformed); for Parquet and a JSON array the line is the row's number.

    Raises UserError for a file that is missing, unreadable or of another format.
    """
    check_file(path)
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
        elif path.suffix in (".csv", ".tsv"):
            yield from _csv_rows(path, "," if path.suffix == ".csv" else "\t")
        else:
            yield from _array_rows(path) if _is_array(path) else _json_rows(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from None


def check_file(path: Path) -> None:
    """Raise UserError for a file that is missing or of another format; one that is missing with the names like its own.

    Nothing of it is read.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: unknown file type; convert it to one of {', '.join(SUFFIXES)}")
    if _is_file(path):
        return
    if alike := names_alike(path):
        raise UserError(f"{path} does not exist; did you mean {' or '.join(map(str, alike))}?")
    raise UserError(f"{path} does not exist or is not a file: check the path")


def names_alike(path: Path) -> list[Path]:
    """What lies where a missing path goes astray, and is called almost as its part there; the most alike first."""
    there = path
    while not os.path.lexists(there.parent) and there.parent != there:
        there = there.parent
    try:
        names = sorted(os.listdir(there.parent))
    except OSError:  # a file, or a directory that this user may not read
        return []
    spelled = {name.lower(): name for name in names} | {Path(name).stem.lower(): name for name in names}
    alike = difflib.get_close_matches(there.name.lower(), spelled, n=MOST_ALIKE, cutoff=ALIKE)
    return [there.parent / name for name in dict.fromkeys(map(spelled.__getitem__, alike)) if name != there.name]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # a name that is too long, a directory that this user may not enter
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path") from None


def _is_array(path: Path) -> bool:
    """Whether a `.json` file begins with a bracket."""
    if path.suffix != ".json":
        return False
    with path.open("rb") as file:
        return file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _array_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    try:
        found = parse_json(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        raise UserError(f"{path} is not a JSON array ({error})") from None
    for number, row in enumerate(found, start=1):
        yield number, row if isinstance(row, dict) else f"expected a JSON object, found {type(row).__name__}"


def _csv_rows(path: Path, delimiter: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Rows by the names in the first line; a missing field is left out."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            names = reader.fieldnames or []
            if len(names) == 1 and (other := next((sign for sign in ",;\t|" if sign in names[0]), "")):
                raise UserError(f"{path}:1: {other!r} separates the columns: write the file again with {delimiter!r}")
            if len(set(names)) < len(names):
                raise UserError(f"{path}:1: two columns have one name; rename one of them")
            for row in reader:
                if None in row:
                    yield reader.line_num, "has more fields than the first line has names"
                else:
                    yield reader.line_num, {name: value for name, value in row.items() if value is not None}
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error}): save it as UTF-8") from None
    except csv.Error as error:
        raise UserError(f"{path} is not a readable {path.suffix[1:].upper()} file ({error})") from None


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            text = raw.removeprefix(codecs.BOM_UTF8) if line == 1 else raw
            if line == 1 and text.strip() == b"[":
                raise UserError(
                    f"{path} is a JSON array, not one object a line: rename it to {path.with_suffix('.json').name}"
                )
            if text.strip():
                yield line, _json_row(text)


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
