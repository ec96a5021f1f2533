"""The Parquet files of a stage: their schema, the conversion of samples to Arrow tables and back, and shards.

One row is one response. The columns that training reads come first in each row group, so that an update reads and
verifies one range of bytes and no more. Some columns are *optional*, such as a loss mask: to add one, give `Sample` a
field that is None by default and `OPTIONAL` a line.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any, Final, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mugrpo_megatron.algorithm.advantages import before_penalty
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.scoring import OVERLONG
from mugrpo_megatron.samples import UNSCORED, InMemoryRoutes, Sample
from mugrpo_megatron.stages.routes import append_routes


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """The description of a column, which holds the field of `Sample` with the same name."""

    kind: pa.DataType
    """Arrow type of the column: a list type for an array with one value for each token (`support_ids` has several)."""
    meaning: str
    """Meaning of the column, which is stored in the files as field metadata."""
    empty: bool = False
    """Whether a row of the column may be null."""


IDS, LOGPROBS, TEXT = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.string()
NAMED = pa.list_(pa.struct({"name": pa.string(), "value": pa.float64()}))
"""Arrow type of numbers by name; not Arrow's map, which the `datasets` library cannot read."""

TRAINING: dict[str, FieldSpec] = {
    "group": FieldSpec(pa.int32(), "Index of the prompt in the stage: update * prompts_per_update + position."),
    "problem": FieldSpec(TEXT, "The problem's id, `source:line`."),
    "prompt_ids": FieldSpec(IDS, "Prompt tokens."),
    "response_ids": FieldSpec(IDS, "Response tokens, the end-of-sequence token included when it was sampled."),
    "engine_logprobs": FieldSpec(LOGPROBS, "Logprob of each response token as the engine that sampled it returned it."),
    "reward": FieldSpec(pa.float64(), "Score of the response, shaping included."),
    "components": FieldSpec(NAMED, "The score's parts by name, before their weights."),
    "weight_version": FieldSpec(pa.int64(), "Optimizer updates behind the weights that sampled the response."),
    "finish_reason": FieldSpec(TEXT, "`stop` (end-of-sequence) or `length` (cut)."),
}
"""Columns that every stage has and training reads."""
OPTIONAL: dict[str, FieldSpec] = {
    "loss_mask": FieldSpec(
        pa.list_(pa.bool_()), "Whether each response token is trained on; a stage without this column trains on all."
    ),
    "support_ids": FieldSpec(IDS, "Tokens that could be sampled at each position, padded with -1; without it: all."),
}
"""Columns that training reads if the stage has them."""
TEXT_COLUMNS: dict[str, FieldSpec] = {
    "text": FieldSpec(TEXT, "The response as text, as the verifier read it."),
    "gold": FieldSpec(TEXT, "The gold answer; JSON if it is a structure."),
    "extracted": FieldSpec(TEXT, "The answer that was found in the response; empty if the verifier looks for none."),
    "why": FieldSpec(TEXT, "Reason for the score."),
    "advantage": FieldSpec(
        pa.float64(), "Under the objective of the recipe that made the stage; null: none.", empty=True
    ),
    "row": FieldSpec(TEXT, "The problem's row in its data set, as JSON; empty for a bundled task."),
}
"""Columns for people. Training computes its own advantages, from the rewards and the recipe's objective."""
COLUMNS: dict[str, FieldSpec] = TRAINING | OPTIONAL | TEXT_COLUMNS
LISTS = ("prompt_ids", "response_ids", "engine_logprobs", "loss_mask", "support_ids")
"""Columns with a list of values per response."""


def optional_columns(samples: Iterable[Sample]) -> tuple[str, ...]:
    """The names of the optional columns that the samples have; ValueError unless all samples have the same ones."""
    sets = {tuple(name for name in OPTIONAL if getattr(sample, name) is not None) for sample in samples}
    if len(sets) > 1:
        raise ValueError(f"samples of one stage must have the same optional columns, but these have {sorted(sets)}")
    return sets.pop() if sets else ()


def check_same_columns(directory: Path, columns: Sequence[str], new: tuple[str, ...]) -> None:
    """Raise UserError when new groups have other optional columns (`new`) than the stage, which has `columns`."""
    present = tuple(name for name in OPTIONAL if name in columns)
    if present != new:
        raise UserError(
            f"{directory}: the groups on disk have the optional columns {list(present)}, the new ones {list(new)}; "
            "take the keys of the recipe that began the stage, or remove the directory to generate the stage again"
        )


def check_file(path: Path, stored: pa.Schema, remedy: str) -> None:
    """Raise UserError that ends with `remedy` unless a file has a stage's columns, in order and with their types."""
    names = [*TRAINING, *(name for name in OPTIONAL if name in stored.names), *TEXT_COLUMNS]
    if [(column.name, column.type) for column in stored] != [(name, COLUMNS[name].kind) for name in names]:
        raise UserError(f"{path}: its columns are not those of a stage in name, order and type; {remedy}")


