"""Several verdicts on a response are one score."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.rewards.items import Pending, Score, Verdict
from mugrpo_megatron.rewards.pool import VerdictCollector, combined

NUMBERS = st.floats(-1e6, 1e6)


@given(st.dictionaries(st.sampled_from("abc"), st.tuples(st.none() | NUMBERS, NUMBERS), min_size=1))
def test_the_reward_is_the_weighted_sum_of_those_that_apply(given: dict[str, tuple[float | None, float]]) -> None:
    verdicts = {name: Verdict(reward, "", name) for name, (reward, _) in given.items()}
    score = combined(verdicts, {name: weight for name, (_, weight) in given.items()})
    applying = {name: reward for name, (reward, _) in given.items() if reward is not None}
    assert score.components == applying, "before weights"
    assert score.reward == pytest.approx(sum(given[name][1] * reward for name, reward in applying.items()))


def test_one_function_alone_speaks_for_itself() -> None:
    score = combined({"math": Verdict(1.0, "7", "equal", 0.5)}, {"math": 1.0})
    assert score == Score(1.0, "7", "equal", 0.5, {"math": 1.0})


def test_several_are_told_by_name() -> None:
    verdicts = {"own": Verdict(2.0, "", "my:own", 0.25, parts={"acc": 1.0}), "math": Verdict(0.0, "7", "differs", 0.5)}
    score = combined(verdicts, {"own": 0.5, "math": 1.0})
    assert (score.reward, score.extracted, score.seconds) == (1.0, "7", 0.75)
    assert score.why == "own: my:own; math: differs"
    assert score.components == {"own": 2.0, "own.acc": 1.0, "math": 0.0}


def test_verdicts_come_in_any_order_from_any_thread() -> None:
    names = [("a", "b", "c") if place % 2 else ("b",) for place in range(200)]
    pending = Pending[Score](len(names))
    collector = VerdictCollector(pending, {"a": 1.0, "b": 10.0, "c": 100.0}, names)
    puts = [(name, place) for place, own in enumerate(names) for name in own]
    random.Random(0).shuffle(puts)

    def put(part: list[tuple[str, int]]) -> None:
        for name, place in part:
            collector.put(name, place, Verdict(float(place), "", name))

    threads = [threading.Thread(target=put, args=(puts[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    scores = pending.result(0.0)
    assert [score.reward for score in scores] == [place * (111.0 if place % 2 else 10.0) for place in range(200)]
    assert [tuple(score.components) for score in scores] == names


def test_a_score_is_missing_where_nothing_applies_or_a_weighted_function_failed() -> None:
    skipped, failed, right = Verdict(None, "", ""), Verdict(0.0, "", "", failed=True), Verdict(1.0, "", "")
    weights = {"own": 0.5, "other": 1.0, "shown": 0.0}
    assert combined({"own": skipped}, weights).missing
    assert combined({"own": failed}, weights).missing
    assert combined({"own": skipped, "other": skipped}, weights).missing
    assert combined({"own": right, "other": failed}, weights).missing
    assert not combined({"own": skipped, "other": right}, weights).missing
    assert not combined({"own": right, "shown": failed}, weights).missing
    assert not combined({"shown": failed}, weights).missing
