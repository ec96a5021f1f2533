"""Responses of a stage on the screen: a table, a group in full, or JSON lines; a later policy's veto is marked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.files.json_text import to_json_value
from mugrpo_megatron.observe.progress import new_table
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.terminal import visible

WIDE = 120
"""Width of the screen, in characters, from which the table has room for prompts and finish reasons."""
CLIP = 48
"""Most characters of a prompt and of a response in a wide table."""
SHORT = 12
"""Most characters of a gold and of an extracted answer in a table."""
LONG = 400
"""Most characters that are shown of each fact about a group or a response, such as a reason or a value of the source
row; --json has the whole text."""


class StaleResponse(Protocol):
    """A response, and what the veto does to it under the weights of a later policy; extras/later_policy computes it."""

    @property
    def dropped(self) -> np.ndarray:
        """bool [R]: for each of the response's R tokens, whether the veto drops it from the loss or gives it little
        weight."""

    def cells(self) -> list[str]:
        """Two columns of the table: the response's lowest importance ratio, and its number of dropped tokens."""

    def record(self) -> dict[str, Any]:
        """The fields about the later policy that the response's JSON line gets."""

    def marked(self, tokens: Sequence[str]) -> Text:
        """The response's tokens as text, with marks on those that trigger the veto and on those that it drops."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A response of a stage with its advantage and its texts."""

    update: int
    index: int
    """Index of the response in its group, from 0."""
    sample: Sample
    advantage: float
    prompt: str | None
    """The prompt as text; None without a tokenizer."""
    text: str
    stale: StaleResponse | None = None
    """The response under a later policy; None if none was asked for."""


