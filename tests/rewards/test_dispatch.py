"""Workers that die or stop while a batch goes to them: every call ends, and only what no worker can hold fails."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards import dispatch
from mugrpo_megatron.rewards.calls import MEMORY_SHARE
from mugrpo_megatron.rewards.pool import Verifier

MB = 1 << 20


@dataclass
class Plan:
    """What the workers of a test do, and what became of them."""

    holds: int = 1 << 40
    """Bytes of a batch; a worker dies on a larger one."""
    in_send: bool = False
    """Whether it does so while the batch is sent, else before it says that it has read it."""
    dies_on: frozenset[str] = frozenset()
    """Responses that end it."""
    send_s: float = 0.0
    """Seconds that sending takes, by a clock that `ahead` sets forward."""
    idle_deaths: int = 0
    """Workers that die as soon as they are ready."""
    ahead: float = 0.0
    batches: list[int] = field(default_factory=list)
    """The bytes of each."""
    started: int = 0

    def start(self, *_: object) -> Worker:
        self.started += 1
        return Worker(self)


class Worker:
    """Stands for `calls.WorkerProcess`: a worker without a process, which answers at once; every reward is 1."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.connection: Connection
        self.connection, self._own = Pipe()
        self._tell({"needs": [1, True, False, False], "note": ""})
        if plan.started <= plan.idle_deaths:
            self._own.close()

    def send(self, message: bytes) -> None:
        plan = self._plan
        plan.ahead += plan.send_s
        plan.batches.append(len(message))
        if len(message) > plan.holds:
            self._own.close()
            if plan.in_send:
                raise BrokenPipeError
            return
        self._tell({"read": True})
        for [call] in json.loads(message)["calls"]:
            if call[0] in plan.dies_on:
                self._own.close()
                return
            self._tell({"verdicts": [[1.0, "", ""]], "retires": False})

    def receive(self) -> Any:
        return json.loads(self.connection.recv_bytes())

    def _tell(self, what: object) -> None:
        self._own.send_bytes(json.dumps(what).encode())

    def end(self) -> None:
        pass

    def kill(self) -> None:
        self._own.close()
        self.connection.close()

    def exit_status(self) -> str:
        return "exit code 1"


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    plan = Plan()
    monkeypatch.setattr(dispatch, "start_worker", plan.start)
    return plan


def section(**settings: object) -> RewardSection:
    small = {"worker_memory_mb": 64, "max_failure_share": 1.0}
    return RewardSection.model_validate({"function": "own:judge", "workers": 1, **small, **settings})


def rows(*sizes: int) -> list[dict[str, Any]]:
    return [{"number": number, "tests": "x" * size} for number, size in enumerate(sizes)]


@pytest.mark.parametrize("in_send", [True, False])
@pytest.mark.parametrize("function", ["own:judge", "code"])
def test_a_row_that_no_worker_holds_fails_and_costs_no_other(plan: Plan, in_send: bool, function: str) -> None:
    plan.holds, plan.in_send = 2 * MB, in_send
    with Verifier(section(function=function)) as pool:
        scores = pool.score(["a", "b", "c"], ["g"] * 3, rows(10, 3 * MB, 10))
    assert [score.reward for score in scores] == [1.0, 0.0, 1.0]
    assert scores[1].why == "no room for its 3.0 MiB in a worker (raise worker_memory_mb, now 64)"
    assert plan.started <= 4


@pytest.mark.parametrize("function", ["own:judge", "code"])
def test_such_a_row_ends_the_command_unless_failures_are_allowed(plan: Plan, function: str) -> None:
    """Of `code` too: the row is to blame, and not the program."""
    plan.holds = MB
    with (
        Verifier(section(function=function, max_failure_share=0.01)) as pool,
        pytest.raises(
            UserError,
            match=r"failed on 1 of .* no room for its 2.0 MiB in a worker .*'a' and the gold 'g': fix",
        ),
    ):
        pool.score(["a"], ["g"], rows(2 * MB))


def test_large_rows_go_to_a_worker_one_by_one(plan: Plan) -> None:
    with Verifier(section()) as pool:
        scores = pool.score([str(n) for n in range(16)], ["g"] * 16, rows(*[MB] * 4, *[10] * 12))
    assert [score.reward for score in scores] == [1.0] * 16
    assert len(plan.batches) == 5
    assert max(plan.batches[:4]) < 2 * MB


@pytest.mark.parametrize("in_send", [True, False])
def test_a_batch_that_is_too_much_together_is_no_call_s_fault(plan: Plan, in_send: bool) -> None:
    """Each fits alone: the workers have less memory than one would think."""
    plan.holds, plan.in_send = 30_000, in_send
    with Verifier(section()) as pool:
        scores = pool.score([str(n) for n in range(16)], ["g"] * 16, rows(*[20_000] * 16))
    assert [score.reward for score in scores] == [1.0] * 16


def test_the_first_call_of_a_fresh_worker_s_batch_is_tried_alone(plan: Plan) -> None:
    plan.dies_on = frozenset({"bad"})
    with Verifier(section()) as pool:
        scores = pool.score(["bad", "b", "c"], ["g"] * 3, rows(10, 10, 10))
    assert [score.reward for score in scores] == [0.0, 1.0, 1.0]
    assert scores[0].why.startswith("the worker died (exit code 1)")
    assert (plan.started, len(plan.batches)) == (3, 3)


def test_no_call_is_blamed_for_workers_that_died_idle(plan: Plan) -> None:
    plan.idle_deaths = 5
    with Verifier(section()) as pool:
        scores = pool.score(["a", "b"], ["g"] * 2, rows(10, 10))
    assert [score.reward for score in scores] == [1.0, 1.0]


def test_sending_is_not_the_function_s_time(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher looks for answers and limits in turns; in every second one no answer is there yet."""
    clock, turns = time.monotonic, count()
    plan.send_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: clock() + plan.ahead)
    monkeypatch.setattr(dispatch, "wait", lambda *asked: wait(*asked) if next(turns) % 2 else [])
    with Verifier(section(timeout_s=50.0)) as pool:
        scores = pool.score(["a", "b"], ["g"] * 2, rows(MB, MB))
    assert [score.reward for score in scores] == [1.0, 1.0]
    assert plan.started == 1


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 60_000), st.booleans()), min_size=1, max_size=24),
    st.integers(1_000, 60_000),
    st.booleans(),
    st.integers(1, 3),
)
def test_every_call_ends_whatever_the_workers_hold(
    plan: Plan, calls: list[tuple[int, bool]], holds: int, in_send: bool, workers: int
) -> None:
    """Workers hold less than a batch may have, so the bound does not help."""
    assert MB * 64 // MEMORY_SHARE > 60_000
    responses = [f"{number}{'!' if bad else ''}" for number, (_, bad) in enumerate(calls)]
    plan.holds, plan.in_send = holds, in_send
    plan.dies_on = frozenset(response for response in responses if response.endswith("!"))
    plan.batches, plan.started = [], 0
    with Verifier(section(workers=workers)) as pool:
        scores = pool.score(responses, ["g"] * len(calls), rows(*[size for size, _ in calls]))
    for (size, bad), score in zip(calls, scores, strict=True):
        assert score.reward == (0.0 if bad or size + 100 > holds else 1.0) or holds - 100 < size <= holds
    assert plan.started <= workers + 2 * len(calls)
