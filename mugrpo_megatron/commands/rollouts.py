"""`mugrpo rollouts`: show and search the responses of a sealed stage."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.commands.rollout_views import (
    ProblemRollouts,
    Rollout,
    print_group,
    print_json,
    print_problems,
    print_table,
    record_of,
)
from mugrpo_megatron.data import arithmetic
from mugrpo_megatron.data.problems import PLAIN, named_sources
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import check_tokenizer
from mugrpo_megatron.recipe import ObjectiveSection, Recipe, load_recipe
from mugrpo_megatron.rewards.pool import reward_before_penalty
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.initial_model import with_cached_model
from mugrpo_megatron.run.stage_groups import displayed_advantages
from mugrpo_megatron.samples import UNSCORED, Sample
from mugrpo_megatron.stages.columns import LogprobColumn
from mugrpo_megatron.stages.manifest import check_stage, stage_identity
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.terminal import visible

SIGNS = {"positive": 1, "negative": -1, "zero": 0}
RIGHT = 0.5
"""A response counts as right if its `reward_before_penalty` is at least this."""
WIDTH_WITHOUT_TERMINAL = 180


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Conditions that a response must meet to be shown; None sets no condition."""

    update: int | None = None
    group: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    right: bool | None = None
    """With True only responses that count as right (`RIGHT`), with False only those that do not."""
    advantage: Literal["positive", "negative", "zero"] | None = None
    vetoed: bool = False
    """Only responses with tokens that the veto drops."""
    grep: str | None = None
    """Regular expression, searched in prompt, response, gold, extracted answer, reason, and values of the row."""
    limit: int = 20

    @property
    def takes_all(self) -> bool:
        """Whether every response of the stage would be shown if there were no `limit`."""
        return replace(self, limit=0) == RolloutFilter(limit=0)

    def accepts(self, sample: Sample, advantage: float) -> bool:
        """Whether a response passes every condition but `update`, `grep` and `limit`.

        Of `vetoed` it checks only that the advantage is not 0: whether the veto drops tokens is computed later.
        """
        return (
            (self.group is None or sample.group == self.group)
            and (self.min_reward is None or sample.reward >= self.min_reward)
            and (self.max_reward is None or sample.reward <= self.max_reward)
            and (self.right is None or (reward_before_penalty(sample.reward, sample.components) >= RIGHT) is self.right)
            and (self.advantage is None or np.sign(advantage) == SIGNS[self.advantage])
            # With advantage 0 a response has no policy loss from which tokens could be dropped. One with positive
            # advantage passes, because with `prefix_signs = "both"` the veto acts on it too.
            and (not self.vetoed or advantage != 0)
        )


