from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.calls import FIRST, WINDOW, FailureCount


@given(st.lists(st.booleans(), max_size=400), st.sampled_from([0.0, 0.01, 0.05, 0.5, 1.0]))
def test_the_share_of_failures_that_is_allowed(failed: list[bool], share: float) -> None:
    count = FailureCount(RewardSection(max_failure_share=share))
    for place, one in enumerate(failed, start=1):
        if one and sum(failed[:place]) > share * max(place, FIRST):
            with pytest.raises(UserError, match=f"failed on {sum(failed[:place])} of the latest {place} responses"):
                count.add(one, "why", "response", "gold")
            break
        count.add(one, "why", "response", "gold")


def test_a_function_that_breaks_late_is_noticed() -> None:
    count = FailureCount(RewardSection())
    for _ in range(3 * WINDOW):
        count.add(False, "", "", "")
    for _ in range(WINDOW // 100):
        count.add(True, "", "", "")
    with pytest.raises(UserError, match=f"failed on 101 of the latest {WINDOW} responses"):
        count.add(True, "", "", "")
