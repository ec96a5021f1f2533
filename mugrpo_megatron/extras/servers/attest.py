"""Tests whether a server samples from the learner's weights, by the tokens and log-probabilities that it returns.

*Distance* is the mean of |server - learner| of the log-probabilities; it may not exceed what rounding in the model's
dtype explains. *Surprise* is the mean of -logprob - entropy, both under the learner. If a token is drawn from the
learner's policy, its -logprob - entropy has expectation 0, given the tokens before, so the sum of the squares of these
values estimates the variance of their sum. A server that draws from a part of the vocabulary, or at another
temperature, has another surprise, whatever log-probabilities it returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MOST_DISTANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""dtype -> nats: the largest mean of |server - learner| that is accepted (docs/servers.md)."""
# In bfloat16 and float16, MOST_DISTANCE is lower than `checks.agreement.BOUNDS`, the bound for a run's own engines.
# Their weights are known to be the learner's, and rounding alone must not end a run. A server's weights are not known,
# and quantised ones would pass a higher bound.
MOST_SURPRISE = 6.0
"""Largest mean surprise that is accepted, up or down, in its standard errors; chance exceeds it once in 500 million
checks."""
LEAST_SURPRISE = 0.02
"""Mean surprise in nats, up or down, up to which a server is accepted however small the standard error is: an engine
that rounds differently draws slightly other tokens."""
TEMPERATURES = (0.0625, 0.125, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 2.0)
"""Temperatures at which the learner's values are computed when the distance is too large: the server may sample at one
of them."""
CLEARLY = 2.0
"""Standard errors of surprise by which the tokens have to fit one of two temperatures better, so that it is named
alone."""
NEIGHBOUR = 0.35
"""Distance in nats below which the server probably has the model's weights, but quantised or a stage older."""


class Values(NamedTuple):
    """The learner's log-probabilities and entropies of the tokens that are compared."""

    logprobs: np.ndarray
    """float32 [T]: log-probabilities of the tokens."""
    entropies: np.ndarray
    """float32 [T]: nats, of the distribution that each token is drawn from."""


ValuesAt = Callable[[float], Values]
"""(temperature) -> the learner's values of the tokens that are compared."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Sums over the tokens of one server that were compared so far."""

    tokens: int = 0
    distance: float = 0.0
    """Sum of |server - learner|."""
    largest: float = 0.0
    signed: float = 0.0
    """Sum of server - learner."""
    surprise: float = 0.0
    """Sum over the tokens of -logprob - entropy, both under the learner."""
    surprise_squares: float = 0.0

    def with_tokens(self, server: np.ndarray, learner: Values) -> Evidence:
        """The sums with T further tokens; `server`, float32 [T], are the server's log-probabilities of them."""
        difference = server.astype(np.float64) - learner.logprobs
        surprise = -learner.logprobs.astype(np.float64) - learner.entropies
        return Evidence(
            self.tokens + len(difference),
            self.distance + float(np.abs(difference).sum()),
            max(self.largest, float(np.abs(difference).max(initial=0.0))),
            self.signed + float(difference.sum()),
            self.surprise + float(surprise.sum()),
            self.surprise_squares + float((surprise**2).sum()),
        )

    @property
    def mean_distance(self) -> float:
        return self.distance / max(1, self.tokens)

    @property
    def mean_surprise(self) -> float:
        return self.surprise / max(1, self.tokens)

    @property
    def surprise_errors(self) -> float:
        """Mean surprise, in standard errors of that mean."""
        return self.surprise / math.sqrt(self.surprise_squares) if self.surprise_squares else 0.0


