"""The profiler records the updates that the recipe names, and no other."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mugrpo_megatron.phases.saves import profiled
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory


def test_only_the_named_updates_leave_a_trace(tmp_path: Path) -> None:
    said: list[str] = []
    run: Any = SimpleNamespace(
        recipe=SimpleNamespace(track=SimpleNamespace(profile_updates=[3])),
        directory=RunDirectory(tmp_path),
        world=SimpleNamespace(ranks=SimpleNamespace(rank=2)),
        display=SimpleNamespace(say=said.append),
    )
    for update in (2, 3):
        with profiled(run, Cursor(1, 0, update)):
            torch.ones(3) @ torch.ones(3)
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "update000003-rank00002.json.gz"
    with gzip.open(trace) as file:
        assert "aten::dot" in {event.get("name") for event in json.load(file)["traceEvents"]}
    assert len(said) == 1
