"""The stage's Parquet schema, and conversion between samples and Arrow tables.

Any Parquet reader opens the files: `pandas.read_parquet`, `pyarrow.parquet`, `datasets.load_dataset("parquet", ...)`.
One row is one response; the rows of a group are consecutive.

The columns that training reads come first, so they are one range of bytes in each row group, and an update verifies
and reads that range alone. Among them are the *optional* columns, which a stage has where its samples have them: the
recipe asks for one (routes), or the rollouts came with one (a loss mask). To add one, give `Sample` a field that is
None by default and `OPTIONAL` a line. The other columns say what happened; people and reports read them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.samples import Sample


@dataclass(frozen=True, slots=True)
class Column:
    """One column: the field of `Sample` that has its name, as an Arrow type."""

    kind: pa.DataType
    """A list type for an array of the sample's own length, of which the first dimension may be followed by others."""
    meaning: str
    """Stored in the files as field metadata."""
    empty: bool = False
    """Whether a row may have no value: null."""


IDS, LOGPROBS, TEXT = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.string()
NAMED = pa.list_(pa.struct({"name": pa.string(), "value": pa.float64()}))
"""Numbers by name; not Arrow's map, which the `datasets` library cannot read."""

TRAINING: dict[str, Column] = {
    "group": Column(pa.int32(), "Index of the prompt in the stage: update * prompts_per_update + position."),
    "problem": Column(TEXT, "The problem's id, `source:line`."),
    "prompt_ids": Column(IDS, "Prompt tokens."),
    "response_ids": Column(IDS, "Response tokens, the end-of-sequence token included when it was sampled."),
    "behaviour_logprobs": Column(LOGPROBS, "Logprob of each response token under the policy that sampled it."),
    "reward": Column(pa.float64(), "Score of the response, shaping included."),
    "components": Column(NAMED, "The score's parts by name, before their weights."),
    "weight_version": Column(pa.int64(), "Optimizer updates behind the weights that sampled the response."),
    "finish_reason": Column(TEXT, "`stop` (end-of-sequence) or `length` (cut)."),
}
"""What every stage has and training reads."""
OPTIONAL: dict[str, Column] = {
    "loss_mask": Column(pa.list_(pa.bool_()), "Whether each response token is trained on; a stage without it: all."),
    "kept": Column(IDS, "Tokens that could be sampled at each place, k for each, -1 where fewer; without it: all."),
}
"""What training reads where a stage has it."""
TOLD: dict[str, Column] = {
    "text": Column(TEXT, "The response as text, as the verifier read it."),
    "gold": Column(TEXT, "The gold answer; JSON where it is a structure."),
    "extracted": Column(TEXT, "The answer that was found in the response; empty where none was looked for."),
    "why": Column(TEXT, "Why the response has its score."),
    "advantage": Column(pa.float64(), "Under the objective of the recipe that made the stage; null: none.", empty=True),
    "row": Column(TEXT, "The problem's row in its data set, as JSON; empty for a bundled task."),
}
"""What people read. Training computes its own advantages, from the rewards and the recipe's objective."""
COLUMNS: dict[str, Column] = TRAINING | OPTIONAL | TOLD
SHAPE = b"shape"
"""Field metadata: the dimensions after the first of an array that has several, as JSON."""


def optional_columns(samples: Iterable[Sample]) -> tuple[str, ...]:
    """Names of the optional columns that the samples have; ValueError where only some of them have one."""
    found = {tuple(name for name in OPTIONAL if getattr(sample, name) is not None) for sample in samples}
    if len(found) > 1:
        raise ValueError(f"all samples of a stage have the same optional columns, these have {sorted(found)}")
    return found.pop() if found else ()


def check_same_columns(directory: Path, columns: Sequence[str], asked: tuple[str, ...]) -> None:
    """UserError when new groups have other optional columns than the stage in `directory`; `columns` are all of its."""
    found = tuple(name for name in OPTIONAL if name in columns)
    if found != asked:
        raise UserError(
            f"{directory}: the groups on disk have the optional columns {list(found)}, the new ones {list(asked)}; "
            "take the recipe's keys that the stage was begun with, or remove the directory to generate the stage again"
        )


def schema(samples: Sequence[Sample]) -> pa.Schema:
    """The Arrow schema of samples like these, columns in the order of the file."""
    names = [*TRAINING, *optional_columns(samples), *TOLD]
    fields = []
    for name in names:
        column = COLUMNS[name]
        metadata = {"meaning": column.meaning}
        if name in OPTIONAL and (inner := getattr(samples[0], name).shape[1:]):
            metadata[SHAPE.decode()] = json.dumps(inner)
        fields.append(pa.field(name, column.kind, nullable=column.empty, metadata=metadata))
    return pa.schema(fields)


def training_columns(found: pa.Schema) -> list[str]:
    """The columns of a stage's file that training reads."""
    return [name for name in found.names if name not in TOLD]


def to_table(samples: Sequence[Sample]) -> pa.Table:
    """Samples as an Arrow table of `schema(samples)`; `samples` must not be empty."""
    found = schema(samples)
    return pa.Table.from_arrays(
        [_column([getattr(sample, field.name) for sample in samples], field.type) for field in found], schema=found
    )


def to_samples(table: pa.Table) -> list[Sample]:
    """The rows of a table of a stage's columns, all of them or the training ones.

    Token arrays are views of the table's memory, except those of bool.
    """
    columns = {name: _values(table[name], table.schema.field(name)) for name in table.schema.names}
    return [Sample(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if kind == NAMED:
        named = [cast(Mapping[str, float], value).items() for value in values]
        return pa.array([[{"name": name, "value": number} for name, number in one] for one in named], kind)
    return _lists(values, kind) if pa.types.is_list(kind) else pa.array(values, kind)


def _lists(arrays: Sequence[np.ndarray], kind: pa.ListType) -> pa.ListArray:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([array.size for array in arrays], out=offsets[1:])
    values = np.concatenate([array.reshape(-1) for array in arrays])
    flat = pa.array(values.astype(kind.value_type.to_pandas_dtype(), copy=False), kind.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat)


def _values(column: pa.ChunkedArray, field: pa.Field) -> list[Any]:
    if field.type == NAMED:
        return [{one["name"]: one["value"] for one in named} for named in column.to_pylist()]
    if not pa.types.is_list(field.type):
        return column.to_pylist()
    lists = cast(pa.ListArray, column.combine_chunks())
    values = lists.values.to_numpy(zero_copy_only=not pa.types.is_boolean(field.type.value_type))
    inner = json.loads((field.metadata or {}).get(SHAPE, b"[]"))
    offsets = lists.offsets.to_numpy().tolist()
    arrays = [values[start:end] for start, end in pairwise(offsets)]
    return [array.reshape(-1, *inner) for array in arrays] if inner else arrays
