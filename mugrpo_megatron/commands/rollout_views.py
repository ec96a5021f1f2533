"""A stage's responses on the screen: a table, groups in full with the veto's tokens marked, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.commands.later_policy import Stale
from mugrpo_megatron.observe.progress import new_table
from mugrpo_megatron.observe.streams import visible
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.samples import Sample

WIDE = 120
"""Columns from which the table has room for prompts and for when a response ended."""
CLIP = 48
"""Characters of a prompt and of a response in a wide table."""
SHORT = 12
"""Characters of a gold and of an extracted answer in a table."""
LONG = 400
"""Characters of one value of a source row, and of a reason; --json has all of them."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A response, its place in its group and update, its advantage, and its texts."""

    update: int
    place: int
    """In the group, from 0."""
    sample: Sample
    advantage: float
    prompt: str | None
    """None without a tokenizer."""
    text: str
    stale: Stale | None
    """None without a later policy."""


def print_table(console: Console, title: str, rollouts: Iterable[Rollout], vetoed: ObjectiveSection | None) -> None:
    """One line a response; `vetoed` is the objective whose veto was applied, None without a later policy."""
    wide = console.width >= WIDE
    table = new_table(escape(visible(title)), caption=legend(vetoed), padding=(0, 1, 0, 0))
    numbers = ["update", "group", "reward", "advantage", "tokens"] if wide else ["group", "reward", "A"]
    for name in (*numbers, *(["lowest ratio" if wide else "ratio", "dropped"] if vetoed else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for name in (*(["finish"] if wide else []), "gold", "answer"):
        table.add_column(name, overflow="ellipsis", no_wrap=True, max_width=SHORT)
    for name in ("prompt", "response") if wide else ("response",):
        table.add_column(name, overflow="ellipsis", no_wrap=True, max_width=CLIP if wide else None, ratio=None)
    for one in rollouts:
        sample, stale = one.sample, one.stale
        facts = [str(one.update)] if wide else []
        facts += [str(sample.group), f"{sample.reward:g}", f"{one.advantage:+.2f}"]
        facts += [str(len(sample.response_ids))] if wide else []
        if stale is not None:
            lowest = "–" if stale.lowest_ratio is None else f"{stale.lowest_ratio:.1e}"
            facts += [lowest, str(int(stale.dropped.sum()))]
        facts += [sample.finish_reason] if wide else []
        texts = [sample.gold, sample.extracted, *([one.prompt or ""] if wide else []), one.text]
        table.add_row(*facts, *(_line(text) for text in texts), style="" if one.advantage >= 0 else "dim")
    console.print(table)


def print_in_full(console: Console, rollouts: Iterable[Rollout], tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Prompt and source row of each group, then its responses with what is known of their scores.

    Without a tokenizer responses are their stored texts, in which no token can be marked.
    """
    group = None
    for one in rollouts:
        sample = one.sample
        if sample.group != group:
            group = sample.group
            console.rule(f"group {group}, {escape(visible(sample.problem))}")
            if one.prompt is not None:
                console.print(Text(visible(one.prompt), style="dim"))
            _print_facts(console, [("gold", sample.gold), *_row_facts(sample.row)])
        console.rule(f"response {one.place}: reward {sample.reward:g}, advantage {one.advantage:+.2f}", align="left")
        parts = ", ".join(f"{name} {value:g}" for name, value in sample.components.items())
        facts = [("answer", sample.extracted), ("why", sample.why), ("components", parts)]
        _print_facts(console, [*facts, ("end", f"{sample.finish_reason}, after {len(sample.response_ids)} tokens")])
        console.print(_response(one, tokenizer))


def print_json(console: Console, rollouts: Iterable[Rollout]) -> None:
    """One object a line, in ASCII."""
    for one in rollouts:
        line = json.dumps(_object(one)).replace("\x7f", "\\u007f")
        console.file.write(line + "\n")


def _object(one: Rollout) -> dict[str, Any]:
    sample, stale = one.sample, one.stale
    columns = {
        "update": one.update,
        "group": sample.group,
        "place": one.place,
        "problem": sample.problem,
        "prompt": one.prompt,
        "response": one.text,
        "gold": sample.gold,
        "extracted": sample.extracted,
        "why": sample.why,
        "reward": sample.reward,
        "components": dict(sample.components),
        "advantage": one.advantage,
        "tokens": len(sample.response_ids),
        "finish_reason": sample.finish_reason,
        "weight_version": sample.weight_version,
        "row": json.loads(sample.row) if sample.row else None,
    }
    if stale is not None:
        columns |= {
            "lowest_ratio": stale.lowest_ratio,
            "triggers": np.flatnonzero(stale.trigger).tolist(),
            "dropped": np.flatnonzero(stale.dropped).tolist(),
        }
    return columns


def _print_facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    for name, value in facts:
        if value:
            console.print(Text.assemble((f"{visible(name)}: ", "bold"), visible(_clipped(value))))


def _row_facts(row: str) -> list[tuple[str, str]]:
    """The columns of a source row, each as text."""
    if not row:
        return []
    columns = json.loads(row)
    return [(f"row.{key}", value if isinstance(value, str) else json.dumps(value)) for key, value in columns.items()]


def _clipped(text: str) -> str:
    return text if len(text) <= LONG else f"{text[:LONG]}… ({len(text):,} characters, --json shows all)"


def _line(text: str) -> str:
    """Text on one line of the table, as long as any column."""
    return escape(visible(text[: 4 * CLIP]).replace("\n", "⏎").replace("\t", " "))


def legend(objective: ObjectiveSection | None) -> str | None:
    """The caption that says what a trigger is and what is dropped."""
    if objective is None:
        return None
    return f"dropped: by veto {objective.veto}; trigger: ratio below {objective.trigger_ratio:g} where A < 0"


def _response(one: Rollout, tokenizer: PreTrainedTokenizerBase | None) -> Text:
    if tokenizer is None:
        return Text(visible(one.text))
    return Text(_decoded(tokenizer, one.sample.response_ids)) if one.stale is None else _marked(one, tokenizer)


def _marked(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Text:
    assert rollout.stale is not None
    text, inside = Text(), False
    stale = rollout.stale
    for token, trigger, dropped in zip(rollout.sample.response_ids, stale.trigger, stale.dropped, strict=True):
        if dropped != inside:
            text.append("⟦" if dropped else "⟧", style="red")
            inside = bool(dropped)
        piece = _decoded(tokenizer, np.array([token]))
        text.append(f"«{piece}»" if trigger else piece, style="bold red" if trigger else "red" if dropped else "")
    return text.append("⟧", style="red") if inside else text


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> str:
    """The tokens' text, special ones too, with control characters shown as escapes."""
    return visible(str(tokenizer.decode(ids.tolist())))
