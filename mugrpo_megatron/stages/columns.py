"""Columns of a stage: whatever a pass computes about its responses, in a file beside it, with what it belongs to.

    stages/00003/behaviour.parquet               logprobs under the weights that the stage began with
    stages/00003/learner_routes.bin              experts that the learner's routers chose then (`routes.py`)
    proximal/stage00003-age00040.parquet         logprobs under the weights before update 40, from this update on
    ref/stage00003.parquet                       logprobs under the reference policy
    auxiliary/stage00003-teacher-NAME.parquet       logprobs under a teacher
    auxiliary/stage00003-reward-NAME.parquet        a judge's scores, with its prompts and answers
    behaviour.json, stage00003-age00040.json     what they belong to, and the checksums of every byte

A column is whole once its JSON file is written. It is bound to the content of its stage and to its policy, so another's
is refused. Remove both files, and the same command computes them again.
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

FORMAT = 1
SCHEMA = pa.schema([pa.field("learner_logprobs", pa.list_(pa.float32()))])

Append = Callable[[list[np.ndarray]], None]
"""Appends one update's log-probabilities, float32 [R] per response."""


def computed_again(later: str = "") -> str:
    """How a damaged column is repaired; `later` names the checkpoints that begin with weights after those it is of."""
    also = f" and the checkpoints {later}" if later else ""
    return f"restore both of its files from a copy, or remove them{also}: the same command computes them again"


@dataclass(frozen=True)
class Column:
    """The file `path` and its JSON file."""

    path: Path
    of: Mapping[str, Any]
    """JSON values: the responses and the policy that it belongs to."""
    repair: str = computed_again()
    """Ends every error."""

    name: ClassVar[str]
    """Of its body in the JSON file."""

    @property
    def index(self) -> Path:
        """The JSON file."""
        return self.path.with_suffix(".json")

    @property
    def complete(self) -> bool:
        """Whether it was written to its end."""
        return self.path.exists() and self.index.exists()

    def body(self) -> dict[str, Any]:
        """The JSON file's content; UserError when it is missing or damaged, or belongs to something else than `of`."""
        try:
            body: dict[str, Any] = read_checksummed_json(self.index, self.name, format=FORMAT)
            of = body["of"]
        except (OSError, ValueError, KeyError):
            raise UserError(
                f"{self.index}: missing or damaged, so {self.path.name} cannot be checked; {self.repair}"
            ) from None
        if of != self.of:
            raise UserError(f"{self.path}: of other responses or of another policy than the run's; {self.repair}")
        return body

    def begin(self) -> None:
        """Remove an earlier one's JSON file, durably, and what killed writers left."""
        for name in (self.path.name, self.index.name):
            remove_leftovers(self.path.parent, name)
        try:
            self.path.parent.mkdir(exist_ok=True)
            if self.index.exists():
                self.index.unlink()
                fsync(self.path.parent)
        except OSError as error:
            raise full_disk_error(error, self.path) or error from error

    def finish(self, body: Mapping[str, Any]) -> None:
        """Write the JSON file: from now on the column is whole."""
        write_checksummed_json(self.index, self.name, {"of": dict(self.of), **body}, format=FORMAT)

    def remove(self) -> None:
        self.index.unlink(missing_ok=True)
        self.path.unlink()


class TableColumn(Column):
    """A column as Parquet: row group k is update k, one row per response in the order of its samples."""

    schema: ClassVar[pa.Schema]

    @contextmanager
    def write_tables(self, enabled: bool = True, weights: str = "") -> Iterator[Callable[[pa.Table], None]]:
        """Yield a function that appends one update's rows; the column is whole or absent.

        `enabled` is true on one rank; on the others the function does nothing. `weights` is the fingerprint of the
        checkpoint that computed it, if that is one.
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
        """The rows of the `update`-th update in the file, with all columns or some.

        Raises UserError, ending with `repair`, when a file is missing or damaged, or belongs to something else.
        """
        body = self.body()
        for span in (body["footer"], body["row_groups"][update]):
            verify(self.path, Span(**span), self.repair)
        with pq.ParquetFile(self.path) as file:
            return file.read_row_group(update, columns=columns)

    @property
    def weights(self) -> str | None:
        """The fingerprint of the checkpoint that computed it; None where that is not known."""
        try:
            return str(read_checksummed_json(self.index, self.name, format=FORMAT)["weights"])
        except (OSError, ValueError, KeyError):
            return None


class LogprobColumn(TableColumn):
    """Log-probabilities of every response's tokens."""

    name, schema = "logprobs", SCHEMA

    @contextmanager
    def write(self, enabled: bool = True, weights: str = "") -> Iterator[Append]:
        """`write_tables` of an update's logprobs."""
        with self.write_tables(enabled, weights) as append:
            yield lambda logprobs: append(logprob_table(logprobs))

    def read(self, update: int) -> list[np.ndarray]:
        """Logprobs of the responses of the `update`-th update in the file, float32 [R] each; raises as `read_table`."""
        return logprobs_of(self.read_table(update))


class ScoreColumn(TableColumn):
    """A judge's scores, and what they were read from."""

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
        """Scores float64 of the `update`-th update's responses, NaN where there is none; raises as `read_table`."""
        return self.read_table(update, ["score"])["score"].to_numpy()


def logprob_table(logprobs: Sequence[np.ndarray]) -> pa.Table:
    """The rows of an update's logprobs, float32 [R] per response."""
    return pa.table([pa.array(logprobs, SCHEMA.field(0).type)], schema=SCHEMA)


def logprobs_of(table: pa.Table) -> list[np.ndarray]:
    """What `logprob_table` was made of."""
    column: Any = table.column(0).combine_chunks()
    flat, offsets = column.flatten().to_numpy(), column.offsets.to_numpy()
    return np.split(flat, offsets[1:-1])
