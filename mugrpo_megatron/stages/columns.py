"""Columns of a stage: values that a pass over its responses computes, stored in a file beside the stage.

    stages/00003/behaviour.parquet               logprobs under the weights that the stage began with
    stages/00003/learner_routes.bin              experts that the learner's routers chose then (`routes.py`)
    proximal/stage00003-age00040.parquet         logprobs under the weights before update 40, from this update on
    ref/stage00003.parquet                       logprobs under the reference policy
    auxiliary/stage00003-teacher-NAME.parquet    logprobs under a teacher
    auxiliary/stage00003-reward-NAME.parquet     a judge's scores, with its prompts and answers
    behaviour.json, stage00003-age00040.json     identity of each column, and the checksums of all its bytes

A column is complete once its JSON file is written. Its identity names the stage's content and the policy, so the column
of another stage or policy is refused. If you remove both files, and the checkpoints that an error about the column
names, the same command computes the column again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import (
    Span,
    durable_file,
    fsync,
    full_disk_error,
    read_checksummed_json,
    remove_leftovers,
    write_checksummed_json,
)
from mugrpo_megatron.stages.manifest import parquet_spans, verify

FORMAT = 2
SCHEMA = pa.schema([pa.field("learner_logprobs", pa.list_(pa.float32()))])

Append = Callable[[list[np.ndarray]], None]
"""Function that appends one update's log-probabilities to a column: float32 [R] for each response of R tokens."""


def recompute_remedy(later: str = "") -> str:
    """The remedy for a damaged column. `later` says which checkpoints are newer than the column's policy, for instance
    "inside this stage"; "" if none has to be removed."""
    # If there are such checkpoints, they must be removed too, because the run has to resume from one whose weights are
    # the column's policy.
    also = f" and the checkpoints {later}" if later else ""
    return (
        f"restore both files of the column (values and .json index) from a copy, or remove them{also}: the same "
        "command computes them again"
    )


@dataclass(frozen=True)
class Column:
    """A column's two files: the values in `path`, and beside it the index, a JSON file."""

    path: Path
    identity: Mapping[str, Any]
    """JSON values that say which responses and which policy the column was computed for."""
    remedy: str = recompute_remedy()
    """What the user can do about a damaged column; every error about the column ends with this."""

    name: ClassVar[str]
    """Key under which the JSON file has the column's identity and checksums."""

    @property
    def index(self) -> Path:
        return self.path.with_suffix(".json")

    @property
    def complete(self) -> bool:
        """Whether both files exist; the index is written last."""
        return self.path.exists() and self.index.exists()

    def body(self) -> dict[str, Any]:
        """The content of the index. UserError when that file is missing or damaged, or when it has another identity
        than this column."""
        try:
            body: dict[str, Any] = read_checksummed_json(self.index, self.name, format=FORMAT)
            identity = body["identity"]
        except (OSError, ValueError, KeyError):
            raise UserError(
                f"{self.index}: missing or damaged, so {self.path.name} cannot be checked; {self.remedy}"
            ) from None
        if identity != self.identity:
            raise UserError(f"{self.path}: was computed for other responses or another policy; {self.remedy}")
        return body

    def begin(self) -> None:
        """Prepare to write: remove an earlier index and what killed writers left behind."""
        for name in (self.path.name, self.index.name):
            remove_leftovers(self.path.parent, name)
        try:
            self.path.parent.mkdir(exist_ok=True)
            if self.index.exists():
                self.index.unlink()
                fsync(self.path.parent)  # otherwise a power cut may restore the old index beside the new file
        except OSError as error:
            raise full_disk_error(error, self.path) or error from error

    def finish(self, body: Mapping[str, Any]) -> None:
        """Write the index, which makes the column complete."""
        write_checksummed_json(self.index, self.name, {"identity": dict(self.identity), **body}, format=FORMAT)

    def remove(self) -> None:
        # The index goes first: a kill in between leaves an incomplete column, never an index without its file.
        self.index.unlink(missing_ok=True)
        self.path.unlink()


