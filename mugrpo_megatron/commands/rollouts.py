"""`mugrpo rollouts`: show and search the responses of a sealed stage, and the tokens that the veto would drop."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.algorithm.advantages import group_advantages
from mugrpo_megatron.commands.later_policy import LaterPolicy, Stale
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import check_tokenizer
from mugrpo_megatron.observe.streams import visible
from mugrpo_megatron.recipe import ObjectiveSection, Recipe, load_recipe
from mugrpo_megatron.rewards.shaping import verdict_in
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.record import with_cached_model
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.columns import LogprobColumn
from mugrpo_megatron.stages.manifest import check_stage, of_stage
from mugrpo_megatron.stages.store import StageStore

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
    table = Table(title=escape(visible(title)), caption=legend(vetoed), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
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
    found = {
        "update": one.update,
        "group": sample.group,
        "response": one.place,
        "problem": sample.problem,
        "prompt": one.prompt,
        "text": one.text,
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
        found |= {
            "lowest_ratio": stale.lowest_ratio,
            "triggers": np.flatnonzero(stale.trigger).tolist(),
            "dropped": np.flatnonzero(stale.dropped).tolist(),
        }
    return found


def _print_facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    for name, value in facts:
        if value:
            console.print(Text.assemble((f"{visible(name)}: ", "bold"), visible(_clipped(value))))


def _row_facts(row: str) -> list[tuple[str, str]]:
    """The columns of a source row, each as text."""
    if not row:
        return []
    found = json.loads(row)
    return [(f"row.{key}", value if isinstance(value, str) else json.dumps(value)) for key, value in found.items()]


def _clipped(text: str) -> str:
    return text if len(text) <= LONG else f"{text[:LONG]}… ({len(text):,} characters, --json shows all)"


def _line(text: str) -> str:
    """Text on one line of the table, as long as any column."""
    return escape(visible(text[: 4 * CLIP]).replace("\n", "⏎").replace("\t", " "))


def legend(objective: ObjectiveSection | None) -> str | None:
    """The caption that says what a trigger is and what is dropped."""
    if objective is None:
        return None
    measure = {"token": "ratio", "prefix_mean": "prefix's mean ratio"}[objective.trigger]
    return f"dropped: by veto {objective.veto}; trigger: {measure} below {objective.trigger_ratio:g} where A < 0"


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


SIGNS = {"positive": 1, "negative": -1, "zero": 0}
RIGHT = 0.5
"""Verdict, the reward without shaping, from which a response counts as right."""
PIPED_WIDTH = 180
"""Columns where no terminal tells how many there are."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which responses to show."""

    update: int | None = None
    group: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    right: bool | None = None
    """Only those with a verdict of at least `RIGHT`, or only the others."""
    advantage: Literal["positive", "negative", "zero"] | None = None
    vetoed: bool = False
    """Only those of which the veto drops tokens."""
    grep: str | None = None
    """Regular expression that the prompt, the response, what is known of its score, or a value of its row contains."""
    limit: int = 20

    @property
    def whole(self) -> bool:
        """Whether every response of the stage is selected, but for the limit."""
        return replace(self, limit=0) == Selection(limit=0)


