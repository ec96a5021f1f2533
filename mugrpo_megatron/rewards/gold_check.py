"""Finds problems that no response can solve, before a run depends on them: golds and tests that cannot be used."""

from __future__ import annotations

from collections.abc import Sequence

from mugrpo_megatron.recipe.scoring import CODE, MATH, RewardSection
from mugrpo_megatron.rewards.math.extract import is_integer
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.samples import Problem

CHECKS = {
    MATH: "mugrpo_megatron.rewards.math.gold:verifies_itself",
    CODE: "mugrpo_megatron.extras.sandbox.row_tests:usable",
}
"""Built-in function -> a reward function that gives 1 where a gold, or a row with tests, can be used."""


def unusable_golds(problems: Sequence[Problem], section: RewardSection) -> dict[str, str]:
    """Id of every problem that `math` or `code` cannot score -> one sentence (file:line: reason).

    Runs in the verifier's workers, because a gold can hang a parser just as an answer can.
    """
    reasons: dict[str, str] = {}
    for function, check in CHECKS.items():
        names = {name for name, one in section.table.items() if one.function == function}
        doubtful = [
            problem
            for problem in problems
            if names.intersection(section.functions_of(problem.data_source))
            and not (function == MATH and is_integer(problem.answer))
        ]
        if not doubtful:
            continue
        checking = {"function": check, "functions": {}, "max_failure_share": 1.0, "format_weight": 0.0}
        with Verifier(section.model_copy(update=checking)) as verifier:
            answers = [problem.answer for problem in doubtful]
            rows = [problem.row for problem in doubtful]
            scores = verifier.score(answers, [_gold(problem, function) for problem in doubtful], rows)
        for problem, score in zip(doubtful, scores, strict=True):
            if score.reward != 1.0:
                why = f"the answer {problem.answer[:80]!r} does not verify against itself"
                reasons[problem.id] = f"{problem.id}: {why if function == MATH else score.why}"
    return reasons


def _gold(problem: Problem, function: str) -> object:
    return problem.answer if function == MATH else problem.gold
