"""A stage's probe: the logprobs of some of its responses after different numbers of its updates.

    probe/stage00003/responses.parquet    the responses: tokens as text, the engine's logprobs, reward, advantage
    probe/stage00003/age00128.parquet     their logprobs under the weights after 128 of the stage's updates

The report shows it as a heat map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import durable_file, remove_leftovers

INTERVALS = 8
"""Most intervals between the probes of a stage."""
MIN_UPDATES_APART = 8
"""Fewest updates between probes, so that they stay a small share of a short stage's work."""
RESPONSES = "responses.parquet"
SCHEMA = pa.schema(
    {
        "update": pa.int32(),
        "group": pa.int32(),
        "problem": pa.string(),
        "reward": pa.float64(),
        "advantage": pa.float64(),
        "tokens": pa.list_(pa.string()),
        "engine_logprobs": pa.list_(pa.float32()),
        "mask": pa.list_(pa.bool_()),
    }
)
LOGPROBS = pa.schema({"logprobs": pa.list_(pa.float32())})


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """A probed response of R tokens."""

    update: int
    """The update of the stage that trains on it, from 0."""
    group: int
    problem: str
    reward: float
    advantage: float
    tokens: list[str]
    """[R]: tokens as text."""
    engine_logprobs: np.ndarray
    """float32 [R]: log-probabilities that the engine gave."""
    mask: list[bool] | None = None
    """[R]: the tokens that are trained on; None for all."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The probed responses of a stage, and their logprobs at each age (number of the stage's updates) of the probe."""

    responses: list[ProbeRow]
    logprobs: dict[int, list[np.ndarray]]
    """Age -> float32 [R] of each response under the weights after so many of the stage's updates; ages ascend."""


def probe_ages(updates: int) -> tuple[int, ...]:
    """The ages (numbers of updates taken) at which a stage of so many updates is probed: at most INTERVALS + 1, none if
    it has fewer than MIN_UPDATES_APART updates."""
    intervals = min(INTERVALS, updates // MIN_UPDATES_APART)
    return tuple(round(index * updates / intervals) for index in range(intervals + 1)) if intervals else ()


def write_responses(directory: Path, responses: Sequence[ProbeRow]) -> None:
    """Write the responses of a stage's probe; call this before `write_age`, which writes their logprobs at each age."""
    directory.mkdir(parents=True, exist_ok=True)
    columns = {name: [getattr(row, name) for row in responses] for name in SCHEMA.names}
    _write(directory / RESPONSES, pa.table(columns, schema=SCHEMA))


def write_age(directory: Path, age: int, logprobs: Sequence[np.ndarray]) -> None:
    """Write the logprobs at one age of the stage, float32 [R] for each response; an earlier file is replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / f"age{age:05d}.parquet", pa.table({"logprobs": list(logprobs)}, schema=LOGPROBS))


def read_probe(directory: Path) -> Probe | None:
    """Returns what is written of a stage's probe; None if there is nothing. Raises UserError when a file is damaged."""
    if not (directory / RESPONSES).is_file():
        return None
    try:
        rows = pq.read_table(directory / RESPONSES, schema=SCHEMA).to_pylist()
        responses = [
            ProbeRow(**{**row, "engine_logprobs": np.array(row["engine_logprobs"], np.float32)}) for row in rows
        ]
        logprobs = {}
        for path in sorted(directory.glob("age*.parquet")):
            values = pq.read_table(path, schema=LOGPROBS)["logprobs"].to_pylist()
            age = int(path.stem.removeprefix("age"))
            logprobs[age] = [np.array(row, np.float32) for row in values]
            if list(map(len, values)) != [len(response.tokens) for response in responses]:
                raise ValueError(f"{path.name} was computed for other responses")
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        raise UserError(f"{directory} is damaged ({error}); remove it, the report does not need it") from None
    return Probe(responses, logprobs)


def _write(path: Path, table: pa.Table) -> None:
    remove_leftovers(path.parent, path.name)
    with durable_file(path) as file:
        pq.write_table(table, file, compression="zstd")
