"""Objectives against an independent loop over tokens, and what every objective must not depend on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mugrpo_megatron.algorithm.policy_loss import policy_loss, token_losses
from mugrpo_megatron.algorithm.segments import LossInputs, make_segments, running_sum, select_responses
from mugrpo_megatron.algorithm.statistics import update_statistics
from mugrpo_megatron.algorithm.veto import initial_state
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.recipe.objective import PRESETS
from tests.algorithm import oracle
from tests.algorithm.batches import VARIANTS, Batch, batches, configs, flat, random_batch

RIVALS = ("decoupled_ppo", "sapo", "gmpo", "vespo", "seq_mis")


def loss_and_gradient(batch: Batch, config: ObjectiveSection) -> tuple[float, torch.Tensor, dict[str, float]]:
    logprobs = batch.leaf()
    loss, metrics = policy_loss(logprobs, batch.inputs(config))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient, metrics


@settings(max_examples=300)
@given(batches(), configs)
def test_equals_the_loop_over_tokens(batch: Batch, config: ObjectiveSection) -> None:
    loss, gradient, metrics = loss_and_gradient(batch, config)
    weights = batch.segments(config).weights.tolist()
    expected = oracle.objective(
        batch.logprobs,
        batch.behaviour,
        batch.advantages,
        weights,
        config,
        proximal=batch.proximal if config.proximal_every > 1 else None,
        ref=batch.ref if config.kl_ref else None,
    )
    assert loss == pytest.approx(expected.loss, rel=1e-10, abs=1e-10)
    torch.testing.assert_close(gradient, flat(expected.gradient), rtol=1e-10, atol=1e-10)
    if len(gradient):
        assert metrics["vetoed_fraction"] == pytest.approx(1 - flat(expected.keep).mean().item())
        assert metrics["clipped_fraction"] == pytest.approx(flat(expected.clipped).mean().item())


@settings(max_examples=50)
@given(batches(), configs, st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_loss_and_gradient_are_finite_for_any_input(batch: Batch, config: ObjectiveSection, dtype: torch.dtype) -> None:
    inputs = batch.inputs(config)

    def improbable(column: torch.Tensor) -> torch.Tensor:
        return column.to(dtype) - 60  # probabilities that float16 cannot hold

    logprobs = improbable(flat(batch.logprobs)).requires_grad_()
    inputs = replace(
        inputs,
        behaviour=improbable(inputs.behaviour),
        advantages=inputs.advantages.to(dtype),
        proximal=None if inputs.proximal is None else improbable(inputs.proximal),
        ref=None if inputs.ref is None else improbable(inputs.ref),
    )
    loss, metrics = policy_loss(logprobs, inputs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    # k3 pulls back a token that the reference policy prefers with up to e^20, which float16 does not hold.
    assert gradient.isfinite().all() or (dtype == torch.float16 and not gradient.isnan().any())
    assert all(math.isfinite(value) for value in metrics.values())


@settings(max_examples=50)
@given(batches(), configs, st.randoms(use_true_random=False), st.integers(1, 3))
def test_micro_batches_in_any_order_add_up_to_the_update(
    batch: Batch, config: ObjectiveSection, random: object, parts: int
) -> None:
    logprobs, inputs = batch.leaf(), batch.inputs(config)
    loss, gradient, _ = loss_and_gradient(batch, config)
    statistics = update_statistics(logprobs.detach(), inputs)
    order = list(range(len(batch.lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    total = torch.zeros((), dtype=torch.float64)
    for responses in (torch.tensor(order[k::parts], dtype=torch.int64) for k in range(parts)):
        _, tokens = select_responses(inputs.segments, responses)
        total = total + policy_loss(logprobs[tokens], inputs.select(responses), statistics)[0]
    assert total.item() == pytest.approx(loss, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(torch.autograd.grad(total, logprobs)[0], gradient, rtol=1e-12, atol=1e-12)


@settings(max_examples=50)
@given(batches(), configs.filter(lambda c: c.dependence != "response"), st.integers(1, 20))
def test_chunks_that_carry_the_state_equal_the_whole(batch: Batch, config: ObjectiveSection, chunk: int) -> None:
    logprobs, inputs = batch.leaf(), batch.inputs(config)
    statistics = update_statistics(logprobs.detach(), inputs)
    state = initial_state(inputs.segments, config)
    expected = token_losses(logprobs, inputs, statistics, state)
    losses, keep = [flat([])], [torch.zeros(0, dtype=torch.bool)]
    for start in range(0, len(logprobs), chunk):
        tokens = slice(start, min(start + chunk, len(logprobs)))
        result = token_losses(logprobs[tokens], inputs.chunk(tokens), statistics, state)
        state = result.mask.state
        losses.append(result.loss)
        keep.append(result.mask.keep)
    torch.testing.assert_close(torch.cat(losses), expected.loss, rtol=1e-12, atol=1e-12)
    assert torch.cat(keep).equal(expected.mask.keep)
    assert state.first_trigger.equal(expected.mask.state.first_trigger)
    torch.testing.assert_close(state.log_prefix, expected.mask.state.log_prefix, rtol=1e-12, atol=1e-12)


def test_on_policy_gradient_is_that_of_reinforce() -> None:
    """Where current and behaviour policy agree, every ratio is 1 and nothing is clipped or vetoed."""
    batch = random_batch(1, [3, 0, 6], spread=0.0)
    for name in ("mu_grpo", "grpo", "dapo", "gspo", "cispo", "m2po", "m2po_drop", "off_policy_grpo", *RIVALS):
        config = ObjectiveSection(name=name)
        _, gradient, metrics = loss_and_gradient(batch, config)
        segments = batch.segments(config)
        expected = -(segments.weights * flat([batch.advantages]))[segments.ids]
        torch.testing.assert_close(gradient, expected)
        assert metrics["ratio_mean"] == metrics["ess"] == 1
        assert metrics["vetoed_fraction"] == metrics["clipped_fraction"] == metrics["kl_k3"] == 0


def test_correction_weighs_tokens() -> None:
    batch = random_batch(2, [4, 5])
    config = ObjectiveSection(name="grpo")
    inputs = batch.inputs(config)
    weights = inputs.segments.weights
    correction = torch.rand(9, dtype=torch.float64)
    loss, _ = policy_loss(batch.leaf(), replace(inputs, correction=correction))
    rows = [row.tolist() for row in correction.split([4, 5])]
    expected = oracle.objective(batch.logprobs, batch.behaviour, batch.advantages, weights.tolist(), config, rows)
    assert loss.item() == pytest.approx(expected.loss, rel=1e-12)


def test_the_entropy_bonus_has_the_weights_of_the_tokens_and_no_veto_takes_it() -> None:
    batch = random_batch(1, [4, 2])
    batch.advantages = [-1.0, 1.0]
    batch.behaviour[0] = [x + 12 for x in batch.logprobs[0]]
    entropy = torch.rand(6, dtype=torch.float64, requires_grad=True)
    config = ObjectiveSection(veto="response", entropy_coef=0.25, reduction="sequence_mean")
    loss, metrics = policy_loss(batch.leaf(), batch.inputs(config), entropy=entropy)
    assert metrics["vetoed_fraction"] == pytest.approx(4 / 6)
    (gradient,) = torch.autograd.grad(loss, entropy)
    torch.testing.assert_close(gradient, -0.25 * torch.tensor([1 / 8] * 4 + [1 / 4] * 2, dtype=torch.float64))


class Called(TorchDispatchMode):
    """Names of the torch functions that are called, and whether on floats."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: set[tuple[str, bool]] = set()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):  # type: ignore[no-untyped-def]
        tensor = next((value for value in arguments if isinstance(value, torch.Tensor)), None)
        self.functions.add((function.__name__.split(".")[0], tensor is not None and tensor.is_floating_point()))
        return function(*arguments, **(named or {}))


