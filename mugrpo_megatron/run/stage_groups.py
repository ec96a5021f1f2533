"""The groups of a stage: which prompt each has, and how its scored responses become samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mugrpo_megatron.algorithm.advantages import group_advantages
from mugrpo_megatron.data.prepare import PreparedData, problem_at
from mugrpo_megatron.evaluation.scoring import ScoredGroup
from mugrpo_megatron.files.json_text import as_text
from mugrpo_megatron.recipe import ObjectiveSection, Recipe
from mugrpo_megatron.recipe.policy import RolloutSection
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.pool import with_length_penalty
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.samples import UNSCORED, InMemoryRoutes, Prompt, Sample, rewards_and_groups


def group_prompt(recipe: Recipe, problems: PreparedData, cursor: Cursor, group: int) -> Prompt:
    """The prompt of group number `group` of the cursor's stage, counted from 0 within the stage."""
    train = problems.train
    position = cursor.stage_positions(recipe.schedule, recipe.rollout.prompts_per_update)[group]
    index = problem_at(recipe.run.seed, len(train.problems), position)
    return Prompt(group, train.problems[index], train.prompts[index])


def group_samples(
    group: ScoredGroup, rollout: RolloutSection, reward: RewardSection, objective: ObjectiveSection
) -> list[Sample]:
    """Make the samples of a scored group.

    Failed episodes are left out. Responses without a reward are left out too, unless judges will score the stage. So a
    response that its reward function did not score, since it failed or does not apply, changes no baseline. If no
    sample would be left, the first response becomes one.

    If some responses have no reward and no judge will score the stage, every sample gets the component
    `group.unscored`: the share of the group's responses without a reward.
    """
    unscored = [score.missing and not reward.judges for score in group.scores]
    failed = [
        is_unscored or (response.episode is not None and response.episode.failed)
        for response, is_unscored in zip(group.responses, unscored, strict=True)
    ]
    # Every group must have a sample, or its update would lack a group. The built-in advantages give a single sample 0.
    indices = [index for index, has_failed in enumerate(failed) if not has_failed] or [0]
    responses, texts = [group.responses[index] for index in indices], [group.texts[index] for index in indices]
    problem = group.prompt.problem
    prompt_ids = np.asarray(group.prompt.ids, dtype=np.int32)
    scores = [
        with_length_penalty(group.scores[index], len(response.ids), rollout.max_response_tokens, reward)
        for index, response in zip(indices, responses, strict=True)
    ]
    if any(unscored):
        share = {UNSCORED: sum(unscored) / len(unscored)}
        scores = [replace(score, components={**score.components, **share}) for score in scores]
    gold, row = as_text(problem.gold), as_text(problem.row) if problem.row else ""
    samples = [
        Sample(
            group=group.prompt.index,
            problem=problem.id,
            prompt_ids=prompt_ids if response.episode is None else response.episode.prompt_ids,
            response_ids=response.ids,
            engine_logprobs=response.logprobs,
            reward=score.reward,
            weight_version=response.weight_version,
            finish_reason=response.finish_reason,
            loss_mask=None if response.episode is None else response.episode.mask,
            routes=None if response.routes is None else InMemoryRoutes(response.routes),
            support_ids=response.support_ids,
            text=as_text(text),
            gold=gold,
            extracted=as_text(score.extracted),
            why=as_text(score.why),
            components=score.components,
            row=row,
        )
        for response, text, score in zip(responses, texts, scores, strict=True)
    ]
    return with_advantages(samples, objective)


def with_advantages(samples: Sequence[Sample], objective: ObjectiveSection) -> list[Sample]:
    """Returns the samples of one group with their advantages, computed from the rewards of these samples."""
    advantages = group_advantages(*rewards_and_groups(samples), objective, samples)
    return [replace(sample, advantage=value) for sample, value in zip(samples, advantages.tolist(), strict=True)]


def displayed_advantages(samples: Sequence[Sample], objective: ObjectiveSection) -> np.ndarray:
    """The advantages to show to people, float32 [N]; no function of a user is called for them.

    With a user's advantage function they are those stored in the stage, or 0 for a sample without one. In that case the
    samples must have been read `with_text`, because a stored advantage is one of the text columns.
    """
    if objective.has_user_advantage:
        return np.array([sample.advantage or 0.0 for sample in samples], dtype=np.float32)
    rewards, groups = rewards_and_groups(samples)
    return group_advantages(rewards, groups, objective)
