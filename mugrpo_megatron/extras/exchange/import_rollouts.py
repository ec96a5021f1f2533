"""`mugrpo import`: turns rollouts of another program into a stage for `mugrpo optimize --from`."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mugrpo_megatron.checks.layouts import divisors
from mugrpo_megatron.data.fields import unread_fields
from mugrpo_megatron.data.files import ANSWERS, field_at, found_in, gold_column
from mugrpo_megatron.data.prompts import rendered, template_of
from mugrpo_megatron.data.reading import any_answer, data_source_of, prompt_in_row, verifiable_answer
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.exchange.foreign_rollouts import (
    ForeignRollout,
    decoded_with_loss,
    prompt_chats,
    read_rollouts,
)
from mugrpo_megatron.extras.exchange.local_paths import hub_name, without_local_paths
from mugrpo_megatron.extras.exchange.publish import CARD, card, say_leftovers
from mugrpo_megatron.files.durable import check_output, durable_directory, write_text
from mugrpo_megatron.files.hf_config import read_config
from mugrpo_megatron.files.json_text import as_text
from mugrpo_megatron.recipe import Recipe, dump_recipe
from mugrpo_megatron.recipe.objective import ObjectiveSection
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.items import Score, fits_float32
from mugrpo_megatron.rewards.pool import Verifier, with_length_penalty
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.initial_model import with_model
from mugrpo_megatron.run.published import Published, weight_sums, write_published
from mugrpo_megatron.run.stage_groups import with_advantages
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.manifest import Origin
from mugrpo_megatron.stages.store import StageStore


class _Gold(NamedTuple):
    """The right answer that a response is scored against, and where the row has it."""

    source: str
    """The row's data source, else the file's name."""
    column: str
    """The row's column that has the gold; "" if none has."""
    value: Any
    any: bool
    """Whether a user's function scores the row, so that the gold may be any value; else `math` must find an answer in
    it."""


def import_rollouts(
    file: Path, recipe: Recipe, to: Path, reward: str | None = None, say: Callable[[str], None] = print
) -> None:
    """Write the rollouts of `file` to the directory `to`, as `mugrpo publish` writes a run's stage 0.

    An error or a crash leaves nothing at `to` that was not there before. Rewards are read from the column that the
    argument `reward` names, or else from a column called `reward`. Without such a column the recipe's verifier scores
    the responses against the rows' golds, and applies the length penalty, as in training. Raises UserError for rows
    that cannot be taken, and when their number does not fit the recipe.
    """
    check_output(to, f"--to {to}", kind="directory", inputs=[file])
    recipe = with_model(recipe, say)
    model = recipe.model.directory
    weights = weight_sums(model)
    tokenizer = load_tokenizer(model)
    # Without `data.question_template`: these prompts are already what the model saw.
    as_they_were = replace(template_of(recipe.data), question=None)
    limits = recipe.data.max_prompt_tokens, recipe.rollout.max_response_tokens
    groups = read_rollouts(file, tokenizer, as_they_were, limits, read_config(model).get("vocab_size"))
    shown = partial(rendered, tokenizer=tokenizer, style="chat", template=as_they_were)
    for note in unread_fields(prompt_chats(groups), shown):
        say(f"{file}: {note}")
    if lossy := decoded_with_loss(groups):
        say(
            f"{file}: {_counted(lossy, 'response')} with U+FFFD, the sign of bytes that are no text: their tokens are "
            "not those that were sampled; export response_ids, or leave these rows out"
        )
    updates = _check_fits(file, groups, recipe)
    if not _named(groups):
        say(f"{file}: rows with the same prompt are one group, as no column `group` or `step` tells them apart")
    _check_trained(file, groups, recipe.rollout.prompts_per_update)
    known = groups[0][0].logprobs is not None
    golds = [[_gold(rollout, recipe.reward, file.stem) for rollout in group] for group in groups]
    scores = _scores(groups, golds, recipe.reward, limits[1], reward)
    portable_recipe, hidden = without_local_paths(recipe)
    recipe_text = dump_recipe(portable_recipe)
    run = secrets.token_hex(8)
    published = Published(run, 0, *hub_name(model), weights, hidden, logprobs=known)
    say_leftovers(to, say)
    with durable_directory(to, replace=False) as unfinished:
        target = RunDirectory(unfinished)
        store = StageStore(target.stage(0), origin=Origin(run, 0, 0))
        for index, (group, group_golds, scored) in enumerate(zip(groups, golds, scores, strict=True)):
            store.append(_samples(index, group, group_golds[0], scored, recipe.objective))
        store.seal(updates, recipe.rollout.prompts_per_update)
        write_text(target.recipe, recipe_text)
        write_published(unfinished, published)
        write_text(unfinished / CARD, card(published, recipe_text, store, weights=True))
        mean = store.statistics()["reward_mean"]
    if unscored := sum(score.missing for scored in scores for score in scored):
        say(f"{file}: {unscored:,} responses have no reward and are left out, as in training")
    count = sum(len(group) for group in groups) - unscored
    say(f"{to}: {count:,} responses in {len(groups):,} groups, {updates:,} updates, mean reward {mean:.4g}")