def test_no_objective_needs_an_order_that_cuda_does_not_have() -> None:
    """With deterministic algorithms torch raises for these on CUDA, whose additions have no order."""
    with Called() as called:
        for variant in [*VARIANTS, *({"name": name} for name in PRESETS)]:
            batch, config = random_batch(0, [5, 9, 3, 8], spread=3.0), ObjectiveSection.model_validate(variant)
            loss_and_gradient(batch, config)
    assert {("index_add", True), ("scatter_reduce", False)} <= called.functions, "it sees what is called"
    assert not {("cumsum", True), ("put_", True), ("median", True), ("bincount", False)} & called.functions


@given(st.lists(st.floats(-1e3, 1e3), max_size=70))
def test_a_running_sum_is_the_sum_so_far(values: list[float]) -> None:
    found = running_sum(torch.tensor(values, dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor(values, dtype=torch.float64).cumsum(0), atol=1e-9, rtol=1e-12)


@given(st.lists(st.floats(1 / 64, 1.0, width=32), min_size=2, max_size=40), st.floats(0.3, 1.5))
def test_m2po_clips_no_further_than_its_budget_asks(log_ratios: list[float], share: float) -> None:
    """The tokens' clipped second moment is within the budget, and with the next larger token's bound it would not be.

    Budgets just below the moment too, where only the largest tokens may be clipped.
    """
    values = torch.tensor(log_ratios, dtype=torch.float64)
    squares = values.square().sort().values
    moment = squares.mean().item()
    segments = make_segments(torch.tensor([len(values)]), torch.ones(1))
    inputs = LossInputs(ObjectiveSection(name="m2po"), torch.zeros_like(values), torch.ones(1), segments)
    for budget in (share * moment, math.nextafter(moment, 0.0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mugrpo_megatron.algorithm.statistics.M2PO_BUDGET", budget)
            bound = update_statistics(values, inputs).log_clip.square().item()
        assert squares.clamp(max=bound).mean().item() <= budget * (1 + 1e-12)
        for larger in squares[squares > bound * (1 + 1e-12)][:1].tolist():
            assert squares.clamp(max=larger).mean().item() >= budget * (1 - 1e-12)
