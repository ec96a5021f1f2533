"""Reads the data of a report that are not metrics: responses of sealed stages and of evaluations, and stages' probes.

At most MOST_STAGES stages are read. Of a stage the rewards of all responses are read, but the lengths and answers of at
most LENGTH_UPDATES updates. A damaged file is left out, and the page names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.examples import Example, read_examples, shorten
from mugrpo_megatron.rewards.pool import reward_before_penalty
from mugrpo_megatron.stages.manifest import SEALED_NAME, check_origin, read_manifest
from mugrpo_megatron.stages.probe import Probe, read_probe

MOST_STAGES = 8
"""Most stages that are read; they are evenly spaced, with the first and the last."""
MOST_EVALUATIONS = 4
LENGTH_UPDATES = 16
"""Updates of a stage, evenly spaced, whose responses' lengths are read."""
EXAMPLE_GROUPS = 3
"""Number of groups of a stage of which the best and the worst response are shown."""

TOKENIZER = "tokenizer.json"

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class StageResponses:
    """The responses of a sealed stage: the rewards of all N, the lengths of some, and the texts of a few."""

    rewards: np.ndarray
    """float64 [N], in the order of the groups."""
    verdicts: np.ndarray
    """float64 [N]: the rewards before the overlong penalty (`reward_before_penalty`)."""
    groups: np.ndarray
    """int64 [N]: number of each response's group."""
    lengths: np.ndarray
    """int64: number of tokens of each response, of the updates that were read."""
    examples: list[Example]
    unparsed: float | None = None
    """Fraction of the responses in `lengths` in which the verifier found no answer; None if the stage's file does not
    have answers."""


@dataclass(frozen=True, slots=True)
class Details:
    """The contents of a run's page that are not metrics; a field is empty if the run has nothing of the kind."""

    stages: Mapping[int, StageResponses] = field(default_factory=dict)
    probes: Mapping[int, Probe] = field(default_factory=dict)
    evaluations: Mapping[int, Sequence[Example]] = field(default_factory=dict)
    """Number of updates that the run had taken -> examples of the evaluation at that point."""
    damaged: Sequence[str] = ()
    """A sentence for each part that could not be read."""


NONE = Details()


def read_details(run_dir: Path, recipe: Mapping[str, Any]) -> Details:
    """Read the stages, probes and evaluations in a run directory; `recipe` has the recipe's tables."""
    damaged: list[str] = []
    read_stage = partial(_stage, run_dir=run_dir, recipe=recipe)
    stages = _parts(run_dir / "stages", r"(\d{5})", MOST_STAGES, read_stage, damaged)
    probes = _parts(run_dir / "probe", r"stage(\d{5})", MOST_STAGES, read_probe, damaged)
    evaluations = _parts(run_dir / "evaluations", r"update(\d+)\.jsonl", MOST_EVALUATIONS, read_examples, damaged)
    return Details(stages, probes, evaluations, damaged)