class TableColumn(Column):
    """A column in Parquet: row group k belongs to the file's k-th update, and has a row for each of its samples."""

    schema: ClassVar[pa.Schema]

    @contextmanager
    def write_tables(self, enabled: bool = True, weights: str = "") -> Iterator[Callable[[pa.Table], None]]:
        """Yield a function that appends the rows of one update. The column is complete after the block, and incomplete
        if the block raises.

        `enabled` is true on one rank; on the others the function does nothing. `weights` is the checksum of the
        checkpoint that computed the column (`weights.families.fingerprint`), such as a teacher or the reference policy;
        "" if the learner computed it with its own weights.
        """
        if not enabled:
            yield lambda table: None
            return
        self.begin()
        with durable_file(self.path) as file, pq.ParquetWriter(file, self.schema) as writer:
            yield lambda table: writer.write_table(table, row_group_size=max(1, len(table)))
        row_groups, _, footer = parquet_spans(self.path, self.schema.names)
        spans = {"row_groups": [asdict(span) for span in row_groups], "footer": asdict(footer)}
        self.finish({"weights": weights, **spans})

    def read_table(self, update: int, columns: list[str] | None = None) -> pa.Table:
        """The rows of the `update`-th update in the file, from 0; with all columns of the file, or only `columns`.

        Raises UserError that ends with `remedy` when a file is missing or damaged, or when the column has another
        identity.
        """
        body = self.body()
        for span in (body["footer"], body["row_groups"][update]):
            verify(self.path, Span(**span), self.remedy)
        with pq.ParquetFile(self.path) as file:
            return file.read_row_group(update, columns=columns)

    @property
    def weights(self) -> str | None:
        """The checksum of the checkpoint that computed the column, as given to `write_tables`; None if the index cannot
        be read."""
        try:
            return str(read_checksummed_json(self.index, self.name, format=FORMAT)["weights"])
        except (OSError, ValueError, KeyError):
            return None


class LogprobColumn(TableColumn):
    name, schema = "logprobs", SCHEMA

    @contextmanager
    def write(self, enabled: bool = True, weights: str = "") -> Iterator[Append]:
        with self.write_tables(enabled, weights) as append:
            yield lambda logprobs: append(logprob_table(logprobs))

    def read(self, update: int) -> list[np.ndarray]:
        """Logprobs float32 [R] of each response of the `update`-th update in the file.

        Raises UserError when a file of the column is missing or damaged, or when the column has another identity.
        """
        column: Any = self.read_table(update).column(0).combine_chunks()
        return np.split(column.flatten().to_numpy(), column.offsets.to_numpy()[1:-1])


class ScoreColumn(TableColumn):
    """A column with a judge's scores, its prompts and its answers."""

    name = "scores"
    schema = pa.schema(
        [
            pa.field("score", pa.float64(), metadata={"meaning": "The judge's score; null: it cannot be read."}),
            pa.field("prompt", pa.string(), metadata={"meaning": "What the judge was asked, as its tokens' text."}),
            pa.field("answer", pa.string(), metadata={"meaning": "What it answered."}),
            pa.field("why", pa.string(), metadata={"meaning": "Why there is no score; else empty."}),
        ]
    )

    def read(self, update: int) -> np.ndarray:
        """Scores float64 [N] of the `update`-th update's responses, NaN where there is none.

        Raises UserError when a file of the column is missing or damaged, or when the column has another identity.
        """
        return self.read_table(update, ["score"])["score"].to_numpy()


def logprob_table(logprobs: Sequence[np.ndarray]) -> pa.Table:
    """A table with the logprobs of an update's responses, float32 [R] each, one row for each response."""
    return pa.table([pa.array(logprobs, SCHEMA.field(0).type)], schema=SCHEMA)
