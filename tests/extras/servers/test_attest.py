"""Whether a server samples from the learner's weights, on distributions that are known exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.extras.servers.attest import MOST_DISTANCE, Evidence, Values, ValuesAt, refusal

few = settings(max_examples=8)
VOCABULARY, TOKENS = 100, 1024


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


class Drawn:
    """TOKENS tokens, each from its own distribution of a server, and what server and learner say about them.

    The server has logits `logits + noise` for ids that are `shift` higher, and keeps the `top_k` most likely; the
    learner has `logits`.
    """

    def __init__(
        self,
        seed: int,
        temperature: float = 1.0,
        noise: float = 0.0,
        top_k: int = 0,
        says: str = "drawn",
        shift: int = 0,
    ) -> None:
        random = np.random.default_rng(seed)
        self.logits = random.normal(scale=3.0, size=(TOKENS, VOCABULARY))
        own = np.roll(self.logits, shift, axis=1) + noise * random.normal(size=self.logits.shape)
        kept = own / temperature
        if top_k:
            kept = np.where(kept < np.sort(kept, 1)[:, -top_k, None], -np.inf, kept)
        drawn = log_softmax(kept)
        self.tokens = (drawn + random.gumbel(size=drawn.shape)).argmax(1)
        told = {"drawn": drawn, "raw": log_softmax(own), "before top-k": log_softmax(own / temperature)}[says]
        self.server = told[np.arange(TOKENS), self.tokens].astype(np.float32)

    @property
    def values_at(self) -> ValuesAt:
        def values(temperature: float) -> Values:
            logs = log_softmax(self.logits / temperature)
            entropies = -(np.exp(logs) * logs).sum(1)
            return Values(logs[np.arange(TOKENS), self.tokens].astype(np.float32), entropies.astype(np.float32))

        return values

    def refusal(self, temperature: float = 1.0, dtype: str = "float32") -> str:
        return refusal(Evidence(), self.server, self.values_at, temperature, dtype)


@few
@given(st.integers(0, 2**32), st.sampled_from([0.6, 1.0, 1.3]))
def test_the_learners_own_policy_is_taken(seed: int, temperature: float) -> None:
    assert Drawn(seed, temperature).refusal(temperature) == ""


@few
@given(st.integers(0, 2**32))
def test_rounding_is_taken_where_the_dtype_explains_it(seed: int) -> None:
    rounded = Drawn(seed, noise=0.02)
    assert rounded.refusal(dtype="bfloat16") == ""
    assert "rounding in float32 explains 0.001" in rounded.refusal(dtype="float32")


@few
@given(st.integers(0, 2**32), st.sampled_from([0.25, 0.5, 0.7, 0.8, 1.2, 1.5]))
def test_another_temperature_is_named(seed: int, temperature: float) -> None:
    for dtype in MOST_DISTANCE:
        assert f"temperature {temperature:g} and not 1 fits them" in Drawn(seed, temperature).refusal(dtype=dtype)


@few
@given(st.integers(0, 2**32))
def test_logprobs_before_temperature_are_named(seed: int) -> None:
    why = Drawn(seed, 0.7, says="raw").refusal(0.7)
    assert (
        "those before temperature (vLLM: --logprobs-mode processed_logprobs): temperature 1 fits them, and 0.7" in why
    )


@few
@given(st.integers(0, 2**32))
def test_tokens_drawn_at_temperature_1_are_not_taken_for_logprobs_before_temperature(seed: int) -> None:
    assert Drawn(seed, 1.0).refusal(0.5).endswith("Likely cause: temperature 1 and not 0.5 fits them")


@few
@given(st.integers(0, 2**32))
def test_both_causes_are_named_where_the_tokens_fit_both(seed: int) -> None:
    why = Drawn(seed, 1.0).refusal(0.995)
    assert "temperature 1 and not 0.995 fits them, or its log-probabilities are those before temperature" in why


@few
@given(st.integers(0, 2**32))
def test_a_part_of_the_vocabulary_is_named(seed: int) -> None:
    assert "it draws from a part of the vocabulary" in Drawn(seed, top_k=10).refusal()


@few
@given(st.integers(0, 2**32), st.sampled_from([{"top_k": 10}, {"temperature": 0.6}, {"temperature": 1.5}]))
def test_a_server_that_draws_otherwise_than_it_says_is_found(seed: int, how: dict[str, float]) -> None:
    """Its log-probabilities are the learner's to the last bit."""
    drawn = Drawn(seed, **how, says="raw")  # type: ignore[arg-type]
    expected = "less likely" if how.get("temperature", 0.0) > 1 else "more likely"
    for dtype in MOST_DISTANCE:
        assert f"its tokens are {expected} under the learner" in drawn.refusal(dtype=dtype)


@few
@given(st.integers(0, 2**32), st.integers(1, 50))
def test_ids_that_mean_other_tokens_are_named(seed: int, shift: int) -> None:
    """Also by a server that is so sure of its tokens that none of its log-probabilities is below the learner's."""
    for temperature in (1.0, 0.2):
        assert "ids of another tokenizer" in Drawn(seed, temperature, shift=shift).refusal()


@few
@given(st.integers(0, 2**32), st.sampled_from([0.5, 1.0, 3.0]))
def test_other_weights_are_found_in_every_dtype(seed: int, noise: float) -> None:
    for dtype in MOST_DISTANCE:
        why = Drawn(seed, noise=noise).refusal(dtype=dtype)
        assert "differ from the learner's by" in why
        assert "weights" in why


def test_what_no_learner_can_score_is_refused() -> None:
    nothing = np.full(3, -np.inf, dtype=np.float32)
    why = refusal(Evidence(), np.zeros(3, np.float32), lambda t: Values(nothing, np.zeros(3)), 1.0, "float32")
    assert "no finite log-probability" in why


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_evidence_adds_up(lengths: list[int]) -> None:
    """Looking at parts gives what looking at all gives."""
    random, parts = np.random.default_rng(0), Evidence()
    count = sum(lengths)
    server, logprobs, entropies = -random.random((3, count)).astype(np.float32)
    for end, length in zip(np.cumsum(lengths).tolist(), lengths, strict=True):
        part = slice(end - length, end)
        parts = parts.with_tokens(server[part], Values(logprobs[part], -entropies[part]))
    whole = Evidence().with_tokens(server, Values(logprobs, -entropies))
    assert parts.tokens == whole.tokens == count
    for name in ("distance", "largest", "signed", "surprise", "surprise_squares"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name))