def _named(groups: list[list[ForeignRollout]]) -> bool:
    """Whether the first row has a `group` or a `step`, which tell groups with the same prompt apart."""
    return any(groups[0][0].row.get(name) is not None for name in ("group", "step"))


def _check_fits(file: Path, groups: list[list[ForeignRollout]], recipe: Recipe) -> int:
    """The number of updates that the groups make. Raises UserError, which names settings that fit, if the recipe's do
    not."""
    rollout, size = recipe.rollout, len(groups[0])
    # All updates need the same number of groups. Of the divisors of the number of groups, take the one whose ratio to
    # the recipe's prompts_per_update is nearest to 1.
    per_update = min(divisors(len(groups)), key=lambda number: abs(math.log(number / rollout.prompts_per_update)))
    updates = len(groups) // per_update
    longest = max(len(rollout.response_ids) for group in groups for rollout in group)
    facts = [
        f"does not fit the recipe: it holds {_counted(len(groups), 'group')} of {_counted(size, 'response')}, the "
        f"longest of {longest} tokens"
    ]
    fitting: dict[str, object] = {
        "rollout.prompts_per_update": per_update,
        "rollout.responses_per_prompt": size,
        "schedule.updates_per_stage": updates,
        "rollout.max_response_tokens": max(longest, rollout.max_response_tokens),
    }
    if not _named(groups) and size != rollout.responses_per_prompt and size % rollout.responses_per_prompt == 0:
        facts.append(
            "rows with the same prompt are one group: if a prompt was sampled several times, tell its groups apart "
            "with a column `group` or `step`"
        )
    if groups[0][0].logprobs is None:
        facts.append("the rows have no logprobs, so the learner has to compute them")
        fitting |= {"rollout.behaviour": "learner", "objective.mismatch": "none"}
    changes = [f"--set {key}={value}" for key, value in fitting.items() if value != attrgetter(key)(recipe)]
    if per_update != rollout.prompts_per_update:
        sizes = ", ".join(str(number) for number in divisors(len(groups)))
        facts.append(
            f"rollout.prompts_per_update = {rollout.prompts_per_update} does not divide the number of groups, each of "
            f"{sizes} does"
        )
    if changes:
        raise UserError(f"{file}: {'; '.join(facts)}; what fits: {' '.join(changes)}")
    return updates


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _check_trained(file: Path, groups: list[list[ForeignRollout]], size: int) -> None:
    """Raise UserError for an update (of `size` groups) whose loss masks leave no token to train on."""
    for start in range(0, len(groups), size):
        masks = [rollout.loss_mask for group in groups[start : start + size] for rollout in group]
        if all(mask is not None and not mask.any() for mask in masks):
            raise UserError(
                f"{file}: the loss masks of update {start // size} (from 0), whose responses begin at "
                f"{groups[start][0].location}, are all 0, so it has no token to train on; set some to 1, or leave its "
                "rows out"
            )


