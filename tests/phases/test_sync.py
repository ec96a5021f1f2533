"""When the engine's weights are compared with the learner's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.phases import handover
from mugrpo_megatron.run.leader import EngineLeader, Engines
from mugrpo_megatron.weights.check import WeightMismatch


class Run:
    """One of two ranks; the other's flags are given."""

    def __init__(self, mode: str, other_is_due: bool = False) -> None:
        self.recipe = SimpleNamespace(engine=SimpleNamespace(check_weights=mode))
        self.leader: EngineLeader | None = EngineLeader(*[None] * 5)  # type: ignore[arg-type]
        self.said: list[str] = []
        self.display = SimpleNamespace(say=self.said.append)
        self._other = other_is_due
        self.world = self

    def any_rank(self, *flags: bool) -> list[bool]:
        return [flag or self._other for flag in flags]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engines that were compared; an exception among them is raised instead."""
    seen: list[Any] = []

    def check(weight_sync: object, engine: Any) -> int:
        seen.append(engine)
        if isinstance(engine, Exception):
            raise engine
        return 7 if engine else 0

    monkeypatch.setattr(handover, "compare_weights", check)
    return seen


def synced(run: Run, engine: Any) -> dict[str, float]:
    facts: dict[str, float] = {}
    engines = Engines(SimpleNamespace(staging=None), run.leader)  # type: ignore[arg-type]
    handover._check_weights(run, engines, engine, facts)  # type: ignore[arg-type]
    return facts


@pytest.mark.parametrize(("mode", "times"), [("first", 1), ("every", 3), ("never", 0)])
def test_how_often(mode: str, times: int, compared: list[Any]) -> None:
    run = Run(mode)
    facts = [synced(run, "engine") for _ in range(3)]
    assert compared == ["engine"] * times
    assert facts == [{"checked": 7.0}] * times + [{}] * (3 - times)


def test_an_engine_that_was_started_again_is_compared_again(compared: list[Any]) -> None:
    run = Run("first")
    synced(run, "engine")
    assert run.leader
    run.leader.record_failure(EngineFailure("it died"))
    synced(run, None)  # it did not come up
    synced(run, "engine")
    synced(run, "engine")
    assert compared == ["engine"] * 2


def test_an_engine_that_dies_meanwhile_is_out_and_compared_after_the_next_sync(compared: list[Any]) -> None:
    run = Run("first")
    assert synced(run, EngineFailure("it died")) == {}
    assert run.leader
    assert (run.leader.failures_in_a_row, run.leader.checked) == (1, False)
    assert synced(run, "engine") == {"checked": 7.0}


def test_ranks_without_an_engine_to_compare_take_part_for_the_others(compared: list[Any]) -> None:
    run = Run("first", other_is_due=True)
    synced(run, "engine")
    synced(run, "engine")
    run.leader = None
    synced(run, None)
    assert compared == ["engine", None, None]


def test_a_difference_is_not_held_back(compared: list[Any]) -> None:
    with pytest.raises(WeightMismatch, match="it differs"):
        synced(Run("first"), WeightMismatch("it differs"))


def test_a_run_says_when_it_cannot_compare(compared: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "uncheckable_reason", lambda weight_sync: "SGLang pads heads")
    run = Run("every")
    for _ in range(3):
        synced(run, "engine")
    assert run.said == ["The engine's weights are not compared with the learner's: SGLang pads heads."]
