"""Log-probabilities of a stage's responses under a policy of the learner's, in a file of their own, with checksums.

    stages/00003/behaviour.parquet               under the weights that the stage began with
    reference/stage00003-age00040.parquet        under the weights before update 40 of the stage, from this update on
    anchor/stage00003.parquet                    under the anchor of the KL penalty
    behaviour.json, stage00003-age00040.json     which responses they belong to, and the checksums of every byte

Row group k is update k, one row per response in the order of its update's samples. A file is complete once its
checksums are written. It is bound to the content of its stage, so the file of another stage is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import (
    Span,
    durable_file,
    fsync,
    full_disk,
    read_sealed,
    remove_leftovers,
    write_sealed,
)
from mugrpo_megatron.stages.manifest import parquet_spans, verify

FORMAT = 1
SCHEMA = pa.schema([pa.field("learner_logprobs", pa.list_(pa.float32()))])

Append = Callable[[list[np.ndarray]], None]


def sums(path: Path) -> Path:
    """The file of the checksums of `path`."""
    return path.with_suffix(".json")


def has_logprobs(path: Path) -> bool:
    """Whether `path` was written to its end."""
    return path.exists() and sums(path).exists()


@contextmanager
def write_logprobs(path: Path, of: Mapping[str, Any], write: bool, weights: str = "") -> Iterator[Append]:
    """Yield a function that appends one update's logprobs (float32 [R] per response); the file is whole or absent.

    `of` are JSON values that say which responses and which policy the logprobs belong to. `write` is true on one rank;
    on the others the function does nothing. `weights`, the fingerprint of a checkpoint if they are of one, is kept.
    """
    if not write:
        yield lambda logprobs: None
        return
    for name in (path.name, sums(path).name):
        remove_leftovers(path.parent, name)
    try:
        if sums(path).exists():
            sums(path).unlink()
            fsync(path.parent)
    except OSError as error:
        raise full_disk(error, path) or error from error
    with durable_file(path) as file, pq.ParquetWriter(file, SCHEMA) as writer:
        yield lambda logprobs: writer.write_table(pa.table([pa.array(logprobs, SCHEMA.field(0).type)], schema=SCHEMA))
    row_groups, _, footer = parquet_spans(path, SCHEMA.names)
    body = {
        "of": dict(of),
        "weights": weights,
        "row_groups": [asdict(span) for span in row_groups],
        "footer": asdict(footer),
    }
    write_sealed(sums(path), "logprobs", body, format=FORMAT)


def weights_of(path: Path) -> str | None:
    """The fingerprint of the checkpoint that the logprobs of `path` are of; None where that is not known."""
    try:
        return str(read_sealed(sums(path), "logprobs", format=FORMAT)["weights"])
    except (OSError, ValueError, KeyError):
        return None


def read_logprobs(path: Path, of: Mapping[str, Any], update: int, remedy: str) -> list[np.ndarray]:
    """Logprobs of the responses of the file's `update`-th update, float32 [R] each.

    Raises UserError, ending with `remedy`, when a file is missing or damaged, or belongs to something else than `of`.
    """
    body = check_logprobs(path, of, remedy)
    for span in (body["footer"], body["row_groups"][update]):
        verify(path, Span(**span), remedy)
    with pq.ParquetFile(path) as file:
        column: Any = file.read_row_group(update).column(0).combine_chunks()
    flat, offsets = column.flatten().to_numpy(), column.offsets.to_numpy()
    return np.split(flat, offsets[1:-1])


def check_logprobs(path: Path, of: Mapping[str, Any], remedy: str) -> dict[str, Any]:
    """What the file of checksums holds: `of`, `weights` and the spans of the Parquet file.

    Raises UserError, ending with `remedy`, when it is missing or damaged, or belongs to something else.
    """
    try:
        body = read_sealed(sums(path), "logprobs", format=FORMAT)
    except (OSError, ValueError):
        raise UserError(f"{sums(path)}: missing or damaged, so {path.name} cannot be checked; {remedy}") from None
    if body["of"] != of:
        raise UserError(f"{path}: these are the log-probabilities of other responses or of another policy; {remedy}")
    return body
