"""Logprobs that the learner computed of a stage's samples: a Parquet file, one row group per update.

Those of the behaviour policy, for a whole stage, or of the clip's reference policy, for some of its updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mugrpo_megatron.durable import durable_file

SCHEMA = pa.schema([pa.field("learner_logprobs", pa.list_(pa.float32()))])
"""One row a response, in the order of its update's samples."""

Append = Callable[[list[np.ndarray]], None]


@contextmanager
def write_logprobs(path: Path, write: bool) -> Iterator[Append]:
    """Yield a function that appends one update's logprobs (float32 [R] a response); the file appears when all are in.

    `write` is true on one rank; on the others the function does nothing.
    """
    if not write:
        yield lambda logprobs: None
        return
    with durable_file(path) as file, pq.ParquetWriter(file, SCHEMA) as writer:
        yield lambda logprobs: writer.write_table(pa.table([pa.array(logprobs, SCHEMA.field(0).type)], schema=SCHEMA))


def read_logprobs(path: Path, update: int) -> list[np.ndarray]:
    """Logprobs of the responses of the file's `update`-th update, float32 [R] each, bitwise as they were written."""
    with pq.ParquetFile(path) as file:
        column: Any = file.read_row_group(update).column(0).combine_chunks()
    flat, offsets = column.flatten().to_numpy(), column.offsets.to_numpy()
    return np.split(flat, offsets[1:-1])
