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
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.algorithm.advantages import group_advantages
from mugrpo_megatron.commands.later_policy import LaterPolicy, Stale
from mugrpo_megatron.commands.rollout_views import Rollout, legend, print_in_full, print_json, print_table
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import check_tokenizer
from mugrpo_megatron.observe.streams import visible
from mugrpo_megatron.recipe import ObjectiveSection, Recipe, load_recipe
from mugrpo_megatron.rewards.pool import reward_before_penalty
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.record import with_cached_model
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.columns import LogprobColumn
from mugrpo_megatron.stages.manifest import check_stage, stage_identity
from mugrpo_megatron.stages.store import StageStore

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
    chosen_rollouts = islice(
        _rollouts(store, selection, later, recipe, tokenizer, scored), min(selection.limit, sys.maxsize)
    )
    shown = Shown(chosen_rollouts)
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
        content = f"{len(stages[number].present())} groups so far" if number in stages else "nothing"
        raise UserError(
            f"{directory.path}: stage {number} holds {content}, only sealed ones are shown: {sealed or 'none'}"
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
            behaviour = _behaviour(scored, store, update) if scored else [s.engine_logprobs for s in samples]
            chosen = [samples[i] for i in places]
            stale = later.assess(chosen, [behaviour[i] for i in places], advantages[places], objective)
        for i, one in zip(places, stale, strict=True):
            if not selection.vetoed or (one is not None and one.dropped.any()):
                yield Rollout(
                    update, i - int(first[i]), samples[i], float(advantages[i]), *_texts(samples[i], tokenizer), one
                )


def _behaviour(path: Path, store: StageStore, update: int) -> list[np.ndarray]:
    """The learner's logprobs of an update's responses; UserError when they are missing or damaged."""
    column = LogprobColumn(path, stage_identity(store.content))
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
    texts_of_scores = (*texts, sample.gold, sample.extracted, sample.why, sample.problem)
    if any(text is not None and pattern.search(text) for text in texts_of_scores):
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
        and (
            selection.right is None
            or (reward_before_penalty(sample.reward, sample.components) >= RIGHT) is selection.right
        )
        and (selection.advantage is None or np.sign(advantage) == SIGNS[selection.advantage])
        and (not selection.vetoed or advantage < 0)
    )