def refusal(before: Evidence, server: np.ndarray, values_at: ValuesAt, temperature: float, dtype: str) -> str:
    """Reason why the server's tokens cannot have been sampled from the learner's policy; empty if nothing speaks
    against it.

    Args:
        before: sums over the server's earlier tokens under these weights.
        server: float32 [T], the server's log-probabilities of the tokens.
        values_at: gives the learner's values of the same tokens at a temperature.
        temperature: the rollout's.
        dtype: of the learner's weights, a key of MOST_DISTANCE.
    """
    learner = values_at(temperature)
    now = Evidence().with_tokens(server, learner)
    if not math.isfinite(now.distance):
        return "the learner gives its tokens no finite log-probability"
    bound = MOST_DISTANCE[dtype]
    if now.mean_distance > bound:
        found = f"its log-probabilities differ from the learner's by {now.mean_distance:.3g} nats a token"
        found += f" (at most {now.largest:.3g}), and rounding in {dtype} explains {bound:g}"
        return f"{found}. Likely cause: {_cause(server, learner, values_at, temperature, now, bound)}"
    all_of_it = before.with_tokens(server, learner)
    if abs(all_of_it.surprise_errors) > MOST_SURPRISE and abs(all_of_it.mean_surprise) > LEAST_SURPRISE:
        kind = "less likely" if all_of_it.surprise > 0 else "more likely"
        return (
            f"its tokens are {kind} under the learner than tokens drawn from it by {abs(all_of_it.mean_surprise):.3g} "
            f"nats a token, {abs(all_of_it.surprise_errors):.0f} standard errors over {all_of_it.tokens:,} tokens. "
            "Likely cause: it draws at another temperature or from a part of the vocabulary (top-k, top-p, min-p, a "
            "penalty, a grammar), and returns log-probabilities from before these settings"
        )
    return ""


def _cause(
    server: np.ndarray, learner: Values, values_at: ValuesAt, temperature: float, now: Evidence, bound: float
) -> str:
    """The likely cause of a distance beyond rounding."""
    distances = {t: _distance(server, values_at(t)) for t in TEMPERATURES if t != temperature}
    best = min(distances, key=distances.__getitem__)
    if distances[best] <= max(bound, 0.25 * now.mean_distance):
        return _temperature_cause(temperature, learner, best, values_at(best))
    # Tested before the next cause, which looks the same: a server with another model, too, has no log-probability below
    # the learner's.
    uniform = -float(learner.entropies.max(initial=1.0)) - 1.0
    if learner.logprobs.mean() < min(-8.0, uniform):
        return "ids of another tokenizer, or another model: the learner would never draw these tokens"
    difference = server.astype(np.float64) - learner.logprobs
    if np.quantile(difference, 0.02) > -bound and difference.mean() > bound:
        return (
            "it draws from a part of the vocabulary (top-k, top-p or min-p of its own), since no log-probability is "
            "below the learner's"
        )
    if now.mean_distance < NEIGHBOUR:
        return "quantised weights or another dtype (vLLM, SGLang: --dtype), or an earlier checkpoint of the run"
    return "other weights than those of the stage, or quantised ones"


def _temperature_cause(asked: float, learner: Values, best: float, at_best: Values) -> str:
    """The likely cause where the log-probabilities fit temperature `best` and not the one that was `asked` for."""
    another = f"temperature {best:g} and not {asked:g} fits them"
    raw = "its log-probabilities are those before temperature (vLLM: --logprobs-mode processed_logprobs)"
    if best != 1.0:
        return another
    # The tokens tell the two causes apart: a server that returns log-probabilities from before temperature still draws
    # at the temperature that was asked for.
    drawn_as_asked, drawn_at_best = (
        abs(Evidence().with_tokens(values.logprobs, values).surprise_errors) for values in (learner, at_best)
    )
    if drawn_as_asked + CLEARLY < drawn_at_best:
        return f"{raw}: temperature 1 fits them, and {asked:g} fits its tokens"
    if drawn_at_best + CLEARLY < drawn_as_asked:
        return another
    return f"{another}, or {raw}"


def _distance(server: np.ndarray, learner: Values) -> float:
    return float(np.abs(server.astype(np.float64) - learner.logprobs).mean())


def figures(evidence: Evidence) -> dict[str, float]:
    """The evidence as means and counts, to be shown to people."""
    return {
        "tokens": float(evidence.tokens),
        "distance_mean": evidence.mean_distance,
        "distance_max": evidence.largest,
        "difference_mean": evidence.signed / max(1, evidence.tokens),
        "surprise_mean": evidence.mean_surprise,
        "surprise_errors": evidence.surprise_errors,
    }
