"""Finds golds that no response can match, before a run depends on them."""

from __future__ import annotations

from collections.abc import Sequence

from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.math.extract import is_integer
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.samples import Problem

SELF_CHECK = "mugrpo_megatron.rewards.math.gold:verifies_itself"


def unusable_golds(problems: Sequence[Problem], section: RewardSection) -> dict[str, str]:
    """Id of every problem whose gold does not verify against itself -> one sentence (file:line: reason).

    Runs in the verifier's workers, because a gold can hang a parser just as an answer can.
    """
    doubtful = [problem for problem in problems if not is_integer(problem.answer)]
    if not doubtful:
        return {}
    checking = {"function": SELF_CHECK, "functions": {}, "max_failure_share": 1.0, "format_weight": 0.0}
    with Verifier(section.model_copy(update=checking)) as verifier:
        scores = verifier.score([problem.answer for problem in doubtful], [problem.answer for problem in doubtful])
    return {
        problem.id: f"{problem.id}: the answer {problem.answer[:80]!r} does not verify against itself"
        for problem, score in zip(doubtful, scores, strict=True)
        if score.reward != 1.0
    }