def browse(
    run_dir: Path,
    stage: int | None,
    selection: Selection,
    policy: Path | None,
    overrides: Sequence[str] = (),
    as_json: bool = False,
) -> None:
    """Print the selected responses: a table, one group in full with its triggers marked, or JSON lines.

    The veto is applied under `policy`, a Hugging Face checkpoint; with `selection.vetoed` by default the trained one
    in the run's `hf/`. `overrides` of the run's recipe show another veto: `objective.trigger_ratio=0.1`. Where neither
    the run nor its model nor `policy` has a tokenizer, prompts are left out and responses are the stored texts. Raises
    UserError when the run or the stage does not exist.
    """
    directory = RunDirectory(run_dir)
    recipe = load_recipe(directory.recipe, overrides) if directory.recipe.exists() else None
    if recipe is None:
        raise UserError(f"{run_dir}: not a run directory (it has no {directory.recipe.name})")
    policy = policy or (directory.hf if selection.vetoed else None)
    number, store, note = _stage(directory, stage)
    _check(selection, store, recipe)
    later = LaterPolicy(policy, recipe.rollout.temperature) if policy else None
    hf = directory.hf if directory.hf.exists() else with_cached_model(recipe, run_dir).model.directory
    tokenizer = _tokenizer([hf, *([policy] if policy else [])])
    missing = "" if tokenizer else _without_tokenizer(run_dir, hf)
    scored = directory.behaviour(number) if later and recipe.rollout.behaviour == "learner" else None
    found = islice(_rollouts(store, selection, later, recipe, tokenizer, scored), min(selection.limit, sys.maxsize))
    shown = Shown(found)
    console = Console()
    notes = Console(stderr=True) if as_json else console
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    for line in (note, missing):
        _tell(notes, line)
    vetoed = recipe.objective if later else None
    first = next(shown, None)
    chosen = shown if first is None else chain([first], shown)
    if first is None and selection.limit:
        _tell(notes, _nothing(number, selection, vetoed))
    elif as_json:
        print_json(console, chosen)
    elif selection.group is not None:
        print_in_full(console, chosen, tokenizer)
    else:
        print_table(console, f"{run_dir}: stage {number}", chosen, vetoed)
    _tell(notes, _cut(shown.count, selection, store))


class Shown(Iterator[Rollout]):
    """Responses on their way to the screen, counted."""

    def __init__(self, rollouts: Iterable[Rollout]) -> None:
        self._rollouts, self.count = iter(rollouts), 0

    def __next__(self) -> Rollout:
        one = next(self._rollouts)
        self.count += 1
        return one


def _tell(console: Console, line: str) -> None:
    """Print a line on its own, not wrapped; none for an empty one."""
    if line:
        console.print(visible(line), markup=False, highlight=False, soft_wrap=True)


def _nothing(number: int, selection: Selection, vetoed: ObjectiveSection | None) -> str:
    """What is said instead of an empty table."""
    if not selection.vetoed:
        return f"stage {number}: no response fits the options"
    who = "no response" if replace(selection, vetoed=False).whole else "no response that fits the other options"
    return f"stage {number}: {who} has a vetoed token ({legend(vetoed)})"


def _cut(shown: int, selection: Selection, store: StageStore) -> str:
    """The line that the limit has left out responses; they are counted only where that costs no reading."""
    if shown < selection.limit:
        return ""
    if not selection.whole:
        return f"{shown:,} shown, which is the limit; --limit shows more, if there are"
    total = int(store.statistics()["responses"])
    return f"{shown:,} of {total:,} shown; --limit shows more" if shown < total else ""


def _tokenizer(places: Iterable[Path]) -> PreTrainedTokenizerBase | None:
    """The tokenizer of the first of these directories that has one."""
    for place in places:
        try:
            check_tokenizer(place)
        except UserError:
            continue
        return load_tokenizer(place)
    return None


def _without_tokenizer(run_dir: Path, directory: Path) -> str:
    """What is not shown without a tokenizer, and the command that shows it."""
    command = f"mugrpo rollouts {shlex.quote(str(run_dir))} --set model.path=DIR"
    return (
        f"{directory} holds no tokenizer, so prompts and marked tokens are left out; "
        f"to see them, say where the stage's model is: {command}"
    )


def _stage(directory: RunDirectory, stage: int | None) -> tuple[int, StageStore, str]:
    """The stage asked for, or the newest sealed one, and a note when a newer one is not sealed."""
    folders = directory.stages()
    for path in folders.values():
        check_stage(path)
    stages = {number: StageStore(path) for number, path in folders.items()}
    sealed = [number for number, store in stages.items() if store.sealed]
    number = stage if stage is not None else max(sealed, default=0)
    if number not in sealed:
        found = f"{len(stages[number].present())} groups so far" if number in stages else "nothing"
        raise UserError(
            f"{directory.path}: stage {number} holds {found}, only sealed ones are shown: {sealed or 'none'}"
        )
    newest = max(stages)
    note = f"stage {newest} is not sealed, so stage {number} is shown" if stage is None and newest != number else ""
    return number, stages[number], note