def _scores(
    groups: list[list[ForeignRollout]], golds: list[list[_Gold]], section: RewardSection, limit: int, column: str | None
) -> list[list[Score]]:
    """The score of each response: from `column`, or else from a column `reward`, or else from the verifier.

    A response whose reward is null, NaN or empty, as TRL writes where no function applies, gets a score with `missing`.
    A column `reward` with only null counts as absent. `limit` is the most tokens of a response, for the length penalty
    on the verifier's scores.
    """
    has_rewards = any(rollout.row.get("reward") is not None for group in groups for rollout in group)
    column = column or ("reward" if has_rewards else None)
    if column is not None:
        given = [[_given(rollout, column) for rollout in group] for group in groups]
        if all(score.missing for scores in given for score in scores):
            raise UserError(
                f"{groups[0][0].location}: no row has a reward in {column}; name another column with --reward"
            )
        return given
    answers = [
        [_answer(rollout, gold) for rollout, gold in zip(group, group_golds, strict=True)]
        for group, group_golds in zip(groups, golds, strict=True)
    ]
    with Verifier(section) as verifier:
        pending = [
            verifier.submit(
                [rollout.text for rollout in group],
                [gold.value for gold in group_golds],
                [rollout.row for rollout in group],
                [prompt_in_row(rollout.row) for rollout in group],
                answers=texts,
                sources=[gold.source for gold in group_golds],
                ids=[rollout.response_ids.tolist() for rollout in group],
                openings=[rollout.opening for rollout in group],
            )
            for group, group_golds, texts in zip(groups, golds, answers, strict=True)
        ]
        verdicts = [batch.result() for batch in pending]
    return [
        [
            replace(
                with_length_penalty(score, len(rollout.response_ids), limit, section),
                missing=score.missing and not section.judges,
            )
            for rollout, score in zip(group, scores, strict=True)
        ]
        for group, scores in zip(groups, verdicts, strict=True)
    ]


def _given(rollout: ForeignRollout, column: str) -> Score:
    value = rollout.row.get(column)
    if column not in rollout.row:
        alike = get_close_matches(column, map(str, rollout.row), n=1)
        meant = f"; did you mean --reward {alike[0]}?" if alike else ""
        raise UserError(f"{rollout.location}: has no column {column} of rewards {found_in(rollout.row)}{meant}")
    if isinstance(value, str) and value.strip():  # in CSV a number is a text
        with suppress(ValueError):
            value = float(value)
    if value in (None, "") or value != value:
        return Score(0.0, "", f"none given in {column}", 0.0, missing=True)
    if not isinstance(value, bool | int | float) or not fits_float32(value):
        raise UserError(
            f"{rollout.location}: {column} holds no finite number that fits float32; correct it, leave the row out, or "
            "name another column with --reward"
        )
    return Score(float(value), "", f"given in {column}", 0.0, components={column: float(value)})


def _gold(rollout: ForeignRollout, section: RewardSection, name: str) -> _Gold:
    """The row's gold, found in the way in which training finds it; `name` is the source of a row that names none."""
    source, row = data_source_of(rollout.row) or name, dict(rollout.row)
    takes_any = section.accepts_any_gold(source)
    column = gold_column(row, takes_any)
    return _Gold(source, column, field_at(row, column) if column else None, takes_any)


def _answer(rollout: ForeignRollout, gold: _Gold) -> str:
    """The answer in the row's gold, read as training reads it.

    Raises UserError if `math` scores the row, and it has no gold or no answer can be found in it.
    """
    if gold.any:
        return any_answer(gold.value)
    if not gold.column:
        raise UserError(
            f"{rollout.location}: has neither a reward nor a gold ({', '.join(ANSWERS)}) {found_in(rollout.row)}; "
            "--reward names the column of rewards"
        )
    try:
        return verifiable_answer(gold.value, gold.column)
    except ValueError as error:
        raise UserError(f"{rollout.location}: {error}") from None


def _samples(
    index: int, group: list[ForeignRollout], gold: _Gold, scores: list[Score], objective: ObjectiveSection
) -> list[Sample]:
    kept = [index for index, score in enumerate(scores) if not score.missing] or [0]
    group, scores = [group[index] for index in kept], [scores[index] for index in kept]
    samples = [
        Sample(
            group=index,
            problem=group[0].location,
            prompt_ids=rollout.prompt_ids,
            response_ids=rollout.response_ids,
            # NaN marks log-probabilities that are still to be computed
            engine_logprobs=np.full(len(rollout.response_ids), np.nan, np.float32)
            if rollout.logprobs is None
            else rollout.logprobs,
            reward=score.reward,
            weight_version=0,
            finish_reason=rollout.finish_reason,
            loss_mask=rollout.loss_mask,
            text=as_text(rollout.text),
            gold="" if gold.value is None else as_text(gold.value),
            extracted=as_text(score.extracted),
            why=as_text(score.why),
            components=score.components,
            row=as_text(rollout.row),
        )
        for rollout, score in zip(group, scores, strict=True)
    ]
    return with_advantages(samples, objective)
