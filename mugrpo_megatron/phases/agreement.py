"""Checks, before anything is generated, that engine and learner give the same log-probabilities to a few texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from mugrpo_megatron.checks.agreement import agreement, bound, disagreement
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.wire import Request, Sampling
from mugrpo_megatron.errors import TrainingFailure
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.update import token_logprobs
from mugrpo_megatron.run.engines import Engines
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.samples import Sample

TEXTS = 8
TEXT_TOKENS = 1024
"""The largest number of tokens of a text: enough to see wrong rotary positions, in a pass of seconds at most."""


@dataclass(frozen=True)
class Expected:
    """Texts, and the learner's log-probabilities of them, which the engines have to reproduce.

    A text's first token has no log-probability.
    """

    texts: list[np.ndarray]
    """int32 [n] each, the same on every rank."""
    logprobs: list[np.ndarray]
    """float32 [n - 1] each, at temperature 1."""
    unread: tuple[str, ...]
    """Fields of config.json that were taken to be without effect (`Architecture.unread`). If engine and learner
    disagree, one of them may be the cause."""


def expected_logprobs(run: Run, learner: Learner, engines: Engines) -> Expected | None:
    """Compute the learner's log-probabilities of a few texts, while the learner has the devices. Collective.

    Returns None if this process has already found all engines to agree with the learner, or if there are no prompts to
    make texts of. The learner's pass comes before the engines wake: otherwise they would have to sleep again for it.
    """
    if engines.agreed:
        return None
    recipe, prompts = run.recipe, engines.leader.problems.train.prompts if engines.leader else []
    longest = min(TEXT_TOKENS, recipe.longest_training_sequence)
    mine = texts_of(prompts, max(TEXTS, learner.ranks.dp_size), longest)
    texts = run.world.broadcast(mine)  # rank 0 leads an engine if any rank does, and so has the prompts
    if not texts:
        return None
    logprobs = token_logprobs(learner, [_sample(text) for text in texts], temperature=1.0)
    return Expected(texts, logprobs, learner.architecture.unread)


def _sample(text: np.ndarray) -> Sample:
    """The text as a sample whose prompt is its first token and whose response is the rest."""
    missing = np.full(len(text) - 1, np.nan, dtype=np.float32)
    return Sample(0, "", text[:1], text[1:], missing, 0.0, 0, "length")


def texts_of(prompts: Sequence[Sequence[int]], count: int, length: int) -> list[np.ndarray]:
    """Make `count` texts of `length` tokens each, int32, from the prompts, one after another and repeated as needed.

    Returns no texts if there are no prompts.
    """
    if not any(prompts):
        return []
    tokens = islice(cycle(token for prompt in prompts for token in prompt), count * length)
    return [*np.fromiter(tokens, dtype=np.int32, count=count * length).reshape(count, length)]


def check_agreement(run: Run, engines: Engines, expected: Expected | None) -> dict[str, float]:
    """Compare every engine's log-probabilities with the learner's; returns the metric `texts_mismatch`. Collective.

    Returns {} if `expected` is None or no engine answered. Raises TrainingFailure on every rank when the
    log-probabilities of engine and learner are further apart than rounding explains. If an engine fails here, all
    engines are compared again once it has been restarted.
    """
    if expected is None:
        return {}
    leader, found = engines.leader, None
    if leader and leader.engine.running:
        with leader.guarded():
            found = agreement(score(leader.engine, expected.texts), expected.logprobs)
    every = run.world.gather(found)
    answers = [one for one in every if one is not None]
    recipe = run.recipe
    fp8 = recipe.engine.quantization == "fp8" or recipe.learner.fp8 != "none"
    for one in answers:
        if sentence := disagreement(one, bound(recipe.model.dtype, fp8), expected.unread):
            raise TrainingFailure(f"{sentence}. Nothing was generated")
    engines.agreed = len(answers) == run.world.engines
    return {"texts_mismatch": max(one.mean for one in answers)} if answers else {}


def score(engine: Engine, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The engine's log-probabilities float32 [n - 1] of all but the first token of each text, at temperature 1."""
    requests = [Request(key, text.tolist(), 1, logprob_tokens=len(text) - 1) for key, text in enumerate(texts)]
    found: dict[int, np.ndarray] = {}
    with engine.generation(Sampling(temperature=1.0, top_p=1.0, max_tokens=1, stop_ids=())):
        engine.submit(requests)
        while len(found) < len(texts):
            found |= {key: responses[0].logprobs for key, responses in engine.receive_groups()}
    return [found[key] for key in range(len(texts))]
