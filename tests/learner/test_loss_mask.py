"""Tokens outside a loss mask do not exist for the loss: the same as dropping them by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.algorithm.masks import response_weights
from mugrpo_megatron.algorithm.policy_loss import policy_loss
from mugrpo_megatron.algorithm.segments import make_segments
from mugrpo_megatron.learner.learner import Learner, build_learner
from mugrpo_megatron.learner.packing import Tokens, pack
from mugrpo_megatron.learner.update import token_logprobs, update
from mugrpo_megatron.samples import Sample
from tests.learner.tiny import advantages, left_behind, recipe, samples, save_model
from tests.ranks import run_ranks


@given(st.lists(st.tuples(st.integers(1, 4), st.lists(st.booleans(), min_size=1, max_size=6)), min_size=1, max_size=5))
def test_a_packed_row_trains_the_tokens_of_the_masks(shapes: list[tuple[int, list[bool]]]) -> None:
    starts = np.cumsum([0, *(prompt + len(mask) for prompt, mask in shapes)])
    sequences = [
        Tokens(np.arange(start, start + prompt + len(mask)), prompt, mask=np.array(mask))
        for start, (prompt, mask) in zip(starts, shapes, strict=False)
    ]
    length = int(starts[-1]) + 3
    batch = pack(sequences, list(range(len(sequences))), length, torch.device("cpu"))
    expected = [
        int(start) + prompt + place
        for start, (prompt, mask) in zip(starts, shapes, strict=False)
        for place, kept in enumerate(mask)
        if kept
    ]
    assert batch.targets.tolist() == expected, "token i has id i"
    assert batch.rows.tolist() == [place - 1 for place in expected]
    assert batch.lengths.tolist() == [sum(mask) for _, mask in shapes]


STILL = {"lr": 1e-30}
"""Updates that leave the weights as they are."""


def masked(data: list[Sample], kind: str) -> list[Sample]:
    """The samples with a mask: all tokens, all but the last ones, or a random half (of one response nothing)."""
    generator = np.random.default_rng(1)
    masks = []
    for place, sample in enumerate(data):
        length = len(sample.response_ids)
        if kind == "half":
            masks.append(generator.integers(0, 2, length).astype(bool) & (place != 1))
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
        behaviour_logprobs=sample.trained(sample.behaviour_logprobs),
        loss_mask=None,
    )


def updated(learner: Learner, data: list[Sample], budget: int = 4096) -> tuple[float, float]:
    section = learner.recipe.learner.model_copy(update={"micro_batch_tokens": budget})
    packing = replace(learner, recipe=learner.recipe.model_copy(update={"learner": section}))
    metrics = update(packing, data, advantages(len(data)))
    return metrics["loss"], metrics["grad_norm"]


def compared(model: str, objective: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Loss and gradient norm of updates that have to be the same, by name, and the loss of the tokens kept by hand."""
    learner = build_learner(recipe(Path(model), objective=objective, optimizer=STILL))
    plain = samples()
    every, fewer, half = (masked(plain, kind) for kind in ("all", "all but the last", "half"))
    noise = [replace(s, behaviour_logprobs=np.where(mask_of(s), s.behaviour_logprobs, np.float32(-30.0))) for s in half]
    logprobs = np.concatenate([s.trained(own) for s, own in zip(half, token_logprobs(learner, plain), strict=True)])
    lengths = torch.tensor([int(mask_of(s).sum()) for s in half])
    found = policy_loss(
        torch.from_numpy(logprobs),
        torch.from_numpy(np.concatenate([s.trained(s.behaviour_logprobs) for s in half])),
        torch.from_numpy(np.asarray(advantages(len(half)), dtype=np.float32)),
        make_segments(
            lengths,
            response_weights(
                lengths, learner.recipe.objective, constant_length=learner.recipe.rollout.max_response_tokens
            ),
        ),
        learner.recipe.objective,
    )
    return {
        "plain": updated(learner, plain),
        "every": updated(learner, every),
        "fewer": updated(learner, fewer),
        "shorter": updated(learner, [dropped(s) for s in fewer]),
        "half": updated(learner, half),
        "half in many rows": updated(learner, half, budget=16),
        "half, others noise": updated(learner, noise),
        "half by hand": (float(found[0]), 0.0),
    }


@pytest.mark.process
@pytest.mark.parametrize("name", ["mu_grpo", "gspo", "dr_grpo"])
def test_a_masked_token_is_as_if_it_were_not_there(name: str, tmp_path: Path) -> None:
    """The gradient is the fused path's, the loss by hand the reference's."""
    [found] = run_ranks(1, compared, str(save_model(tmp_path / "model")), {"name": name})
    assert found["every"] == found["plain"]
    assert found["half, others noise"] == found["half"]
    assert found["fewer"] != pytest.approx(found["plain"])
    assert found["fewer"] == pytest.approx(found["shorter"], rel=1e-4, abs=1e-7)
    assert found["half in many rows"] == pytest.approx(found["half"], rel=1e-4, abs=1e-7)
    assert found["half"][0] == pytest.approx(found["half by hand"][0], rel=1e-4, abs=1e-7)


