"""When the engine's weights are compared with the learner's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.recipe.systems import EngineSection
from mugrpo_megatron.run import engines as engines_module
from mugrpo_megatron.run.engines import Engines
from mugrpo_megatron.run.leader import LedEngine
from mugrpo_megatron.weights.check import WeightMismatch


class World:
    """Two ranks; the other's flag is given."""

    def __init__(self, other_is_due: bool = False) -> None:
        self._other = other_is_due

    def any_rank(self, flag: bool) -> bool:
        return flag or self._other


def opened(mode: str, other_is_due: bool = False) -> Engines:
    """The engines of a run, and this rank's engine."""
    world, section, nothing = (
        cast(Any, World(other_is_due)),
        EngineSection.model_validate({"check_weights": mode}),
        None,
    )
    leader: Any = LedEngine(engine=cast(Any, SimpleNamespace(running=True)))
    return Engines(world, section, cast(Any, nothing), leader)


def own(engines: Engines) -> Any:
    assert engines.leader
    return engines.leader.engine


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engines that were compared; an exception among them is raised instead."""
    seen: list[Any] = []

    def check(weight_sync: object, engine: Any) -> int:
        seen.append(engine)
        if isinstance(engine, Exception):
            raise engine
        return 7 if engine else 0

    monkeypatch.setattr(engines_module, "compare_weights", check)
    return seen


@pytest.mark.parametrize(("mode", "times"), [("first", 1), ("every", 3), ("never", 0)])
def test_how_often(mode: str, times: int, compared: list[Any]) -> None:
    engines = opened(mode)
    facts = [engines.compare() for _ in range(3)]
    assert compared == [own(engines)] * times
    assert facts == [{"checked": 7.0}] * times + [{}] * (3 - times)


def test_an_engine_that_was_started_again_is_compared_again(compared: list[Any]) -> None:
    engines = opened("first")
    engines.compare()
    assert engines.leader
    engines.leader.note(EngineFailure("it died"))
    own(engines).running = False
    engines.compare()  # it did not come up
    own(engines).running = True
    engines.compare()
    engines.compare()
    assert compared == [own(engines)] * 2


def test_an_engine_that_dies_meanwhile_is_out_and_compared_after_the_next_sync(compared: list[Any]) -> None:
    engines = opened("first")
    assert engines.leader
    engine = engines.leader.engine
    engines.leader.engine = dying = cast(Any, EngineFailure("it died"))
    dying.running = True
    assert engines.compare() == {}
    assert (engines.leader.failures_in_a_row, engines.leader.checked) == (1, False)
    engines.leader.engine = engine
    assert engines.compare() == {"checked": 7.0}


def test_ranks_without_an_engine_to_compare_take_part_for_the_others(compared: list[Any]) -> None:
    engines = opened("first", other_is_due=True)
    engine = own(engines)
    engines.compare()
    engines.compare()
    engines.leader = None
    engines.compare()
    assert compared == [engine, None, None]


def test_a_difference_is_not_held_back(compared: list[Any]) -> None:
    engines = opened("first")
    assert engines.leader
    engines.leader.engine = differing = cast(Any, WeightMismatch("it differs"))
    differing.running = True
    with pytest.raises(WeightMismatch, match="it differs"):
        engines.compare()