def without_nulls(stored: pa.Schema) -> pa.Schema:
    """The schema `stored` of a file, with nulls forbidden in the columns of a stage that must not have any (all whose
    `FieldSpec.empty` is false)."""
    for index, column in enumerate(stored):
        if column.name in COLUMNS:
            stored = stored.set(index, column.with_nullable(COLUMNS[column.name].empty))
    return stored


def check_rows(path: Path, table: pa.Table, groups: Sequence[int], remedy: str) -> None:
    """Raise UserError that ends with `remedy` unless the rows belong to `groups`, in order, and can be trained on."""
    # Checksums cannot show this: in a stage that someone else published, the manifest matches whatever the files hold.
    if problem := next(_row_problems(table, groups), ""):
        raise UserError(f"{path}: {problem}; {remedy}")


def _row_problems(table: pa.Table, groups: Sequence[int]) -> Iterator[str]:
    for name in table.schema.names:
        arrays = [table[name].combine_chunks()]
        if pa.types.is_list(arrays[0].type):
            arrays.append(arrays[0].values)
        if pa.types.is_struct(arrays[-1].type):
            arrays += arrays[-1].flatten()
        if any(array.null_count for array in arrays) and not COLUMNS[name].empty:
            yield f"{name} is empty in some rows"
            return
    numbers = table["group"].to_numpy()
    if numbers[np.flatnonzero(np.diff(numbers, prepend=-1))].tolist() != list(groups):
        yield "its groups do not match its manifest"
    if not np.isfinite(table["reward"].to_numpy()).all():
        yield "some rewards are not finite"
    lengths = {name: pc.list_value_length(table[name]).to_numpy() for name in LISTS if name in table.schema.names}
    for name in lengths:
        if name.endswith("_ids") and lengths[name].min() < 1:
            yield f"{name} has no token in some rows"
        if name.endswith("_ids") and pc.min(pc.list_flatten(table[name])).as_py() < 0:
            yield f"{name} holds negative numbers"
        per_token = lengths[name] // np.maximum(lengths["response_ids"], 1) if name == "support_ids" else 1
        if name != "prompt_ids" and (lengths[name] != per_token * lengths["response_ids"]).any():
            yield "some responses have more or fewer values than tokens"


def schema(samples: Sequence[Sample]) -> pa.Schema:
    """The Arrow schema for these samples, with the columns in the order that they have in a file."""
    names = [*TRAINING, *optional_columns(samples), *TEXT_COLUMNS]
    fields = []
    for name in names:
        column = COLUMNS[name]
        fields.append(pa.field(name, column.kind, nullable=column.empty, metadata={"meaning": column.meaning}))
    return pa.schema(fields)


def training_columns(stored: pa.Schema) -> list[str]:
    """The columns of a stage's file that training reads."""
    return [name for name in stored.names if name not in TEXT_COLUMNS]


def to_table(samples: Sequence[Sample]) -> pa.Table:
    """The samples, at least one, as an Arrow table with the columns of `schema(samples)`."""
    fields = schema(samples)
    return pa.Table.from_arrays(
        [_column([getattr(sample, field.name) for sample in samples], field.type) for field in fields], schema=fields
    )


