"""Finds golds and tests that no response can satisfy, before a run starts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from mugrpo_megatron.recipe.scoring import CODE, HAS_TESTS, MATH, RewardSection
from mugrpo_megatron.rewards.items import prompt_of_problem
from mugrpo_megatron.rewards.math.extract import is_integer
from mugrpo_megatron.rewards.math.literal import MOST_ANSWER_CHARS
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.samples import Problem

EXCERPT_CHARS = 60
"""Most characters of a gold that a line of output quotes."""
_NO_ANSWER = re.compile(
    r"proof(?: (?:needed|required|omitted|problem|only|by \w+))?"
    r"|(?:see|refer to) (?:the )?(?:proof|solution|explanation)"
    r"|(?:answer )?not ?(?:found|available|applicable|given|provided|specified)|no ?(?:answer|final answer|solution) "
    r"(?:found|available|given|provided)|no answer|n\s*/\s*a"
    r"|nan|null|tbd|todo|missing|unknown answer|\?+|-+|\[\s*\]|\{\s*\}"
    r"|proved|to be proved|q\.?e\.?d|证明(?:略|题|见解析)?|略|见解析|無解答|解答なし",
    re.IGNORECASE,
)
"""Matches what published sets write in the place of an answer that does not exist, such as NuminaMath's `proof`."""
_AROUND = re.compile(r"\\(?:text[a-z]*|mathrm|boxed|mbox)\s*\{|[{}$*_`\"'().。.]|<[^<>]*>")
CHECKS = {
    MATH: "mugrpo_megatron.rewards.math.gold:verifies_itself",
    CODE: HAS_TESTS,
}
"""Built-in function -> a reward function that is 1 if a gold is usable (`math`), or a row's tests are (`code`)."""


def unusable_golds(problems: Sequence[Problem], section: RewardSection) -> dict[str, str]:
    """Find the problems that `math` or `code` cannot score: id of a problem -> the sentence `id: reason`."""
    reasons: dict[str, str] = {}
    for function, check in CHECKS.items():
        names = {name for name, entry in section.table.items() if entry.function == function}
        doubtful = [
            problem
            for problem in problems
            if names.intersection(section.functions_of(problem.data_source))
            and not (function == MATH and is_integer(problem.answer))
        ]
        if function == MATH:
            without = [problem for problem in doubtful if says_there_is_none(problem.answer)]
            reasons |= {
                problem.id: f"{problem.id}: the gold {problem.answer[:40]!r} is no answer, but says that there is none"
                for problem in without
            }
            doubtful = [problem for problem in doubtful if problem.id not in reasons]
        if not doubtful:
            continue
        # Golds are checked in workers, which have limits, because a parser can hang on a gold as it can on an answer.
        checking = {"function": check, "functions": {}, "max_failure_share": 1.0}
        with Verifier(section.model_copy(update=checking)) as verifier:
            answers = [problem.answer for problem in doubtful]
            golds = answers if function == MATH else [problem.gold for problem in doubtful]
            scores = verifier.score(answers, golds, [problem.row for problem in doubtful])
        for problem, score in zip(doubtful, scores, strict=True):
            if score.reward != 1.0:
                why = f"the answer {problem.answer[:80]!r} does not verify against itself"
                if len(problem.answer) > 80:
                    why += f": it has {len(problem.answer):,} characters; `math` compares at most {MOST_ANSWER_CHARS:,}"
                reasons[problem.id] = f"{problem.id}: {why if function == MATH else score.why}"
    return reasons


def says_there_is_none(gold: str) -> bool:
    """Whether a gold says that there is no answer: `proof`, `notfound`, `N/A`."""
    text = " ".join(_AROUND.sub(" ", gold).split()) or gold.strip()
    return _NO_ANSWER.fullmatch(text) is not None


def scores_of_golds(problems: Sequence[Problem], section: RewardSection) -> Iterator[str]:
    """Yield a line for each reward function: the reward for the gold of a problem, given as the response.

    The problem is the first that the function scores; for `math` the gold is put into a box. `code`, judges and a
    function that scores none of the problems have no line. Raises UserError for a function that cannot be loaded, whose
    parameters have no known form, or that fails although `reward.max_failure_share` does not allow it.
    """
    for name, entry in section.table.items():
        if entry.function == CODE:  # for `code` a gold is a list of tests, not a program that could be scored
            continue
        problem = next((row for row in problems if name in section.functions_of(row.data_source)), None)
        if problem is None:
            continue
        gold = problem.gold if isinstance(problem.gold, str) else json.dumps(problem.gold, ensure_ascii=False)
        response = f"\\boxed{{{problem.answer}}}" if entry.function == MATH else gold
        single = {"functions": {name: entry} if section.functions else {}, "workers": 1}
        with Verifier(section.model_copy(update=single)) as verifier:
            [score] = verifier.score(
                [response],
                [problem.gold],
                [problem.row],
                [prompt_of_problem(problem)],
                answers=[problem.answer],
                sources=[problem.data_source],
            )
        reward = f"{score.components[name]:g}" if name in score.components else "nothing"
        why = f" ({score.why})" if score.why not in ("", entry.function) else ""
        yield f"{entry.function} gives {reward} to the gold of {problem.id} as the response, {_excerpt(response)}{why}"


def _excerpt(text: str) -> str:
    return repr(text) if len(text) <= EXCERPT_CHARS else f"{text[:EXCERPT_CHARS]!r}..."