def browse(
    run_dir: Path,
    stage: int | None,
    conditions: RolloutFilter,
    policy: Path | None,
    overrides: Sequence[str] = (),
    as_json: bool = False,
) -> None:
    """Print the responses that meet the conditions: a table, one group in full, or JSON lines.

    With `policy`, a Hugging Face checkpoint, the veto is applied as it would be under these weights, and a group's
    triggers are marked; with `conditions.vetoed` the default is the run's `hf/`. `overrides` change keys of the run's
    recipe, so that another veto can be tried: `objective.trigger_ratio=0.1`. Without a tokenizer, prompts are left out
    and responses are the stored texts. Raises UserError when the run does not exist, when the stage is not sealed, and
    for an update or a group that the stage does not have.
    """
    directory, recipe = _opened(run_dir, overrides)
    policy = policy or (directory.hf if conditions.vetoed else None)
    number, store, note = _stage(directory, stage)
    _check(conditions, store.updates, recipe.rollout.prompts_per_update)
    later = None
    if policy:
        from mugrpo_megatron.extras.later_policy.later_policy import LaterPolicy

        later = LaterPolicy(policy, recipe.rollout.temperature, recipe.objective)
    hf = directory.hf if directory.hf.exists() else with_cached_model(recipe, run_dir).model.directory
    tokenizer = _tokenizer([hf, *([policy] if policy else [])])
    behaviour = directory.behaviour(number) if later and recipe.rollout.behaviour == "learner" else None
    if conditions.group is not None:
        conditions = replace(conditions, update=conditions.group // recipe.rollout.prompts_per_update)
    rollouts = islice(
        _rollouts(store, conditions, recipe.objective, later, tokenizer, behaviour),
        min(conditions.limit, sys.maxsize),  # islice takes no larger number
    )
    console = Console()
    notes = Console(stderr=True) if as_json else console
    if not console.is_terminal:
        console.width = WIDTH_WITHOUT_TERMINAL
    for line in (note, "" if tokenizer else _tokenizer_hint(run_dir, hf)):
        _print_note(notes, line)
    legend = later.legend if later else None
    if as_json:
        count = print_json(console, map(record_of, rollouts))
    elif conditions.group is not None:
        count = print_group(console, rollouts, tokenizer)
    else:
        count = print_table(console, f"{run_dir}: stage {number}", rollouts, legend)
    if count or not conditions.limit:
        _print_note(notes, _limit_note(count, conditions, store))
    else:
        _print_note(notes, f"stage {number}: {_empty_note(conditions, legend)}")


def browse_problems(
    run_dir: Path, stage: int | None, limit: int, overrides: Sequence[str] = (), as_json: bool = False
) -> None:
    """Print the pass rate, the mean tokens and the share of cut responses of each problem in a sealed stage.

    Problems with a low pass rate come first. Prints a table of `limit` problems or, with `as_json`, JSON lines for all
    problems whose rows are known: the row with `pass_rate`, in the form that `data.train` reads. Raises UserError when
    the run does not exist, or has not sealed the stage.
    """
    directory, recipe = _opened(run_dir, overrides)
    number, store, note = _stage(directory, stage)
    _check(RolloutFilter(limit=limit), store.updates, recipe.rollout.prompts_per_update)
    problems = sorted(
        _by_problem(store, _bundled_rows(recipe.data.train)), key=lambda p: (p.pass_rate is None, p.pass_rate)
    )
    console = Console()
    notes = Console(stderr=True) if as_json else console
    if not console.is_terminal:
        console.width = WIDTH_WITHOUT_TERMINAL
    _print_note(notes, note)
    if as_json:
        count = print_json(console, (problem.record() for problem in problems if problem.row))
        unknown = len(problems) - count
        _print_note(notes, f"{unknown:,} problems have no row in the stage: left out" if unknown else "")
        return
    extremes = [sum(problem.pass_rate == rate for problem in problems) for rate in (0, 1)]
    title = (
        f"{run_dir}: stage {number}, {len(problems):,} problems, {extremes[0]:,} never right, {extremes[1]:,} always"
    )
    print_problems(console, title, problems, limit)
    _print_note(notes, f"{limit:,} of {len(problems):,} shown; --limit shows more" if limit < len(problems) else "")


def _by_problem(store: StageStore, rows: Mapping[str, dict[str, Any]]) -> list[ProblemRollouts]:
    """Count the responses of the stage by problem. `rows`: problem id -> row, for problems whose rows the stage
    lacks."""
    problems: dict[str, ProblemRollouts] = {}
    for update in range(store.updates):
        for sample in store.read_update(update, with_text=True):
            if (counts := problems.get(sample.problem)) is None:
                row = json.loads(sample.row) if sample.row else rows.get(sample.problem, {})
                counts = problems[sample.problem] = ProblemRollouts(sample.problem, row, sample.gold)
            counts.responses += 1
            # UNSCORED marks the placeholder that stands for a group in which no response was scored.
            counts.scored += sample.components.get(UNSCORED) != 1.0
            counts.right += reward_before_penalty(sample.reward, sample.components) >= RIGHT
            counts.tokens += len(sample.response_ids)
            counts.cut += sample.finish_reason == "length"
    return list(problems.values())


def _bundled_rows(sources: str) -> dict[str, dict[str, Any]]:
    """Returns problem id -> question and gold, for all training problems of the bundled tasks among `sources`: a stage
    stores no rows for these."""
    tasks = [source for source in named_sources(sources).values() if source in arithmetic.TASKS]
    drawn = [problem for task in tasks for problem in arithmetic.problems(0, "train", arithmetic.GENERATED, task)]
    return {problem.id: {PLAIN.question: problem.question, PLAIN.answer: problem.answer} for problem in drawn}


def _opened(run_dir: Path, overrides: Sequence[str]) -> tuple[RunDirectory, Recipe]:
    directory = RunDirectory(run_dir)
    directory.check_exists()
    return directory, load_recipe(directory.recipe, overrides)


def _print_note(console: Console, line: str) -> None:
    """Print a line without wrapping; nothing if it is empty."""
    if line:
        console.print(visible(line), markup=False, highlight=False, soft_wrap=True)


def _empty_note(conditions: RolloutFilter, legend: str | None) -> str:
    if not conditions.vetoed:
        return "no response fits the options"
    subject = "no response"
    if not replace(conditions, vetoed=False).takes_all:
        subject += " that fits the other options"
    return f"{subject} has a vetoed token ({legend})"


def _limit_note(count: int, conditions: RolloutFilter, store: StageStore) -> str:
    """Returns a note if --limit may hide responses, else "". The note has the number of the stage's responses if no
    other condition is set."""
    if count < conditions.limit:
        return ""
    if not conditions.takes_all:
        return f"{count:,} shown, which is the limit; --limit shows more, if there are"
    total = int(store.statistics()["responses"])
    return f"{count:,} of {total:,} shown; --limit shows more" if count < total else ""


def _tokenizer(directories: Iterable[Path]) -> PreTrainedTokenizerBase | None:
    """Returns the tokenizer of the first directory that has one; None if none has."""
    for directory in directories:
        try:
            check_tokenizer(directory)
        except UserError:
            continue
        return load_tokenizer(directory)
    return None


def _tokenizer_hint(run_dir: Path, directory: Path) -> str:
    command = f"mugrpo rollouts {shlex.quote(str(run_dir))} --set model.path=DIR"
    return (
        f"{directory} holds no tokenizer, so prompts and marked tokens are left out; "
        f"to see them, say where the stage's model is: {command}"
    )


def _stage(directory: RunDirectory, stage: int | None) -> tuple[int, StageStore, str]:
    """Returns the number and store of the given stage, by default of the newest sealed one, and a note.

    The note says that a newer stage is not sealed; it is "" if there is none, or if a stage was given. UserError if the
    stage is not sealed or does not exist.
    """
    folders = directory.stages()
    for number in sorted(folders, reverse=True) if stage is None else [stage] if stage in folders else []:
        # Earlier stages are not checked: damage to one of them should not prevent that this stage is shown.
        check_stage(folders[number])
        store = StageStore(folders[number])
        if store.sealed:
            newest = max(folders)
            note = f"stage {newest} is not sealed, so stage {number} is shown"
            return number, store, note if stage is None and newest != number else ""
    sealed = [number for number, path in folders.items() if _is_sealed(path)]
    number = max(folders, default=0) if stage is None else stage
    groups = f"{len(StageStore(folders[number]).verified_groups())} groups so far" if number in folders else "nothing"
    raise UserError(
        f"{directory.path}: stage {number} holds {groups} and is not sealed; only sealed stages can be shown: "
        f"{sealed or 'there is none yet'}"
    )


def _is_sealed(path: Path) -> bool:
    try:
        check_stage(path)
        return StageStore(path).sealed
    except UserError:  # the stage's manifest is damaged
        return False


def _check(conditions: RolloutFilter, updates: int, prompts_per_update: int) -> None:
    """Raise UserError for an update or a group that the stage does not have, and for a negative limit."""
    groups = updates * prompts_per_update
    if conditions.update is not None and conditions.update not in range(updates):
        raise UserError(f"--update {conditions.update}: the stage's updates are 0 to {updates - 1}")
    if conditions.group is not None and conditions.group not in range(groups):
        raise UserError(f"--group {conditions.group}: the stage's groups are 0 to {groups - 1}")
    if conditions.limit < 0:
        raise UserError(f"--limit {conditions.limit}: give a number from 0 on")


def _rollouts(
    store: StageStore,
    conditions: RolloutFilter,
    objective: ObjectiveSection,
    later: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    behaviour: Path | None,
) -> Iterator[Rollout]:
    """Yields the responses that meet the conditions; reads one update at a time, to hold no more than that in memory.

    later: assesses each response under a later policy, or None. behaviour: file with the learner's logprobs at the
    stage's start, the denominator of `later`'s ratios; None takes the engine's logprobs.
    """
    pattern = _pattern(conditions.grep)
    for update in range(store.updates) if conditions.update is None else [conditions.update]:
        samples = store.read_update(update, with_text=True)
        groups = np.array([sample.group for sample in samples])
        advantages = displayed_advantages(samples, objective)
        index_in_group = np.arange(len(samples)) - np.searchsorted(groups, groups)
        accepted = [i for i, sample in enumerate(samples) if conditions.accepts(sample, advantages[i])]
        rollouts = {
            i: Rollout(update, int(index_in_group[i]), samples[i], advantages[i], *_texts(samples[i], tokenizer))
            for i in accepted
        }
        if pattern:
            rollouts = {i: rollout for i, rollout in rollouts.items() if _matches(pattern, rollout)}
        if later and rollouts:
            chosen = list(rollouts)
            logprobs = _behaviour(behaviour, store, update) if behaviour else [s.engine_logprobs for s in samples]
            stale = later.assess([samples[i] for i in chosen], [logprobs[i] for i in chosen], advantages[chosen])
            rollouts = {i: replace(rollouts[i], stale=response) for i, response in zip(chosen, stale, strict=True)}
        yield from (r for r in rollouts.values() if not conditions.vetoed or (r.stale and r.stale.dropped.any()))


def _behaviour(path: Path, store: StageStore, update: int) -> list[np.ndarray]:
    """Returns the learner's logprobs at the stage's start for an update's responses; UserError if they are missing."""
    column = LogprobColumn(path, stage_identity(store.content))
    if not column.complete:
        raise UserError(
            f'{path} is missing or incomplete: with rollout.behaviour = "learner" it is written before the first '
            "update on the stage; run `mugrpo optimize` or `mugrpo train` first"
        )
    return column.read(update)


def _pattern(grep: str | None) -> re.Pattern[str] | None:
    try:
        return None if grep is None else re.compile(grep)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(
            f"--grep {grep}: not a regular expression ({error}); put a backslash before special characters"
        ) from None


def _texts(sample: Sample, tokenizer: PreTrainedTokenizerBase | None) -> tuple[str | None, str]:
    """Returns prompt and response as text. Without a tokenizer the prompt is None: a stage stores it as tokens only."""
    if tokenizer is None:
        return None, sample.text
    prompt = str(tokenizer.decode(sample.prompt_ids.tolist()))
    return prompt, sample.text or str(tokenizer.decode(sample.response_ids.tolist()))


def _matches(pattern: re.Pattern[str], rollout: Rollout) -> bool:
    sample = rollout.sample
    texts = (rollout.prompt, rollout.text, sample.gold, sample.extracted, sample.why, sample.problem)
    if any(text is not None and pattern.search(text) for text in texts):
        return True
    return bool(sample.row) and any(pattern.search(text) for text in _values(json.loads(sample.row)))


def _values(value: Any) -> Iterator[str]:
    """Yields the values inside a JSON value as text, without the names of its columns."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _values(inner)
    else:
        yield value if isinstance(value, str) else json.dumps(value)
