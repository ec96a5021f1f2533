"""Scored groups as rows of the stage: episodes keep their own prompt and mask, failed ones are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mugrpo_megatron.evaluation.scoring import ScoredGroup, score_of
from mugrpo_megatron.recipe import ObjectiveSection, Recipe
from mugrpo_megatron.rewards.items import Score
from mugrpo_megatron.run.stage_groups import displayed_advantages, group_samples
from mugrpo_megatron.samples import Episode, Problem, Prompt, Response
from mugrpo_megatron.stages.schema import to_samples, to_table

PROMPT = Prompt(3, Problem("p", "1+1=", "2"), [1, 2])
SECTIONS = Recipe().rollout, Recipe().reward, Recipe().objective


def episode(mask: Sequence[bool], reward: float | None = None, failed: bool = False, **parts: float) -> Response:
    ids = np.arange(len(mask), dtype=np.int32)
    outcome = Episode(np.array([1, 2, 9], np.int32), np.array(mask), reward, "why", failed, parts)
    return Response(ids, -np.ones(len(mask), np.float32) * np.array(mask), "stop", 5, episode=outcome)


def scored(*responses: Response) -> ScoredGroup:
    verdicts = iter([Score(1.0, "2", "right", 0.0, components={"math": 1.0})] * len(responses))
    texts = [f"text {place}" for place in range(len(responses))]
    return ScoredGroup(PROMPT, list(responses), texts, [score_of(one, verdicts) for one in responses])


def test_an_episode_keeps_its_prompt_its_mask_and_its_numbers() -> None:
    rows = group_samples(scored(episode([True, False, True], turns=2.0), episode([True], reward=0.25)), *SECTIONS)
    assert [row.prompt_ids.tolist() for row in rows] == [[1, 2, 9]] * 2
    assert [row.loss_mask.tolist() for row in rows if row.loss_mask is not None] == [[True, False, True], [True]]
    assert [row.reward for row in rows] == [1.0, 0.25]
    assert rows[0].components == {"math": 1.0, "episode.turns": 2.0}
    assert rows[1].components == {"episode": 0.25}
    assert (rows[0].why, rows[1].why) == ("right", "why")
    assert rows[0].turns.tolist() == [0, 1]
    back = to_samples(to_table(rows))
    assert [row.turns.tolist() for row in back] == [[0, 1], [0]]


def test_the_last_turn_is_what_the_verifier_reads() -> None:
    for mask, place in (([True, False, True], 2), ([True, True], 0), ([True, False, False], 3)):
        one = episode(mask).episode
        assert one is not None
        assert one.last_turn == place


def test_failed_episodes_are_left_out_of_a_group_and_its_baseline() -> None:
    rows = group_samples(scored(episode([True], 1.0), episode([False], failed=True), episode([True], 0.0)), *SECTIONS)
    assert [row.text for row in rows] == ["text 0", "text 2"]
    assert [row.advantage for row in rows] == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-4)


def test_a_group_whose_episodes_have_all_failed_is_one_row_without_a_token_to_train_on() -> None:
    [row] = group_samples(scored(*[episode([False], failed=True)] * 4), *SECTIONS)
    assert row.loss_mask is not None
    assert not row.loss_mask.any()
    assert (row.reward, row.advantage) == (0.0, 0.0)


def longer(rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray, rows: list[object]) -> np.ndarray:
    """A user's advantages: the lengths of what is trained on."""
    assert len(rewards) == len(groups) == len(rows)
    return lengths


def test_a_users_advantages_are_stored_and_shown_without_the_function() -> None:
    """`os:abort` ends the process of whoever reads the run, if it is called."""
    objective = ObjectiveSection(advantage=f"{__name__}:longer")
    rows = group_samples(scored(episode([True, False, True]), episode([True])), *SECTIONS[:2], objective)
    assert [row.advantage for row in rows] == [2.0, 1.0]
    assert displayed_advantages(rows, ObjectiveSection(advantage="os:abort")).tolist() == [2.0, 1.0]
    assert displayed_advantages(rows, ObjectiveSection(advantage="group_mean")).tolist() == [0.0, 0.0]


def test_responses_without_a_reward_are_left_out_of_their_group() -> None:
    """As if the group had only the others: rewards 1, 0, 0 have the mean 1/3 and the deviation 3^-0.5."""
    group = scored(*[Response(np.array([4], np.int32), np.zeros(1, np.float32), "stop", 5)] * 5)
    values = [Score(1.0, "", "", 0.0), Score(0.0, "", "", 0.0, missing=True), *[Score(0.0, "", "", 0.0)] * 2]
    group = replace(group, scores=[*values, Score(0.0, "", "", 0.0, missing=True)])
    rows = group_samples(group, *SECTIONS)
    assert [row.text for row in rows] == ["text 0", "text 2", "text 3"]
    assert [row.advantage for row in rows] == pytest.approx([2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5], rel=1e-4)
    assert [row.components for row in rows] == [{"group.unscored": 0.4}] * 3
    [row] = group_samples(replace(group, scores=[values[1]] * 5), *SECTIONS)
    assert (row.reward, row.advantage) == (0.0, 0.0)
