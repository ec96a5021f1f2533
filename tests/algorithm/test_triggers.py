"""What every run says of triggers at six thresholds: against sets of tokens, and against what the veto then drops."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.algorithm.veto import THRESHOLDS, TRIGGER_METRICS
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.recipe.objective import PRESETS
from tests.algorithm.batches import Batch, batches, random_batch
from tests.algorithm.test_diagnostics import metrics_of

SCOPES = ("trigger", "suffix", "suffix_non_trigger", "response")


@st.composite
def stale_batches(draw: st.DrawFn) -> Batch:
    """Batches with ratios on either side of every threshold."""
    batch = draw(batches())
    far = st.sampled_from([math.log(10.0**k) + shift for k in range(-7, 0) for shift in (-0.1, 0.1)])
    for row, logprobs in zip(batch.behaviour, batch.logprobs, strict=True):
        for t in range(len(row)):
            if draw(st.integers(0, 3)) == 0:
                row[t] = logprobs[t] - draw(far)
    return batch


def by_sets(batch: Batch, threshold: float) -> dict[str, float]:
    """Shares at one threshold, token by token."""
    tokens = negative_tokens = negative = with_trigger = 0
    dropped = dict.fromkeys(SCOPES, 0)
    for logprobs, behaviour, a in zip(batch.logprobs, batch.behaviour, batch.advantages, strict=True):
        tokens += len(logprobs)
        if a >= 0 or not logprobs:
            continue
        negative_tokens += len(logprobs)
        negative += 1
        found = {t for t in range(len(logprobs)) if math.exp(logprobs[t] - behaviour[t]) < threshold}
        if found:
            suffix = set(range(min(found) + 1, len(logprobs)))
            sets = (found, suffix, suffix - found, logprobs)
            dropped = {scope: dropped[scope] + len(one) for scope, one in zip(SCOPES, sets, strict=True)}
            with_trigger += 1
    shares = {f"dropped_{scope}": count / tokens for scope, count in dropped.items()} if tokens else {}
    if negative:
        shares |= {"trigger_tokens": dropped["trigger"] / negative_tokens, "trigger_responses": with_trigger / negative}
    return shares


@settings(max_examples=200, deadline=None)
@given(stale_batches(), st.sampled_from(sorted(PRESETS)))
def test_equal_counts_of_tokens_whatever_the_objective(batch: Batch, name: str) -> None:
    found = metrics_of(batch, ObjectiveSection(name=name))
    expected = {f"{key}_{th}": share for th in THRESHOLDS for key, share in by_sets(batch, float(th)).items()}
    assert {name: found[name] for name, _, _ in TRIGGER_METRICS if name in found} == pytest.approx(expected, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(stale_batches(), st.sampled_from(SCOPES), st.sampled_from(THRESHOLDS))
def test_a_recipe_that_takes_the_scope_and_the_threshold_drops_just_that(batch: Batch, scope: str, th: str) -> None:
    found = metrics_of(batch, ObjectiveSection(veto=scope, trigger_ratio=float(th)))
    if "vetoed_fraction" in found:
        assert found[f"dropped_{scope}_{th}"] == found["vetoed_fraction"]
    if "vetoed_responses" in found:
        assert found[f"trigger_responses_{th}"] == found["vetoed_responses"]


@settings(max_examples=100, deadline=None)
@given(stale_batches())
def test_a_higher_threshold_never_means_fewer(batch: Batch) -> None:
    """But for H_κ, which loses the tokens of a suffix that become triggers themselves."""
    found = metrics_of(batch, ObjectiveSection())
    for name in ("trigger_tokens", "trigger_responses", "dropped_trigger", "dropped_suffix", "dropped_response"):
        shares = [found[f"{name}_{th}"] for th in THRESHOLDS if f"{name}_{th}" in found]
        assert shares == sorted(shares, reverse=True)


def test_the_critical_set_may_shrink_with_a_higher_threshold() -> None:
    batch = Batch([[0.0] * 4], [[-math.log(r) for r in (1e-5, 0.05, 1.0, 1.0)]], [-1.0], [])
    found = metrics_of(batch, ObjectiveSection())
    assert (found["dropped_suffix_non_trigger_1e-4"], found["dropped_suffix_non_trigger_1e-1"]) == (3 / 4, 2 / 4)


def test_without_a_negative_response_nothing_is_dropped_and_no_share_of_them_is_told() -> None:
    batch = random_batch(0, [4, 5])
    batch.advantages = [1.0, 0.0]
    found = metrics_of(batch, ObjectiveSection())
    assert all(found[f"dropped_{scope}_{th}"] == 0 for scope in SCOPES for th in THRESHOLDS)
    assert not any(name.startswith("trigger_") for name in found)