def to_samples(table: pa.Table) -> list[Sample]:
    """The samples in a table that has all columns of a stage, or only those that training reads.

    Their token arrays are views of the table's memory, except those of bool.
    """
    columns = {name: _values(table[name], table.schema.field(name)) for name in table.schema.names}
    if "support_ids" in columns:
        pairs = zip(columns["support_ids"], columns["response_ids"], strict=True)
        columns["support_ids"] = [support.reshape(len(ids), support.size // max(1, len(ids))) for support, ids in pairs]
    return [Sample(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if kind == NAMED:
        named = [cast(Mapping[str, float], value).items() for value in values]
        return pa.array([[{"name": name, "value": number} for name, number in row] for row in named], kind)
    return _lists(values, kind) if pa.types.is_list(kind) else pa.array(values, kind)


def _lists(arrays: Sequence[np.ndarray], kind: pa.ListType) -> pa.ListArray:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([array.size for array in arrays], out=offsets[1:])
    values = np.concatenate([array.reshape(-1) for array in arrays])
    flat = pa.array(values.astype(kind.value_type.to_pandas_dtype(), copy=False), kind.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat)


def _values(column: pa.ChunkedArray, field: pa.Field) -> list[Any]:
    if field.type == NAMED:
        return [{entry["name"]: entry["value"] for entry in row} for row in column.to_pylist()]
    if not pa.types.is_list(field.type):
        return column.to_pylist()
    lists = cast(pa.ListArray, column.combine_chunks())
    values = lists.values.to_numpy(zero_copy_only=not pa.types.is_boolean(field.type.value_type))
    return [values[start:end] for start, end in pairwise(lists.offsets.to_numpy().tolist())]


class StageStatistics:
    """Sums over the updates of a stage, which are added one by one, so that memory does not grow with the stage."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._reward, self._unscored, self._longest = 0.0, 0.0, 0
        self._components: dict[str, tuple[float, int]] = {}
        """Name of a part of the rewards -> its sum and the number of responses that have it."""

    def add(self, table: pa.Table) -> None:
        """Add the rows of one update; the rows of a group must be consecutive."""
        groups, rewards = table["group"].to_numpy(), table["reward"].to_numpy()
        lengths = pc.list_value_length(table["response_ids"]).to_numpy()
        starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
        verdicts = before_penalty(rewards, penalties_of(table))
        spread = np.maximum.reduceat(verdicts, starts) - np.minimum.reduceat(verdicts, starts)
        self._sums["responses"] += len(rewards)
        self._sums["groups"] += len(starts)
        self._reward += float(rewards.sum())
        self._sums["tokens"] += int(lengths.sum())
        self._sums["truncated"] += table["finish_reason"].to_pylist().count("length")
        self._sums["alike"] += int((spread == 0).sum())
        self._longest = max(self._longest, int(lengths.max()))
        components = [{entry["name"]: entry["value"] for entry in row} for row in table["components"].to_pylist()]
        self._unscored += sum(components[start].get(UNSCORED, 0.0) for start in starts.tolist())
        for name, values in by_name(components).items():
            total, count = self._components.get(name, (0.0, 0))
            self._components[name] = total + sum(values), count + len(values)

    def result(self) -> dict[str, float]:
        """The metrics of the stage's responses, by the names in `observe.metrics`; call it after all updates are
        added."""
        sums = self._sums
        return {
            "responses": sums["responses"],
            "reward_mean": self._reward / sums["responses"],
            "response_length_mean": sums["tokens"] / sums["responses"],
            "response_length_max": self._longest,
            "generated_tokens": sums["tokens"],
            "truncated_fraction": sums["truncated"] / sums["responses"],
            "zero_variance_fraction": sums["alike"] / sums["groups"],
            "unscored_fraction": self._unscored / sums["groups"],
            **{f"reward/{name}": total / count for name, (total, count) in self._components.items()},
        }


def penalties_of(table: pa.Table) -> np.ndarray:
    """float64 [n]: the overlong penalty that is contained in each row's reward."""
    column = table["components"].combine_chunks()
    entries = pc.list_flatten(column)
    has_penalty = pc.equal(entries.field("name"), OVERLONG).to_numpy(zero_copy_only=False)
    penalties = np.zeros(len(column))
    penalties[pc.list_parent_indices(column).to_numpy()[has_penalty]] = entries.field("value").to_numpy()[has_penalty]
    return penalties


def component_means(components: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Metrics `reward/NAME`: for each component of the rewards, its mean over the responses that have it."""
    return {f"reward/{name}": sum(values) / len(values) for name, values in by_name(components).items()}


def by_name(components: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """For each component of the rewards, its values in the responses that have it."""
    values_of: dict[str, list[float]] = {}
    for row in components:
        for name, value in row.items():
            values_of.setdefault(name, []).append(value)
    return values_of


SHARD_TOKENS = 1 << 20
SHARD_RESPONSES = 4096
SHARD_ROUTES = 1 << 27
SHARD_SECONDS = 10.0
"""Limits on what a killed process can lose. A shard is written with the first group that is finished this many seconds
after the last write, or when it has this many tokens, responses, or bytes of routes."""
ROW_GROUP_TOKENS = 1 << 14
"""Most tokens in a row group of a shard, unless a single group of responses has more: no group of responses is in two
row groups. Sealing reads whole row groups."""
COMPRESSION: Final = "zstd"


@dataclass
class ShardBuffer:
    """Finished groups that are not in a shard yet."""

    groups: list[list[Sample]] = field(default_factory=list)
    tokens: int = 0
    responses: int = 0
    routes: int = 0
    """Bytes of the routes in the buffered groups."""
    since: float = field(default_factory=lambda: time.monotonic())
    """When the last shard was written, on the monotonic clock in seconds."""

    def add(self, group: list[Sample]) -> None:
        self.groups.append(group)
        self.tokens += _tokens(group)
        self.responses += len(group)
        self.routes += sum(s.routes.experts.nbytes for s in group if isinstance(s.routes, InMemoryRoutes))

    @property
    def due(self) -> bool:
        """Whether the buffered groups have reached a limit, so that they have to be written as a shard now."""
        full = self.tokens >= SHARD_TOKENS or self.responses >= SHARD_RESPONSES or self.routes >= SHARD_ROUTES
        return full or time.monotonic() - self.since >= SHARD_SECONDS


def write_shard(file: IO[bytes], groups: Sequence[list[Sample]]) -> None:
    """Write the groups, at least one, as a Parquet file; no group is in two row groups."""
    tables = (append_routes(to_table(samples), samples) for samples in _row_groups(groups))
    first = next(tables)
    with pq.ParquetWriter(file, first.schema, compression=COMPRESSION) as writer:
        for table in chain([first], tables):
            writer.write_table(table, row_group_size=len(table))


def _row_groups(groups: Sequence[list[Sample]]) -> Iterator[list[Sample]]:
    rows: list[Sample] = []
    size = 0
    for group in groups:
        tokens = _tokens(group)
        if rows and size + tokens > ROW_GROUP_TOKENS:
            yield rows
            rows, size = [], 0
        rows.extend(group)
        size += tokens
    yield rows


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(sample.tokens for sample in samples)
