"""A stage's prompts in the run's order, and its scored responses as rows of the stage store."""

from __future__ import annotations

import numpy as np

from mugrpo_megatron.algorithm.advantages import group_advantages
from mugrpo_megatron.data.prepare import PreparedData, problem_at
from mugrpo_megatron.evaluation.scoring import ScoredGroup
from mugrpo_megatron.files.json_text import as_text
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.rewards.pool import with_length_penalty
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.samples import InMemoryRoutes, Prompt, Sample


def stage_prompt(recipe: Recipe, problems: PreparedData, cursor: Cursor, group: int) -> Prompt:
    """The prompt of a stage's group, in the run's order; groups count from 0 inside the stage."""
    train = problems.train
    position = cursor.stage_positions(recipe.schedule, recipe.rollout.prompts_per_update)[group]
    place = problem_at(recipe.run.seed, len(train.problems), position)
    return Prompt(group, train.problems[place], train.prompts[place])


def rows_of(group: ScoredGroup, recipe: Recipe) -> list[Sample]:
    """A scored group as rows of the stage store, without failed episodes; one of them where all have failed."""
    failed = [response.episode is not None and response.episode.failed for response in group.responses]
    chosen = [place for place, one in enumerate(failed) if not one] or [0]
    responses, texts = [group.responses[place] for place in chosen], [group.texts[place] for place in chosen]
    problem = group.prompt.problem
    prompt_ids = np.asarray(group.prompt.ids, dtype=np.int32)
    limit = recipe.rollout.max_response_tokens
    scores = [
        with_length_penalty(group.scores[place], len(response.ids), limit, recipe.reward)
        for place, response in zip(chosen, responses, strict=True)
    ]
    rewards = np.array([score.reward for score in scores])
    advantages = group_advantages(rewards, np.zeros(len(rewards), dtype=np.int64), recipe.objective)
    gold, row = as_text(problem.gold), as_text(problem.row) if problem.row else ""
    scored = zip(responses, texts, scores, advantages.tolist(), strict=True)
    return [
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
            advantage=advantage,
            row=row,
        )
        for response, text, score, advantage in scored
    ]
