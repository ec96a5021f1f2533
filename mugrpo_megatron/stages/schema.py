"""The stage's Parquet schema, and conversion between samples and Arrow tables.

Any Parquet reader opens the files: `pandas.read_parquet`, `pyarrow.parquet`, `datasets.load_dataset("parquet", ...)`.
One row is one response; the rows of a group are consecutive.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import numpy as np
import pyarrow as pa

from mugrpo_megatron.samples import Sample

COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "group": (pa.int32(), "Index of the prompt in the stage: update * prompts_per_update + position."),
    "problem": (pa.string(), "The problem's id, `source:line`."),
    "prompt_ids": (pa.list_(pa.int32()), "Prompt tokens."),
    "response_ids": (pa.list_(pa.int32()), "Response tokens, the end-of-sequence token included when it was sampled."),
    "behaviour_logprobs": (pa.list_(pa.float32()), "Logprob of each response token under the policy that sampled it."),
    "reward": (pa.float64(), "Score of the response."),
    "weight_version": (pa.int64(), "Optimizer updates behind the weights that sampled the response."),
    "finish_reason": (pa.string(), "`stop` (end-of-sequence) or `length` (cut)."),
}
"""Column -> (type, meaning); the meanings are stored in the files as field metadata."""

SCHEMA = pa.schema(
    [pa.field(name, kind, nullable=False, metadata={"meaning": text}) for name, (kind, text) in COLUMNS.items()]
)


def to_table(samples: Sequence[Sample]) -> pa.Table:
    """Samples as an Arrow table of SCHEMA."""
    return pa.Table.from_arrays(
        [
            pa.array([sample.group for sample in samples], pa.int32()),
            pa.array([sample.problem for sample in samples], pa.string()),
            _lists([sample.prompt_ids for sample in samples], np.int32),
            _lists([sample.response_ids for sample in samples], np.int32),
            _lists([sample.behaviour_logprobs for sample in samples], np.float32),
            pa.array([sample.reward for sample in samples], pa.float64()),
            pa.array([sample.weight_version for sample in samples], pa.int64()),
            pa.array([sample.finish_reason for sample in samples], pa.string()),
        ],
        schema=SCHEMA,
    )


def to_samples(table: pa.Table) -> list[Sample]:
    """The rows of a table of SCHEMA; token arrays are views of the table's memory."""
    columns = {
        name: _arrays(table[name]) if pa.types.is_list(kind) else table[name].to_pylist()
        for name, (kind, _) in COLUMNS.items()
    }
    return [Sample(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _lists(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> pa.ListArray:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    values = np.concatenate(arrays).astype(dtype, copy=False)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))


def _arrays(column: pa.ChunkedArray) -> list[np.ndarray]:
    lists = cast(pa.ListArray, column.combine_chunks())
    values = lists.values.to_numpy(zero_copy_only=True)
    offsets = lists.offsets.to_numpy().tolist()
    return [values[start:end] for start, end in pairwise(offsets)]
