"""The thread that writes a checkpoint."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from mugrpo_megatron.learner import checkpoint
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.observe.log import MetricLog
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.recipe.sections import CheckpointSection
from mugrpo_megatron.run.checkpoints import Saver, open_saver
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.stopping import AllStopped


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cuda:3", [("checkpoint", torch.device("cuda:3")), ("checkpoint", "write")]), ("cpu", [("checkpoint", "write")])],
)
def test_writes_on_its_rank_s_device(
    device: str, expected: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread starts on device 0, and torch's writer makes a context there."""
    events: list[object] = []

    def note(what: object) -> None:
        events.append((threading.current_thread().name, what))

    monkeypatch.setattr(torch.cuda, "set_device", note)
    monkeypatch.setattr(torch.distributed, "new_group", lambda backend, timeout: None)
    monkeypatch.setattr(checkpoint, "begin_save", lambda *_, **__: lambda: note("write"))
    ranks = SimpleNamespace(rank=0, device=torch.device(device))
    learner = cast(Learner, SimpleNamespace(ranks=ranks, recipe=load_recipe(None)))
    saver = Saver(learner, tmp_path, CheckpointSection(asynchronous=True), "run")
    saver.save(Cursor(0, 1, 1))
    saver.wait()
    assert events == expected


@pytest.mark.parametrize("age", [0, 3])
def test_a_run_that_stops_in_the_engines_turn_reloads_the_learner_before_it_is_saved(
    age: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the learner is offloaded then; where the newest checkpoint is the cursor's, nothing is saved."""
    events: list[str] = []
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda values: None)
    monkeypatch.setattr(checkpoint, "begin_save", lambda *_, **__: lambda: events.append("write"))
    ranks = SimpleNamespace(rank=0, device=torch.device("cpu"))
    learner = SimpleNamespace(ranks=ranks, recipe=load_recipe(None), reload=lambda: events.append("reload"))
    section = CheckpointSection(asynchronous=False)
    with pytest.raises(AllStopped), open_saver(cast(Learner, learner), tmp_path, section, "run", MetricLog()):
        raise AllStopped("", 0, Cursor(0, age, age))
    assert events == (["reload", "write"] if age else [])