def print_table(console: Console, title: str, rollouts: Iterable[Rollout], legend: str | None) -> int:
    """Print a line for each response; returns their number.

    `legend` explains the columns about the veto; it is None if no later policy was asked for.
    """
    wide = console.width >= WIDE
    table = new_table(escape(visible(title)), caption=legend, padding=(0, 1, 0, 0))
    numbers = ["update", "group", "reward", "advantage", "tokens"] if wide else ["group", "reward", "A"]
    for name in (*numbers, *(["lowest ratio" if wide else "ratio", "dropped"] if legend else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for name in (*(["finish"] if wide else []), "gold", "answer"):
        table.add_column(name, overflow="ellipsis", no_wrap=True, max_width=SHORT)
    for name in ("prompt", "response") if wide else ("response",):
        table.add_column(name, overflow="ellipsis", no_wrap=True, max_width=CLIP if wide else None, ratio=None)
    for rollout in rollouts:
        sample = rollout.sample
        cells = [str(sample.group), f"{sample.reward:g}", f"{rollout.advantage:+.2f}"]
        if wide:
            cells = [str(rollout.update), *cells, str(len(sample.response_ids))]
        cells += rollout.stale.cells() if rollout.stale else []
        texts = [sample.gold, sample.extracted, rollout.text]
        if wide:
            texts = [sample.finish_reason, *texts[:2], rollout.prompt or "", rollout.text]
        table.add_row(*cells, *map(_line, texts), style="" if rollout.advantage >= 0 else "dim")
    if table.row_count:
        console.print(table)
    return table.row_count


def print_group(console: Console, rollouts: Iterable[Rollout], tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Print each group: its prompt and source row, then its responses with their scores. Returns the number of
    responses.

    Without a tokenizer the responses are printed as the stage stores them, and no token is marked.
    """
    group, count = None, 0
    for rollout in rollouts:
        count += 1
        sample = rollout.sample
        if sample.group != group:
            group = sample.group
            console.rule(f"group {group}, {escape(visible(sample.problem))}")
            if rollout.prompt is not None:
                console.print(Text(visible(rollout.prompt), style="dim"))
            columns = json.loads(sample.row) if sample.row else {}
            texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in columns.items()}
            _print_facts(console, [("gold", sample.gold), *((f"row.{key}", text) for key, text in texts.items())])
        heading = f"response {rollout.index}: reward {sample.reward:g}, advantage {rollout.advantage:+.2f}"
        console.rule(heading, align="left")
        components = ", ".join(f"{name} {value:g}" for name, value in sample.components.items())
        facts = [("answer", sample.extracted), ("why", sample.why), ("components", components)]
        _print_facts(console, [*facts, ("end", f"{sample.finish_reason}, after {len(sample.response_ids)} tokens")])
        console.print(_response(rollout, tokenizer))
    return count


@dataclass(slots=True)
class ProblemRollouts:
    """Counts of the responses to one problem in a stage."""

    problem: str
    row: dict[str, Any]
    """The problem's row in the data set. Without a row these are its question and gold, or nothing if the question is
    not known."""
    gold: str
    responses: int = 0
    scored: int = 0
    right: int = 0
    tokens: int = 0
    cut: int = 0
    """Number of responses with finish reason `length`."""

    @property
    def pass_rate(self) -> float | None:
        """Share of right responses among those that were scored; None if none was scored."""
        return self.right / self.scored if self.scored else None

    def record(self) -> dict[str, Any]:
        """The problem's row with `pass_rate` and the other counts added, in the form that `data.train` reads."""
        counts = {"responses": self.responses, "tokens": self.tokens / self.responses, "cut": self.cut / self.responses}
        return self.row | {"pass_rate": self.pass_rate, "rollouts": counts}


def print_problems(console: Console, title: str, problems: Sequence[ProblemRollouts], limit: int) -> None:
    """Print a line for each of the first `limit` problems."""
    table = new_table(escape(visible(title)), padding=(0, 1, 0, 0))
    for name in ("responses", "pass rate", "tokens", "cut"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("gold", overflow="ellipsis", no_wrap=True, max_width=SHORT)
    table.add_column("problem", overflow="fold")
    for entry in problems[:limit]:
        rate = "not scored" if entry.pass_rate is None else f"{entry.pass_rate:.0%}"
        shares = f"{entry.tokens / entry.responses:.0f}", f"{entry.cut / entry.responses:.0%}"
        table.add_row(str(entry.responses), rate, *shares, _line(entry.gold), _line(entry.problem))
    console.print(table)


def print_json(console: Console, records: Iterable[dict[str, Any]]) -> int:
    """Print each object as one line of ASCII JSON; returns the number of lines."""
    count = 0
    for record in records:
        count += 1
        console.file.write(json.dumps(record).replace("\x7f", "\\u007f") + "\n")
    return count


def record_of(rollout: Rollout) -> dict[str, Any]:
    """Everything that is known of a response, as a JSON object."""
    sample = rollout.sample
    record = {
        "update": rollout.update,
        "group": sample.group,
        "index": rollout.index,
        "problem": sample.problem,
        "prompt": rollout.prompt,
        "response": rollout.text,
        "gold": sample.gold,
        "extracted": sample.extracted,
        "why": sample.why,
        "reward": sample.reward,
        "components": dict(sample.components),
        "advantage": float(rollout.advantage),
        "tokens": len(sample.response_ids),
        "prompt_ids": sample.prompt_ids.tolist(),
        "response_ids": sample.response_ids.tolist(),
        "logprobs": None if np.isnan(sample.engine_logprobs).all() else to_json_value(sample.engine_logprobs.tolist()),
        "loss_mask": None if sample.loss_mask is None else sample.loss_mask.tolist(),
        "finish_reason": sample.finish_reason,
        "weight_version": sample.weight_version,
        "row": json.loads(sample.row) if sample.row else None,
    }
    return record | (rollout.stale.record() if rollout.stale else {})


def _print_facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    for name, value in facts:
        if value:
            text = value if len(value) <= LONG else f"{value[:LONG]}… ({len(value):,} characters, --json shows all)"
            console.print(Text.assemble((f"{visible(name)}: ", "bold"), visible(text)))


def _line(text: str) -> str:
    return escape(visible(text[: 4 * CLIP]).replace("\n", "⏎").replace("\t", " "))


def _response(rollout: Rollout, tokenizer: PreTrainedTokenizerBase | None) -> Text:
    """Returns the response as text, with its special tokens if there is a tokenizer; control characters are escaped."""
    if tokenizer is None:
        return Text(visible(rollout.text))
    ids = rollout.sample.response_ids.tolist()
    if rollout.stale is None:
        return Text(visible(str(tokenizer.decode(ids))))
    return rollout.stale.marked([visible(str(tokenizer.decode([token]))) for token in ids])