def spaced(numbers: Sequence[int], most: int) -> list[int]:
    """At most `most` of the numbers, evenly spaced, with the first and the last of them."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[round(index * (len(numbers) - 1) / (most - 1))] for index in range(most)]


def _parts(
    folder: Path, name: str, most: int, read: Callable[[Path], Part | None], damaged: list[str]
) -> dict[int, Part]:
    paths = {int(match[1]): path for path in folder.glob("*") if (match := re.fullmatch(name, path.name))}
    parts = {}
    for number in spaced(sorted(paths), most):
        try:
            parts[number] = read(paths[number])
        except UserError as error:
            damaged.append(str(error))
    return {number: part for number, part in parts.items() if part is not None}


def _stage(directory: Path, run_dir: Path, recipe: Mapping[str, Any]) -> StageResponses | None:
    """The responses of the stage in `directory`; None if the stage is not sealed. UserError if its file is damaged,
    lacks a column that is read, or is in the directory of another stage."""
    path = directory / SEALED_NAME
    if not path.is_file():
        return None
    check_origin(directory, read_manifest(directory), None)
    try:
        with pq.ParquetFile(path) as file:
            numbers = file.read(columns=["reward", "group"])
            some = spaced(range(file.num_row_groups), LENGTH_UPDATES)
            columns = [name for name in ("response_ids", "extracted") if name in file.schema_arrow.names]
            texts = file.read_row_groups(some, columns=columns)
            rewards = numbers["reward"].to_numpy().astype(np.float64)
            groups = numbers["group"].to_numpy().astype(np.int64)
            lengths = pc.list_value_length(texts["response_ids"]).to_numpy().astype(np.int64)
            answers = texts["extracted"].to_pylist() if "extracted" in columns else []
            unparsed = sum(not text for text in answers) / len(answers) if answers else None
            verdicts = _verdicts(file, rewards, recipe)
            return StageResponses(rewards, verdicts, groups, lengths, _examples(file, run_dir, recipe), unparsed)
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{path} cannot be read ({error}), so its responses are not shown; restore it from a copy"
        ) from None
    except (KeyError, ValueError, TypeError):
        raise UserError(
            f"{path} does not have the columns that this version reads, so its responses are not shown; make the "
            "report with the version that wrote it"
        ) from None


def _verdicts(file: pq.ParquetFile, rewards: np.ndarray, recipe: Mapping[str, Any]) -> np.ndarray:
    if not recipe.get("reward", {}).get("overlong_buffer_tokens") or "components" not in file.schema_arrow.names:
        return rewards
    parts = file.read(columns=["components"])["components"].to_pylist()
    verdicts = [
        reward_before_penalty(reward, _named(part)) for reward, part in zip(rewards.tolist(), parts, strict=True)
    ]
    return np.array(verdicts, dtype=np.float64)


def _named(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {one["name"]: one["value"] for one in parts}


def _examples(file: pq.ParquetFile, run_dir: Path, recipe: Mapping[str, Any]) -> list[Example]:
    """The best and the worst response of the first groups in which rewards differ, or else of the first groups. Empty
    if the stage's file has no texts."""
    if "text" not in file.schema_arrow.names or not file.num_row_groups:
        return []
    names = ("group", "problem", "reward", "finish_reason", "text", "gold", "extracted", "why", "components")
    table = file.read_row_group(0, columns=[*names, "prompt_ids", "response_ids"])
    groups, rewards = table["group"].to_numpy(), table["reward"].to_numpy()
    every = [np.flatnonzero(groups == group) for group in dict.fromkeys(groups.tolist())]
    mixed = [own for own in every if np.ptp(rewards[own]) > 0]
    chosen = (mixed or every)[:EXAMPLE_GROUPS]
    places = [int(p) for own in chosen for p in dict.fromkeys((own[rewards[own].argmax()], own[rewards[own].argmin()]))]
    few = table.take(places)
    lengths = pc.list_value_length(few["response_ids"]).to_pylist()
    questions = prompt_texts(few["prompt_ids"].to_pylist(), run_dir, recipe)
    rows = few.select(list(names)).to_pylist()
    return [
        Example(
            set="",
            problem=row["problem"],
            question=question,
            gold=row["gold"],
            text=shorten(row["text"]),
            extracted=row["extracted"],
            why=row["why"],
            reward=row["reward"],
            tokens=tokens,
            truncated=row["finish_reason"] == "length",
            components=_named(row["components"]),
        )
        for row, question, tokens in zip(rows, questions, lengths, strict=True)
    ]


def prompt_texts(prompts: Sequence[Sequence[int]], run_dir: Path, recipe: Mapping[str, Any]) -> list[str]:
    """The text of each prompt as the model saw it; empty texts if no tokenizer can be read in the run's hf/ or in
    `model.path`."""
    model = recipe.get("model", {}).get("path", "")
    for path in (run_dir / "hf" / TOKENIZER, Path(str(model)) / TOKENIZER):
        if not path.is_file():
            continue
        try:
            tokenizer = Tokenizer.from_file(str(path))
            return [tokenizer.decode(list(ids), skip_special_tokens=False) for ids in prompts]
        except Exception:  # tokenizers raises bare Exception for a damaged file
            continue
    return [""] * len(prompts)