def _check(selection: Selection, store: StageStore, recipe: Recipe) -> None:
    """UserError for a selection that the stage cannot have."""
    groups = store.updates * recipe.rollout.prompts_per_update
    if selection.update is not None and selection.update not in range(store.updates):
        raise UserError(f"--update {selection.update}: the stage's updates are 0 to {store.updates - 1}")
    if selection.group is not None and selection.group not in range(groups):
        raise UserError(f"--group {selection.group}: the stage's groups are 0 to {groups - 1}")
    if selection.limit < 0:
        raise UserError(f"--limit {selection.limit}: is below 0")


def _rollouts(
    store: StageStore,
    selection: Selection,
    later: LaterPolicy | None,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase | None,
    scored: Path | None,
) -> Iterator[Rollout]:
    """The selected responses, read update by update, so that memory holds one update.

    `scored` is the file of the learner's behaviour logprobs, where ratios are over those.
    """
    objective, updates = recipe.objective, range(store.updates)
    pattern = _pattern(selection.grep)
    if selection.group is not None:
        selection = replace(selection, update=selection.group // recipe.rollout.prompts_per_update)
    for update in updates if selection.update is None else [selection.update]:
        samples = store.read_update(update, whole=True)
        groups = np.array([s.group for s in samples])
        advantages = group_advantages(np.array([s.reward for s in samples]), groups, objective)
        first = np.searchsorted(groups, groups)
        places = [
            i
            for i, sample in enumerate(samples)
            if _fits(sample, advantages[i], selection)
            and (pattern is None or _matches(pattern, sample, _texts(sample, tokenizer)))
        ]
        stale: list[Stale] | list[None] = [None] * len(places)
        if later and places:
            behaviour = _behaviour(scored, store, update) if scored else [s.behaviour_logprobs for s in samples]
            sampled = [replace(samples[i], behaviour_logprobs=behaviour[i]) for i in places]
            stale = later.assess(sampled, advantages[places], objective)
        for i, one in zip(places, stale, strict=True):
            if not selection.vetoed or (one is not None and one.dropped.any()):
                yield Rollout(
                    update, i - int(first[i]), samples[i], float(advantages[i]), *_texts(samples[i], tokenizer), one
                )


def _behaviour(path: Path, store: StageStore, update: int) -> list[np.ndarray]:
    """The learner's logprobs of an update's responses; UserError when they are missing or damaged."""
    column = LogprobColumn(path, of_stage(store.content))
    if not column.whole:
        raise UserError(
            f'{path} is missing: with rollout.behaviour = "learner" `mugrpo optimize` writes it before the first update'
        )
    return column.read(update)


def _pattern(grep: str | None) -> re.Pattern[str] | None:
    try:
        return None if grep is None else re.compile(grep)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"--grep {grep}: not a regular expression ({error})") from None


def _texts(sample: Sample, tokenizer: PreTrainedTokenizerBase | None) -> tuple[str | None, str]:
    """Prompt and response as text; without a tokenizer no prompt, which is stored as tokens alone."""
    if tokenizer is None:
        return None, sample.text
    prompt = str(tokenizer.decode(sample.prompt_ids.tolist()))
    return prompt, sample.text or str(tokenizer.decode(sample.response_ids.tolist()))


def _matches(pattern: re.Pattern[str], sample: Sample, texts: tuple[str | None, str]) -> bool:
    told = (*texts, sample.gold, sample.extracted, sample.why, sample.problem)
    if any(text is not None and pattern.search(text) for text in told):
        return True
    return bool(sample.row) and any(pattern.search(text) for text in _values(json.loads(sample.row)))


def _values(value: Any) -> Iterator[str]:
    """The values inside a JSON value, each as text, without the names that they have in it."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _values(inner)
    else:
        yield value if isinstance(value, str) else json.dumps(value)


def _fits(sample: Sample, advantage: float, selection: Selection) -> bool:
    return (
        (selection.group is None or sample.group == selection.group)
        and (selection.min_reward is None or sample.reward >= selection.min_reward)
        and (selection.max_reward is None or sample.reward <= selection.max_reward)
        and (selection.right is None or (verdict_in(sample.reward, sample.components) >= RIGHT) is selection.right)
        and (selection.advantage is None or np.sign(advantage) == SIGNS[selection.advantage])
        and (not selection.vetoed or advantage < 0)
    )
