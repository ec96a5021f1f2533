"""Under a later policy exactly the tokens that lost their probability are triggers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mugrpo_megatron.extras.later_policy.later_policy import LaterPolicy, Stale
from mugrpo_megatron.recipe import ObjectiveSection, load_recipe
from mugrpo_megatron.samples import Sample
from tests.commands.test_rollouts import LOST, RIGHT, WRONG, sample


def assess(model: Path, samples: list[Sample], advantages: list[float], objective: ObjectiveSection) -> list[Stale]:
    behaviour = [sample.engine_logprobs for sample in samples]
    return LaterPolicy(model, 1.0, objective).assess(samples, behaviour, np.array(advantages))


@pytest.mark.parametrize(
    ("scope", "dropped"),
    [
        ("none", [False] * 4),
        ("trigger", [False, True, False, False]),
        ("suffix", [False, False, True, True]),
        ("prefix", [False, False, True, True]),
    ],
)
def test_only_the_token_that_lost_its_mass_is_a_trigger(model: Path, scope: str, dropped: list[bool]) -> None:
    samples = [sample(model, 0, text, reward) for text, reward in ((RIGHT, 1.0), (WRONG, 0.0))]
    samples[1].engine_logprobs[1] += LOST
    objective = load_recipe(None, [f"objective.veto={scope}"]).objective
    right, wrong = assess(model, samples, [1.0, -1.0], objective)
    np.testing.assert_allclose(right.log_ratio, 0, atol=1e-5)
    assert not right.dropped.any()
    np.testing.assert_allclose(wrong.log_ratio, [0, -LOST, 0, 0], atol=1e-5)
    assert wrong.trigger.tolist() == [False, True, False, False]
    assert wrong.dropped.tolist() == dropped
    assert wrong.lowest_ratio == pytest.approx(1 / 20_000, rel=1e-3)


def test_tokens_outside_the_loss_mask_are_no_triggers(model: Path) -> None:
    """A tool's token has no probability of its own: it drops nothing after it."""
    wrong = sample(model, 0, WRONG, 0.0)
    wrong.engine_logprobs[1] += LOST
    objective = load_recipe(None).objective
    [whole, masked, nothing] = assess(
        model,
        [
            wrong,
            replace(wrong, loss_mask=np.array([True, False, True, True])),
            replace(wrong, loss_mask=np.zeros(4, dtype=bool)),
        ],
        [-1.0, -1.0, -1.0],
        objective,
    )
    assert whole.dropped.tolist() == [False, False, True, True]
    assert not masked.dropped.any()
    assert not masked.trigger.any()
    assert masked.log_ratio[1] == 0.0
    assert masked.lowest_ratio == pytest.approx(1.0, rel=1e-3)
    assert nothing.lowest_ratio is None


def test_a_softmax_runs_over_the_tokens_that_could_be_sampled(model: Path) -> None:
    wrong = sample(model, 0, WRONG, 0.0)
    alone = wrong.response_ids[:, None].astype(np.int32)
    support = np.concatenate([alone, np.full_like(alone, -1)], axis=1)
    certain = replace(wrong, support_ids=support, engine_logprobs=0 * wrong.engine_logprobs)
    [response] = assess(model, [certain], [-1.0], load_recipe(None).objective)
    np.testing.assert_allclose(response.log_ratio, 0, atol=1e-6)
