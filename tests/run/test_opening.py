"""The start of a run on a device that cannot hold learner and engine: their slow parts overlap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mugrpo_megatron.run import opening


def test_sglang_is_imported_while_the_learner_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first offload pins host memory for seconds. The process that imports is the engine's, and ends with the run."""
    events: list[str] = []

    @contextmanager
    def importing(*_: object) -> Iterator[str]:
        events.append("import")
        yield "host"
        events.append("end")

    def launch(recipe: Any, logs: Any, stopping: Any, stack: ExitStack, host: Any) -> str:
        events.append(f"load in the {host}")
        stack.callback(events.append, "stop")
        return "launched"

    monkeypatch.setattr(opening, "importing_host", importing)
    monkeypatch.setattr(opening, "offload_learner", lambda learner, world: events.append(f"offload {learner.name}"))
    monkeypatch.setattr(opening, "launch", launch)
    recipe = SimpleNamespace(engine=None, model=SimpleNamespace(directory=None))
    learner = SimpleNamespace(recipe=recipe, name="the learner")
    run, stopping = SimpleNamespace(logs=None), SimpleNamespace(poll=None)
    with ExitStack() as stack:
        assert cast(Any, opening.launch_in_its_place)(learner, None, run, stopping, stack) == "launched"
        events.append("run")
    assert events == ["import", "offload the learner", "load in the host", "run", "stop", "end"]
