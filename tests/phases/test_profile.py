"""The profiler records the updates that the recipe names, and no other."""

from __future__ import annotations

import gzip
import json
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mugrpo_megatron.phases import stage as module
from mugrpo_megatron.phases.stage import Stage
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory

BAR = SimpleNamespace(advance=lambda **_: None)


def test_only_the_named_updates_leave_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    run: Any = SimpleNamespace(
        recipe=Recipe.model_validate({"track": {"profile_updates": [3]}}),
        directory=RunDirectory(tmp_path),
        world=SimpleNamespace(ranks=SimpleNamespace(rank=2)),
        display=SimpleNamespace(say=said.append),
        log=SimpleNamespace(update=lambda *_: None),
    )
    monkeypatch.setattr(module, "_optimizing", lambda *_: nullcontext(BAR))
    monkeypatch.setattr(module, "_figures", lambda *_: {"reward_mean": 0.0})
    monkeypatch.setattr(module, "_utilization", lambda *_: {})
    for name in ("probe", "refresh_reference"):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    updates: Any = SimpleNamespace(store=SimpleNamespace(updates=4), batch=lambda cursor: SimpleNamespace(samples=[]))
    learner: Any = SimpleNamespace(skipped_in_a_row=0)
    with ExitStack() as shown:
        stage = Stage(run, learner, updates, Cursor(1, 0, 2), shown)
        for cursor in (Cursor(1, 0, 2), Cursor(1, 1, 3)):
            batch = stage.batch(cursor)
            torch.ones(3) @ torch.ones(3)
            stage.record(cursor, batch, {"tokens": 1.0, "loss": 0.0})
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "update000003-rank00002.json.gz"
    with gzip.open(trace) as file:
        assert "aten::dot" in {event.get("name") for event in json.load(file)["traceEvents"]}
    assert len(said) == 1
