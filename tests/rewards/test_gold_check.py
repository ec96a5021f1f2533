from __future__ import annotations

import pytest

from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.gold_check import unusable_golds
from mugrpo_megatron.samples import Problem


@pytest.mark.process
def test_golds_that_cannot_be_verified_are_named_one_by_one() -> None:
    """Also those that hang the parser: they are no failure of a user's function, which would end the run."""
    golds = ["7", "x+1", "((9!)!)!", "\\boxed{}", "\\frac{1}{2}", "\\prod_{k=1}^{10000000} k", "1,-2"]
    problems = [Problem(f"set.jsonl:{line}", "q", gold, "set") for line, gold in enumerate(golds, start=1)]
    found = unusable_golds(problems, RewardSection(workers=1, timeout_s=4.0))
    assert sorted(found) == ["set.jsonl:3", "set.jsonl:4", "set.jsonl:6"]
    assert found["set.jsonl:3"] == "set.jsonl:3: the answer '((9!)!)!' does not verify against itself"
