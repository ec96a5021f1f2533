"""Tokens outside a loss mask do not exist for the loss: the same as dropping them by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mugrpo_megatron.learner.learner import Learner, build_learner
from mugrpo_megatron.learner.update import token_logprobs, update
from mugrpo_megatron.samples import Sample
from tests.learner.tiny import advantages, left_behind, recipe, samples
from tests.ranks import run_ranks

STILL = {"lr": 1e-30}
"""Updates that leave the weights as they are."""


def masked(data: list[Sample], kind: str) -> list[Sample]:
    """The samples with a mask: all tokens, all but the last ones, or a random half (of one response nothing)."""
    generator = np.random.default_rng(1)
    masks = []
    for index, sample in enumerate(data):
        length = len(sample.response_ids)
        if kind == "half":
            masks.append(generator.integers(0, 2, length).astype(bool) & (index != 1))
        else:
            masks.append(np.arange(length) < (length if kind == "all" else max(1, length - 2)))
    return [replace(sample, loss_mask=mask) for sample, mask in zip(data, masks, strict=True)]


def mask_of(sample: Sample) -> np.ndarray:
    assert sample.loss_mask is not None
    return sample.loss_mask


def dropped(sample: Sample) -> Sample:
    """The sample without the last tokens, which its mask leaves out."""
    return replace(
        sample,
        response_ids=sample.trained(sample.response_ids),
        engine_logprobs=sample.trained(sample.engine_logprobs),
        behaviour_logprobs=sample.trained(sample.engine_logprobs),
        loss_mask=None,
    )


def updated(learner: Learner, data: list[Sample], budget: int = 4096) -> tuple[float, float]:
    section = learner.recipe.learner.model_copy(update={"micro_batch_tokens": budget})
    packing = replace(learner, recipe=learner.recipe.model_copy(update={"learner": section}))
    metrics = update(packing, data, advantages(len(data)))
    return metrics["loss"], metrics["grad_norm"]


def compared(model: str, objective: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Loss and gradient norm of updates that have to be the same, by name."""
    learner = build_learner(recipe(Path(model), objective=objective, optimizer=STILL))
    plain = samples()
    every, fewer, half = (masked(plain, kind) for kind in ("all", "all but the last", "half"))
    noise = [replace(s, behaviour_logprobs=np.where(mask_of(s), s.engine_logprobs, np.float32(-30.0))) for s in half]
    return {
        "plain": updated(learner, plain),
        "every": updated(learner, every),
        "fewer": updated(learner, fewer),
        "shorter": updated(learner, [dropped(s) for s in fewer]),
        "half": updated(learner, half),
        "half in many rows": updated(learner, half, budget=16),
        "half, others noise": updated(learner, noise),
    }


@pytest.mark.process
@pytest.mark.parametrize("name", ["mu_grpo", "gspo", "dr_grpo"])
def test_a_masked_token_is_as_if_it_were_not_there(name: str, model: str) -> None:
    [result] = run_ranks(1, compared, model, {"name": name})
    assert result["every"] == result["plain"]
    assert result["half, others noise"] == result["half"]
    assert result["fewer"] != pytest.approx(result["plain"])
    assert result["fewer"] == pytest.approx(result["shorter"], rel=1e-4, abs=1e-7)
    assert result["half in many rows"] == pytest.approx(result["half"], rel=1e-4, abs=1e-7)


def of_half(model: str, parallel: dict[str, Any]) -> tuple[float, float]:
    """Loss and gradient norm of an update in several micro-batches, whose masks leave out half of the tokens."""
    learner = build_learner(recipe(Path(model), optimizer=STILL, parallel=parallel))
    return updated(learner, masked(samples(), "half"), budget=160)