def of_half(model: str, parallel: dict[str, Any]) -> tuple[float, float]:
    """Loss and gradient norm of an update in several micro-batches, whose masks leave out half of the tokens."""
    learner = build_learner(recipe(Path(model), optimizer=STILL, parallel=parallel))
    return updated(learner, masked(samples(), "half"), budget=160)


@pytest.mark.process
@pytest.mark.parametrize(
    "parallel", [{"tensor": 2}, {"context": 2}, {"pipeline": 2}, {}], ids=["tp2", "cp2", "pp2", "dp2"]
)
def test_masks_are_the_same_in_every_layout(parallel: dict[str, Any], tmp_path: Path) -> None:
    """A rank holds a part of the vocabulary, of the rows or of the layers; the tokens trained on are those of one."""
    model = str(save_model(tmp_path / "model"))
    [alone] = run_ranks(1, of_half, model, {})
    for rank in run_ranks(2, of_half, model, parallel):
        assert rank == pytest.approx(alone, rel=1e-4)


def in_turns(data: list[Sample]) -> list[Sample]:
    """The samples as episodes: turns of three tokens with two of a tool between them, which has logprobs of 0."""
    masks = [np.arange(len(s.response_ids)) % 5 < 3 for s in data]
    return [
        replace(s, loss_mask=mask, behaviour_logprobs=np.where(mask, s.behaviour_logprobs, np.float32(0)))
        for s, mask in zip(data, masks, strict=True)
    ]


REACHES = ("turn", "response")
BUDGETS = (4096, 48)
"""Tokens of a packed row: all samples in one, or one or two in each."""


def of_turns(model: str, parallel: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By reach of the veto: a stage's first update on the learner's own logprobs, then stale ones, packed in each way.

    The triggers of the stale ones lie in all turns.
    """
    learner = build_learner(recipe(Path(model), optimizer=STILL, parallel=parallel, objective={"veto": "suffix"}))
    data, stale = in_turns(samples()), in_turns(left_behind(samples()))
    own = token_logprobs(learner, data)
    fresh = [replace(s, behaviour_logprobs=logprobs) for s, logprobs in zip(data, own, strict=True)]
    found = {}
    for reach in REACHES:
        objective = learner.recipe.objective.model_copy(update={"veto_reach": reach})
        reaching = replace(learner, recipe=learner.recipe.model_copy(update={"objective": objective}))
        found[reach] = {
            "first": update(reaching, fresh, advantages(len(data))),
            "stale": [updated(reaching, stale, budget) for budget in BUDGETS],
        }
    return found


def check_turns(model: str, world: int, layouts: list[dict[str, Any]]) -> None:
    """Every layout's losses are those of one process; ratios of a first update are exactly 1."""
    [alone] = run_ranks(1, of_turns, model, {})
    ranks = [rank for parallel in layouts for rank in run_ranks(world, of_turns, model, parallel)]
    for one in (alone, *ranks):
        for reach in REACHES:
            first, whole = one[reach]["first"], alone[reach]
            assert {first[name] for name in ("ratio_mean", "ratio_neg_min", "ratio_neg_max", "ratio_pos_max")} == {1.0}
            assert first["kl_k3"] == 0
            assert first["tokens"] == sum(int(mask_of(s).sum()) for s in in_turns(samples()))
            assert first["loss"] == pytest.approx(whole["first"]["loss"], rel=1e-4, abs=1e-7)
            for packed in one[reach]["stale"]:
                assert packed == pytest.approx(whole["stale"][0], rel=1e-4, abs=1e-7)
    (_, in_turn), (_, in_response) = (alone[reach]["stale"][0] for reach in REACHES)
    assert in_turn != pytest.approx(in_response, rel=1e-3)


@pytest.mark.process
def test_the_ratio_over_turns_is_exactly_1_at_first_and_losses_are_the_same_in_every_layout(tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [{"tensor": 2}, {"context": 2}, {"pipeline": 2}]
    check_turns(str(save_model(tmp_path / "model")), 2, layouts)


@pytest.mark.night
@pytest.mark.process
def test_losses_over_turns_are_the_same_in_layouts_of_several_kinds(tmp_path: Path) -> None:
    pairs = [{"tensor": 2, "context": 2}, {"tensor": 2, "pipeline": 2}, {"context": 2, "pipeline": 2}]
    check_turns(str(save_model(tmp_path / "model")), 4, pairs)


def of_nothing(model: str) -> dict[str, float]:
    """An update whose masks leave out every token."""
    learner = build_learner(recipe(Path(model)))
    data = [replace(s, loss_mask=np.zeros(len(s.response_ids), dtype=bool)) for s in samples()]
    return update(learner, data, advantages(len(data)))


@pytest.mark.process
def test_an_update_without_a_token_reports_no_mean_of_nothing(tmp_path: Path) -> None:
    [found] = run_ranks(1, of_nothing, str(save_model(tmp_path / "model")))
    assert (found["tokens"], found["loss"], found["grad_norm"], found["skipped"]) == (0, 0, 0, 0)
    assert [name for name, value in found.items() if not np.isfinite(value)] == []
