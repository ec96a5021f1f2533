"""What an update is made of: exact ratios, transformers' log-probabilities, bad gradients, learning rates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.learner.model import policy
from mugrpo_megatron.learner.optimizer import learning_rate
from mugrpo_megatron.learner.update import token_logprobs, update
from mugrpo_megatron.recipe.sections import OptimizerSection
from tests.learner.tiny import advantages, left_behind, recipe, samples
from tests.ranks import run_ranks


def logprobs_and_first_update(model: str, sections: dict[str, Any]) -> tuple[list[np.ndarray], dict[str, float]]:
    learner = build_learner(recipe(Path(model), **sections))
    data = samples()
    own = token_logprobs(learner, data)
    data = [replace(sample, behaviour_logprobs=mine) for sample, mine in zip(data, own, strict=True)]
    return own, update(learner, data, advantages(len(data)))


@pytest.mark.process
@pytest.mark.parametrize(
    ("world", "sections"),
    [
        (1, {}),
        (1, {"model": {"dtype": "bfloat16"}}),
        (1, {"objective": {"name": "m2po"}}),
        (1, {"learner": {"threads": 2}}),  # lanes at once
        (2, {"parallel": {"tensor": 2}}),
        (2, {}),
    ],
)
def test_ratio_is_exactly_one_at_the_first_update(model: str, world: int, sections: dict[str, Any]) -> None:
    for _, metrics in run_ranks(world, logprobs_and_first_update, model, sections):
        assert metrics["ratio_mean"] == 1.0
        assert metrics["ratio_neg_max"] == metrics["ratio_neg_min"] == 1.0
        assert metrics["kl_k3"] == 0.0


@pytest.mark.process
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers(model: str, temperature: float) -> None:
    [(result, _)] = run_ranks(1, logprobs_and_first_update, model, {"rollout": {"temperature": temperature}})
    proximal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for sample, logprobs in zip(samples(), result, strict=True):
        ids = torch.tensor(np.concatenate([sample.prompt_ids, sample.response_ids]))[None].long()
        with torch.no_grad():
            table = (proximal(ids).logits[0] / temperature).log_softmax(-1)
        start = len(sample.prompt_ids)
        expected = [table[i - 1, ids[0, i]].item() for i in range(start, ids.shape[1])]
        np.testing.assert_allclose(logprobs, expected, atol=2e-5)


def with_advantages_of_its_own(model: str, advantage: str) -> tuple[int, list[float]]:
    """A rank whose function drew other advantages; its log-probabilities after the update."""
    learner = build_learner(recipe(Path(model), objective={"advantage": advantage}))
    data = samples()
    update(learner, data, advantages(len(data), seed=learner.ranks.rank))
    return learner.ranks.rank, np.concatenate(token_logprobs(learner, data)).tolist()


@pytest.mark.process
def test_every_rank_trains_with_the_first_ranks_advantages_of_a_users_function(model: str) -> None:
    [(_, alone)] = run_ranks(1, with_advantages_of_its_own, model, "group_std")
    for _, logprobs in run_ranks(2, with_advantages_of_its_own, model, "a.module:function"):
        np.testing.assert_allclose(logprobs, alone, atol=1e-4)


def corrected(model: str, name: str, doubt: float) -> list[float]:
    """Loss and gradient norm of one update, the engine's logprobs `doubt` nats above the learner's."""
    learner = build_learner(recipe(Path(model), objective={"name": name}, rollout={"behaviour": "learner"}))
    data = [replace(s, engine_logprobs=s.engine_logprobs + np.float32(doubt)) for s in samples()]
    metrics = update(learner, data, advantages(len(data)))
    return [metrics["loss"], metrics["grad_norm"]]


@pytest.mark.process
def test_engine_mismatch_weighs_the_tokens(model: str) -> None:
    [plain], [same] = run_ranks(1, corrected, model, "grpo", 0.0), run_ranks(1, corrected, model, "tis", 0.0)
    [half] = run_ranks(1, corrected, model, "tis", float(np.log(2)))
    assert same == plain
    assert half == pytest.approx([value / 2 for value in plain], rel=1e-5)


def around_a_reference(model: str, sections: dict[str, Any]) -> dict[str, float]:
    """An update whose proximal policy lies half-way between behaviour and current policy."""
    learner = build_learner(recipe(Path(model), objective=REFERENCE, **sections))
    data = samples()
    halfway = [(own + s.engine_logprobs) / 2 for own, s in zip(token_logprobs(learner, data), data, strict=True)]
    data = [replace(s, proximal_logprobs=mine) for s, mine in zip(data, halfway, strict=True)]
    return update(learner, data, advantages(len(data)))


REFERENCE = {"name": "off_policy_grpo", "proximal_every": 4}


@pytest.mark.process
def test_the_clip_around_a_reference_is_that_of_one_process(model: str) -> None:
    """Every rank finds the proximal policy of its own share of responses, under data and under context parallelism."""
    [alone] = run_ranks(1, around_a_reference, model, {})
    assert 0 < alone["clipped_fraction"] < 1
    for sections in ({}, {"parallel": {"context": 2}}):
        for result in run_ranks(2, around_a_reference, model, sections):
            assert result["clipped_fraction"] == alone["clipped_fraction"]
            assert result["loss"] == pytest.approx(alone["loss"], rel=1e-4)
            assert result["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)


def with_bad_advantage(model: str) -> tuple[bool, int, int, dict[str, float], dict[str, float]]:
    learner = build_learner(recipe(Path(model)))
    before = [p.detach().clone() for p in policy(learner.chunks[0]).parameters()]
    bad = advantages(24)
    bad[3] = np.nan
    skipped = update(learner, samples(), bad)
    same = all(torch.equal(a, b) for a, b in zip(before, policy(learner.chunks[0]).parameters(), strict=True))
    return same, learner.updates_done, learner.steps_done, skipped, update(learner, samples(), advantages(24))


@pytest.mark.process
def test_a_non_finite_gradient_skips_the_update(model: str) -> None:
    [(same, updates, steps, skipped, after)] = run_ranks(1, with_bad_advantage, model)
    assert same
    assert (updates, steps) == (1, 0)
    assert skipped["skipped"] == 1.0
    assert after["skipped"] == 0.0
    assert np.isfinite(after["grad_norm"])


def decayed(model: str) -> list[tuple[int, bool, float]]:
    """(dimensions, changed, largest deviation from the expected decay) of every weight, after an update at rest."""
    optimizer = {"lr": 1e-2, "weight_decay": 0.1}
    learner = build_learner(recipe(Path(model), optimizer=optimizer))
    weights = list(policy(learner.chunks[0]).parameters())
    before = [p.detach().clone() for p in weights]
    update(learner, samples(), np.zeros(24, np.float32))
    factor = 1 - 1e-2 * 0.1
    return [
        (p.dim(), not torch.equal(p, old), float((p - (factor if p.dim() > 1 else 1) * old).abs().max()))
        for p, old in zip(weights, before, strict=True)
    ]


@pytest.mark.process
def test_norms_and_biases_do_not_decay(model: str) -> None:
    [result] = run_ranks(1, decayed, model)
    assert {dimensions for dimensions, _, _ in result} == {1, 2}
    for dimensions, changed, off in result:
        assert changed == (dimensions > 1)
        assert off < 1e-6


@given(st.integers(0, 400), st.sampled_from(["constant", "linear", "cosine"]))
def test_learning_rate_stays_within_its_bounds(update: int, decay: str) -> None:
    section = OptimizerSection(lr=1e-3, min_lr=1e-4, decay=decay, warmup_updates=10)
    rate = learning_rate(section, update, 400)
    assert 0 < rate <= 1e-3
    assert learning_rate(section, 400, 400) == pytest.approx(1e-3 if decay == "constant" else 1e-4)
    if update >= 10:
        assert rate >= 1e-4
        assert learning_rate(section, update + 1, 400) <= rate
    else:
        assert rate == pytest.approx(1e-3 * (update + 1) / 10)


@given(st.integers(10, 399), st.integers(0, 63), st.sampled_from(["linear", "cosine"]))
def test_a_decay_over_stages_starts_anew_at_each(update: int, age: int, decay: str) -> None:
    """It depends on the age alone, except in the warm-up, and is what a run of that many updates would have."""
    section = OptimizerSection(lr=1e-3, min_lr=1e-4, decay=decay, decay_over="stage", warmup_updates=10)
    rate = learning_rate(section, update, 400, age / 64)
    assert rate == pytest.approx(learning_rate(OptimizerSection(lr=1e-3, min_lr=1e-4, decay=decay), age, 64))
    assert learning_rate(section, 3, 400, age / 64) == pytest.approx(4e-4)


def after_one_update(model: str, sections: dict[str, Any]) -> tuple[dict[str, float], list[float]]:
    """Metrics of an update on stale responses, and the log-probabilities after it."""
    learner = build_learner(recipe(Path(model), **sections))
    data = left_behind(samples())
    metrics = update(learner, data, advantages(len(data)))
    return metrics, np.concatenate(token_logprobs(learner, data)).tolist()


def truncated(model: str, sections: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Two updates on responses whose sampler kept four tokens at each place, behaviour by the learner."""
    learner = build_learner(recipe(Path(model), **sections))
    generator = np.random.default_rng(0)
    data = []
    for number, sample in enumerate(samples()):
        support_ids = generator.permuted(np.tile(np.arange(90, dtype=np.int32), (len(sample.response_ids), 1)), axis=1)[
            :, :4
        ]
        support_ids[~(support_ids == sample.response_ids[:, None]).any(1), 3] = -1
        support_ids[:, 0] = np.where(
            (support_ids == sample.response_ids[:, None]).any(1), support_ids[:, 0], sample.response_ids
        )
        data.append(replace(sample, support_ids=np.pad(support_ids, ((0, 0), (0, number % 3)), constant_values=-1)))
    own = token_logprobs(learner, data)
    data = [replace(sample, behaviour_logprobs=mine) for sample, mine in zip(data, own, strict=True)]
    return update(learner, data, advantages(len(data))), update(learner, data, advantages(len(data)))


@pytest.mark.process
def test_ratios_over_the_kept_tokens_are_exact_in_every_layout(model: str) -> None:
    [(first, second)] = run_ranks(1, truncated, model, {})
    assert first["ratio_mean"] == first["ratio_neg_max"] == first["ratio_neg_min"] == 1.0
    assert 0 < first["entropy"] < np.log(4)
    for sections in ({"parallel": {"tensor": 2}}, {"parallel": {"pipeline": 2}}, {"parallel": {"context": 2}}):
        for one, two in run_ranks(2, truncated, model, sections):
            assert one["ratio_mean"] == 1.0
            assert one["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)
            assert two["loss"] == pytest.approx(second["loss"], rel=2e-3)
