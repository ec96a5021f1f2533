"""Objectives against an independent loop over tokens, and what every objective must not depend on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mugrpo_megatron.algorithm.policy_loss import policy_loss, token_losses
from mugrpo_megatron.algorithm.segments import make_segments, running_sum, select_responses
from mugrpo_megatron.algorithm.statistics import neutral_statistics, update_statistics
from mugrpo_megatron.algorithm.veto import initial_state
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.recipe.objective import PRESETS
from tests.algorithm import oracle
from tests.algorithm.batches import VARIANTS, Batch, batches, configs, flat, random_batch

RIVALS = ("decoupled_ppo", "sapo", "gmpo", "vespo", "seq_mis", "geo_rs")
STOPPED = {"cispo", "topr", "dppo", "dppo_kl", "vespo", "seq_mis"}
"""Objectives whose weights no gradient flows through."""


def moves_along(variant: dict[str, object]) -> bool:
    """Whether the clip range follows the current policy, so that a constant depends on it."""
    return variant.get("clip_centre", "one") != "one" and "reference_every" not in variant


def loss_and_gradient(batch: Batch, config: ObjectiveSection) -> tuple[float, torch.Tensor, dict[str, float]]:
    logprobs, behaviour, advantages = batch.tensors()
    segments, reference = batch.segments(config), batch.reference_for(config)
    loss, metrics = policy_loss(
        logprobs,
        behaviour,
        advantages,
        segments,
        config,
        reference=reference,
        anchor=batch.anchor_for(config),
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient, metrics


@settings(max_examples=400, deadline=None)
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
        reference=batch.reference if config.reference_every > 1 else None,
        anchor=batch.anchor if config.kl_anchor else None,
    )
    assert loss == pytest.approx(expected.loss, rel=1e-10, abs=1e-10)
    torch.testing.assert_close(gradient, flat(expected.gradient), rtol=1e-10, atol=1e-10)
    if len(gradient):
        assert metrics["vetoed_fraction"] == pytest.approx(1 - flat(expected.kept).mean().item())
        assert metrics["clipped_fraction"] == pytest.approx(flat(expected.clipped).mean().item())


@settings(max_examples=100, deadline=None)
@given(batches(), configs, st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_loss_and_gradient_are_finite_for_any_input(batch: Batch, config: ObjectiveSection, dtype: torch.dtype) -> None:
    logprobs, behaviour, advantages = (t.detach().to(dtype) for t in batch.tensors())
    logprobs = (logprobs - 60).requires_grad_()  # probabilities that float16 cannot hold
    reference = batch.reference_for(config)
    reference = None if reference is None else reference.to(dtype) - 60
    anchor = batch.anchor_for(config)
    anchor = None if anchor is None else anchor.to(dtype) - 60
    segments = batch.segments(config)
    loss, metrics = policy_loss(
        logprobs, behaviour - 60, advantages, segments, config, reference=reference, anchor=anchor
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    # k3 pulls back a token that the anchor prefers with up to e^20, which float16 does not hold.
    assert gradient.isfinite().all() or (dtype == torch.float16 and not gradient.isnan().any())
    assert all(math.isfinite(value) for value in metrics.values())


@settings(max_examples=100, deadline=None)
@given(batches(), configs, st.randoms(use_true_random=False), st.integers(1, 3))
def test_micro_batches_in_any_order_add_up_to_the_update(
    batch: Batch, config: ObjectiveSection, random: object, parts: int
) -> None:
    logprobs, behaviour, advantages = batch.tensors()
    segments = batch.segments(config)
    whole, gradient, _ = loss_and_gradient(batch, config)
    reference, anchor = batch.reference_for(config), batch.anchor_for(config)
    statistics = update_statistics(logprobs.detach(), behaviour, advantages, segments, config)
    order = list(range(len(batch.lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    total = torch.zeros((), dtype=torch.float64)
    for part in (order[k::parts] for k in range(parts)):
        micro, index = select_responses(segments, torch.tensor(part, dtype=torch.int64))
        there, held = (None if other is None else other[index] for other in (reference, anchor))
        values = logprobs[index], behaviour[index], advantages[part]
        total = total + policy_loss(*values, micro, config, statistics, there, held)[0]
    assert total.item() == pytest.approx(whole, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(torch.autograd.grad(total, logprobs)[0], gradient, rtol=1e-12, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(batches(), configs.filter(lambda c: c.dependence != "response"), st.integers(1, 20))
def test_chunks_that_carry_the_state_equal_the_whole(batch: Batch, config: ObjectiveSection, chunk: int) -> None:
    logprobs, behaviour, advantages = batch.tensors()
    segments, reference, anchor = batch.segments(config), batch.reference_for(config), batch.anchor_for(config)
    statistics = update_statistics(logprobs.detach(), behaviour, advantages, segments, config)
    first = initial_state(segments, config)
    whole = token_losses(logprobs, behaviour, advantages, segments, config, statistics, first, reference, anchor)
    first, losses, kept = initial_state(segments, config), [flat([])], [torch.zeros(0, dtype=torch.bool)]
    for start in range(0, len(logprobs), chunk):
        stop = min(start + chunk, len(logprobs))
        part = token_losses(
            logprobs[start:stop],
            behaviour[start:stop],
            advantages,
            segments.part(slice(start, stop)),
            config,
            statistics,
            first,
            None if reference is None else reference[start:stop],
            None if anchor is None else anchor[start:stop],
        )
        first = part.first_trigger
        losses.append(part.loss)
        kept.append(part.keep)
    torch.testing.assert_close(torch.cat(losses), whole.loss, rtol=1e-12, atol=1e-12)
    assert torch.cat(kept).equal(whole.keep)
    assert first.equal(whole.first_trigger)


SMOOTH = [
    v
    for v in VARIANTS
    if v.get("reference_every", v.get("clip_centre", "one")) in (4, "one")
    and v.get("kl_penalty") != "k2_weighted"  # its ratio is a weight without a gradient
]


@pytest.mark.parametrize("variant", SMOOTH, ids=str)
@pytest.mark.parametrize("name", sorted(set(PRESETS) - STOPPED - {"off_policy_grpo", "m2po", "m2po_drop"}))
def test_gradient_is_that_of_the_loss(name: str, variant: dict[str, object]) -> None:
    """Finite differences. Left out: objectives with stopped gradients, and m2po, whose edge lies on a token."""
    config = ObjectiveSection(name=name, **variant)
    batch = random_batch(3, [5, 1, 4, 7], spread=0.3)
    logprobs, behaviour, advantages = batch.tensors()
    segments = batch.segments(config)
    reference, anchor = batch.reference_for(config), batch.anchor_for(config)
    statistics = update_statistics(logprobs.detach(), behaviour, advantages, segments, config)
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(x, behaviour, advantages, segments, config, statistics, reference, anchor)[0],
        (logprobs,),
        eps=1e-7,
    )


clipped_around_a_reference = st.builds(
    lambda name, ratio: ObjectiveSection(name=name, ratio=ratio, clip_centre="reference", reference_every=4),
    st.sampled_from(["off_policy_grpo", "mu_grpo", "dapo", "cispo", "topr"]),
    st.sampled_from(["token", "sequence_mean", "sequence"]),
)


@settings(max_examples=100, deadline=None)
@given(batches(), clipped_around_a_reference)
def test_a_reference_that_is_the_current_policy_is_no_reference(batch: Batch, config: ObjectiveSection) -> None:
    """Refreshed before every update: bitwise loss and gradient of a range that moves along, which binds no token."""
    batch.reference = batch.logprobs
    found = loss_and_gradient(batch, config)
    moving = loss_and_gradient(batch, config.model_copy(update={"reference_every": 1}))
    assert found[0] == moving[0]
    assert found[1].equal(moving[1])
    assert found[2] == moving[2]
    assert found[2].get("clipped_fraction", 0.0) == 0.0


@settings(max_examples=100, deadline=None)
@given(batches(), clipped_around_a_reference)
def test_a_reference_that_is_the_behaviour_policy_clips_around_one(batch: Batch, config: ObjectiveSection) -> None:
    batch.reference = batch.behaviour
    loss, gradient, metrics = loss_and_gradient(batch, config)
    one = loss_and_gradient(batch, config.model_copy(update={"clip_centre": "one"}))
    assert loss == pytest.approx(one[0], rel=1e-12, abs=1e-12)
    torch.testing.assert_close(gradient, one[1], rtol=1e-12, atol=1e-12)
    assert metrics.get("clipped_fraction") == one[2].get("clipped_fraction")


def test_the_clip_binds_tokens_that_have_left_the_reference() -> None:
    """f_eps of arXiv 2505.22257 by hand, eps = 0.2: beta gives every token 1, the reference 0.5, 0.5, 0.5, 0.1, 0.1."""
    ratio = torch.tensor([0.6, 0.75, 0.25, 0.05, 0.35], dtype=torch.float64)
    reference = torch.tensor([0.5, 0.5, 0.5, 0.1, 0.1], dtype=torch.float64).log()
    segments = make_segments(torch.tensor([5, 5]), torch.ones(2))
    logprobs = ratio.log().repeat(2).requires_grad_()
    config = ObjectiveSection(name="off_policy_grpo", reference_every=4)
    losses = token_losses(
        logprobs,
        torch.zeros(10, dtype=torch.float64),
        torch.tensor([1.0, -1.0], dtype=torch.float64),
        segments,
        config,
        neutral_statistics(ratio.device),
        initial_state(segments, config),
        reference.repeat(2),
    )
    expected = [-0.6, -0.7, -0.25, -0.05, -0.3, 0.6, 0.75, 0.3, 0.05, 0.35]
    torch.testing.assert_close(losses.loss.detach(), torch.tensor(expected, dtype=torch.float64))
    assert losses.clipped.nonzero().flatten().tolist() == [1, 4, 7]
    (gradient,) = torch.autograd.grad(losses.loss.sum(), logprobs)
    assert gradient.eq(0).equal(losses.clipped)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_everything_vetoed_or_masked_is_zero_and_finite(name: str) -> None:
    config = ObjectiveSection(name=name, veto="response", trigger_ratio=0.9)
    batch = random_batch(0, [3, 4])
    batch.behaviour = [[x + 30 for x in row] for row in batch.logprobs]
    batch.advantages = [-1.0, -2.0]
    loss, gradient, metrics = loss_and_gradient(batch, config)
    assert (loss, gradient.abs().max().item(), metrics["vetoed_fraction"]) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_equal_rewards_give_no_gradient(name: str) -> None:
    batch = random_batch(0, [3, 4, 2])
    batch.advantages = [0.0] * 3
    loss, gradient, metrics = loss_and_gradient(batch, ObjectiveSection(name=name))
    assert loss == 0
    assert not gradient.any()
    assert metrics["zero_advantage_fraction"] == 1


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


@pytest.mark.parametrize(
    ("scope", "kept"),
    [
        ("none", [1, 1, 1, 1, 1]),
        ("trigger", [1, 0, 1, 0, 1]),
        ("suffix", [1, 1, 0, 0, 0]),
        ("suffix_non_trigger", [1, 1, 0, 1, 0]),
        ("response", [0, 0, 0, 0, 0]),
    ],
)
def test_scopes_of_the_veto(scope: str, kept: list[int]) -> None:
    """Triggers at the second and fourth token of a negative response; the positive one next to it stays whole."""
    ratio = torch.tensor([1.0, 0.9e-4, 1.1e-4, 1e-30, 1.0])
    config = ObjectiveSection(veto=scope)
    segments = make_segments(torch.tensor([5, 5]), torch.ones(2))
    losses = token_losses(
        ratio.log().repeat(2),
        torch.zeros(10),
        torch.tensor([-1.0, 1.0]),
        segments,
        config,
        neutral_statistics(ratio.device),
        initial_state(segments, config),
    )
    assert losses.keep.int().tolist() == kept + [1] * 5
    assert losses.first_trigger.tolist()[0] == 1


def test_denominators_come_from_the_mask_before_the_veto() -> None:
    """Vetoing tokens of one response leaves the gradient of every other as it is."""
    batch = random_batch(5, [6, 6], spread=0.0)
    batch.advantages = [-1.0, 1.0]
    before = loss_and_gradient(batch, ObjectiveSection())[1]
    batch.behaviour[0][0] = batch.logprobs[0][0] + 10
    after = loss_and_gradient(batch, ObjectiveSection())[1]
    assert after[6:].equal(before[6:])
    assert not after[1:6].any()


def test_correction_weighs_tokens() -> None:
    batch = random_batch(2, [4, 5])
    config = ObjectiveSection(name="grpo")
    logprobs, behaviour, advantages = batch.tensors()
    weights = batch.segments(config).weights
    correction = torch.rand(9, dtype=torch.float64)
    segments = make_segments(batch.lengths, weights, correction)
    loss, _ = policy_loss(logprobs, behaviour, advantages, segments, config)
    rows = [row.tolist() for row in correction.split([4, 5])]
    expected = oracle.objective(batch.logprobs, batch.behaviour, batch.advantages, weights.tolist(), config, rows)
    assert loss.item() == pytest.approx(expected.loss, rel=1e-12)


class Called(TorchDispatchMode):
    """Which of torch's functions are called, and whether on floats."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: set[tuple[str, bool]] = set()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):  # type: ignore[no-untyped-def]
        tensor = next((each for each in arguments if isinstance(each, torch.Tensor)), None)
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


@settings(deadline=None)
@given(st.lists(st.floats(1 / 64, 1.0, width=32), min_size=2, max_size=40), st.floats(0.3, 1.5))
def test_m2po_clips_no_further_than_its_budget_asks(log_ratios: list[float], share: float) -> None:
    """The tokens' clipped second moment is within the budget, and with the next larger token's bound it would not be.

    Budgets just below the moment too, where only the largest tokens may be clipped.
    """
    values = torch.tensor(log_ratios, dtype=torch.float64)
    squares = values.square().sort().values
    moment = squares.mean().item()
    segments, config = make_segments(torch.tensor([len(values)]), torch.ones(1)), ObjectiveSection(name="m2po")
    for budget in (share * moment, math.nextafter(moment, 0.0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mugrpo_megatron.algorithm.statistics.M2PO_BUDGET", budget)
            found = update_statistics(values, torch.zeros_like(values), torch.ones(1), segments, config)
        bound = found.log_clip.square().item()
        assert squares.clamp(max=bound).mean().item() <= budget * (1 + 1e-12)
        for larger in squares[squares > bound * (1 + 1e-12)][:1].tolist():
            assert squares.clamp(max=larger).mean().item() >= budget * (1 - 1e-12)
