"""Reward files of other trainers, and several functions at once, in the verifier's workers."""

from __future__ import annotations

import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.pool import Verifier
from tests.rewards.functions import parity
from tests.rewards.patience import patient as patient

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("patient")]

OWN = "tests.rewards.functions"
FOREIGN = "tests.rewards.foreign"


def section(**functions: dict[str, object]) -> RewardSection:
    return RewardSection.model_validate(
        {"workers": 1, "timeout_s": 1.0, "max_failure_share": 1.0, "functions": functions}
    )


def test_files_of_other_trainers_run_unchanged_side_by_side() -> None:
    recipe = section(
        right={"function": f"{FOREIGN}.trl_rewards:correctness", "weight": 0.5},
        short={"function": f"{FOREIGN}.trl_rewards:brevity"},
        alike={"function": f"{FOREIGN}.trl_rewards:agreement", "weight": 0},
        score={"function": f"{FOREIGN}.verl_reward:compute_score", "sources": ["sums"]},
        label={"function": f"{FOREIGN}.slime_reward:reward", "weight": -1},
    )
    rows = [{"extra_info": {"level": "easy"}, "metadata": {"bonus": 0.25}}] * 4
    chat = [{"role": "user", "content": "2+2?"}]
    with Verifier(recipe) as verifier:
        scores = verifier.score(
            ["4", "4", "=4", "5"],
            ["4"] * 4,
            rows,
            ["2+2=", "2+2=", chat, chat],
            sources=["sums", "sums", "sums", "other"],
            ids=[[1], [1], [1, 2], [1]],
        )
    assert scores[0].components == {
        "right": 2.0, "short": -0.1, "short.longest": 2.0, "alike": 0.5, "score": 1.0, "score.acc": 1.0, "label": 1.25,
    }  # fmt: skip
    assert scores[0].reward == pytest.approx(0.5 * 2 - 0.1 + 1.0 - 1.25)
    assert [score.extracted for score in scores] == ["4", "4", "4", ""]
    assert "score" not in scores[3].components, "another data source"
    assert scores[3].reward == pytest.approx(0.0 - 0.1 - 0.25)


def test_a_gold_reaches_functions_as_the_data_has_it() -> None:
    golds: list[object] = [["assert f(1) == 2", "#### no answer"], {"inputs": ["1\n"]}, 7, "a # b #### c", None]
    rows = [{"gold": gold, "other": [1, {"a": None}]} for gold in golds]
    with Verifier(RewardSection(function=f"{OWN}:gold_is_in_row", workers=1)) as verifier:
        scores = verifier.score(["x"] * len(golds), golds, rows, answers=["4"] * len(golds))
    assert [score.reward for score in scores] == [1.0] * len(golds)


def test_a_group_is_one_call_and_a_call_that_fails_costs_its_group() -> None:
    with Verifier(section(own={"function": f"{OWN}:behave_together"})) as verifier:
        groups = [["1", "2", "3"], ["1", "hang in C", "3"], ["raise"], ["die", "1"], ["4", "5"]]
        pending = [verifier.submit(group, [""] * len(group)) for group in groups]
        found = [[score.reward for score in one.result()] for one in pending]
        whys = [one.result()[-1].why for one in pending]
    assert found == [[3.0] * 3, [0.0] * 3, [0.0], [0.0] * 2, [2.0] * 2]
    assert whys[1] == "killed after 3 s", "three responses have three times the limit"
    assert whys[2].startswith("failed: RuntimeError: no (functions.py:")
    assert whys[3].startswith("the worker died (exit code 3)")


def test_a_function_that_hangs_or_fails_costs_its_own_part() -> None:
    recipe = section(
        slow={"function": f"{OWN}:behave", "timeout_s": 0.5},
        steady={"function": f"{OWN}:parity"},
        math={"function": "math", "weight": 3},
    )
    responses = ["1", "hang in C", "raise", "2"]
    with Verifier(recipe) as verifier:
        scores = verifier.score(responses, ["0", "0", "0", "2"])
    assert [score.components["slow"] for score in scores] == [1.0, 0.0, 0.0, 4.0]
    assert [score.components["steady"] for score in scores] == [parity(one, "") for one in responses]
    assert [score.components["math"] for score in scores] == [0.0, 0.0, 0.0, 1.0]
    assert "slow: killed after 0.5 s" in scores[1].why
    assert scores[3].extracted == "2"


def test_failures_are_counted_by_function() -> None:
    recipe = section(good={"function": f"{OWN}:parity"}, bad={"function": f"{OWN}:behave"})
    strict = recipe.model_copy(update={"max_failure_share": 0.01})
    with (
        Verifier(strict) as verifier,
        pytest.raises(UserError, match=r"reward.functions.bad '.*behave' failed on 1 of the latest"),
    ):
        verifier.score(["1", "raise"], ["0"] * 2)


def test_an_async_function_is_given_up_its_worker_replaced_and_what_it_raises_is_its_failure() -> None:
    with Verifier(section(own={"function": f"{OWN}:judge"})) as verifier:
        first = verifier.score(["1", "wait", "3"], [""] * 3)
        assert [score.reward for score in first] == [1.0, 0.0, 3.0]
        assert first[1].why == f"{OWN}:judge was cancelled after 0.875 s: make it faster, or raise its timeout_s"
        assert verifier.score(["spin"], [""])[0].why.startswith("gave up after")
        for order, kind in (("interrupt", "KeyboardInterrupt"), ("cancel", "CancelledError")):
            assert verifier.score([order], [""])[0].why.startswith(f"failed: {kind}: ")
        assert verifier.score(["4", "5"], [""] * 2)[1].reward == 5.0


def test_what_cannot_be_called_is_found_at_the_start() -> None:
    with (
        pytest.raises(UserError, match="cannot be loaded: it is 7, not a function"),
        Verifier(RewardSection(function=f"{OWN}:NUMBER", workers=1)),
    ):
        pass