@pytest.mark.process
@pytest.mark.parametrize(
    "parallel",
    [{"tensor": 2}, {"context": 2}, {"pipeline": 2}, {}],
    ids=["tp2 sp", "cp2", "pp2", "dp2"],
)
def test_masks_are_the_same_in_every_layout(parallel: dict[str, Any], model: str) -> None:
    """A rank holds a part of the vocabulary, of the rows or of the layers; the tokens trained on are those of one."""
    [alone] = run_ranks(1, of_half, model, {})
    for rank in run_ranks(2, of_half, model, parallel):
        assert rank == pytest.approx(alone, rel=1e-4)


def in_turns(data: list[Sample]) -> list[Sample]:
    """The samples as episodes: turns of three tokens with two of a tool between them, which has logprobs of 0."""
    masks = [np.arange(len(s.response_ids)) % 5 < 3 for s in data]
    return [
        replace(s, loss_mask=mask, behaviour_logprobs=np.where(mask, s.engine_logprobs, np.float32(0)))
        for s, mask in zip(data, masks, strict=True)
    ]


VETOES = [(veto, reach) for veto in ("suffix", "prefix") for reach in ("turn", "response")]
"""Veto and its reach."""
BUDGETS = (4096, 48)
"""Tokens of a packed row: all samples in one, or one or two in each."""


def of_turns(model: str, parallel: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """By veto and reach: a stage's first update on the learner's own logprobs, then stale ones.

    Those are packed in each way on one rank. Their triggers lie in all turns.
    """
    learner = build_learner(recipe(Path(model), optimizer=STILL, parallel=parallel))
    data, stale = in_turns(samples()), in_turns(left_behind(samples()))
    logprobs_of_samples = token_logprobs(learner, data)
    fresh = [replace(s, behaviour_logprobs=logprobs) for s, logprobs in zip(data, logprobs_of_samples, strict=True)]
    result = {}
    for veto, reach in VETOES:
        objective = learner.recipe.objective.model_copy(update={"veto": veto, "veto_reach": reach})
        reaching = replace(learner, recipe=learner.recipe.model_copy(update={"objective": objective}))
        result[veto, reach] = {
            "first": update(reaching, fresh, advantages(len(data))),
            "stale": [updated(reaching, stale, budget) for budget in BUDGETS[bool(parallel) :]],
        }
    return result


@pytest.mark.process
def test_the_ratio_over_turns_is_exactly_1_at_first_and_losses_are_the_same_in_every_layout(model: str) -> None:
    [alone] = run_ranks(1, of_turns, model, {})
    layouts: list[dict[str, Any]] = [{"tensor": 2}, {"context": 2}, {"pipeline": 2}]
    for rank_result in (alone, *(rank for parallel in layouts for rank in run_ranks(2, of_turns, model, parallel))):
        for case in VETOES:
            first, whole = rank_result[case]["first"], alone[case]
            assert {first[name] for name in ("ratio_mean", "ratio_neg_min", "ratio_neg_max", "ratio_pos_max")} == {1.0}
            assert first["tokens"] == sum(int(mask_of(s).sum()) for s in in_turns(samples()))
            assert first["loss"] == pytest.approx(whole["first"]["loss"], rel=1e-4, abs=1e-7)
            for packed in rank_result[case]["stale"]:
                assert packed == pytest.approx(whole["stale"][0], rel=1e-4, abs=1e-7)
    norms = [alone[case]["stale"][0][1] for case in VETOES]
    assert all(other != pytest.approx(norm, rel=1e-3) for norm, other in combinations(norms, 2))


def of_nothing(model: str) -> dict[str, float]:
    """An update whose masks leave out every token."""
    learner = build_learner(recipe(Path(model)))
    data = [replace(s, loss_mask=np.zeros(len(s.response_ids), dtype=bool)) for s in samples()]
    return update(learner, data, advantages(len(data)))


@pytest.mark.process
def test_an_update_without_a_token_reports_no_mean_of_nothing(model: str) -> None:
    [result] = run_ranks(1, of_nothing, model)
    assert (result["tokens"], result["loss"], result["grad_norm"], result["skipped"]) == (0, 0, 0, 0)
    assert [name for name, value in result.items() if not np.isfinite(value)] == []
