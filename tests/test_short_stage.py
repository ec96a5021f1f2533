"""A stage sealed with fewer updates than µ ends when they are taken; updates that the recipe names are profiled."""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mugrpo_megatron import train
from mugrpo_megatron.phases import stage as phase
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.record import RunRecord
from mugrpo_megatron.stages.store import StageStore
from tests.hostile.rundir import PROMPTS, UPDATES, fill

MU = 4


@pytest.mark.parametrize("stages", [2, 9])
def test_a_stage_ends_with_its_last_responses(stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run began with S=2, ended a stage early and sealed its last one for the two updates that were left.

    It ends there also where more stages were asked for since.
    """
    schedule = {"stages": stages, "updates_per_stage": MU}
    recipe = Recipe.model_validate(
        {"schedule": schedule, "rollout": {"prompts_per_update": PROMPTS}, "track": {"profile_updates": [7]}}
    )
    said: list[str] = []
    store = StageStore(tmp_path)
    fill(store, 0)
    store.seal(UPDATES, PROMPTS)
    run: Any = SimpleNamespace(
        recipe=recipe,
        evaluates_every=0,
        directory=RunDirectory(tmp_path),
        record=RunRecord("r"),
        stage_store=lambda cursor: store,
        log=SimpleNamespace(update=lambda *_: None),
        world=SimpleNamespace(rank=2, engines=0),
        display=SimpleNamespace(say=said.append),
    )
    learner: Any = SimpleNamespace(skipped_in_a_row=0)
    bar = SimpleNamespace(advance=lambda **_: None)
    nothing: Any = None
    trained: list[int] = []

    def update(learner: None, samples: list[Any], advantages: Any, stage_progress: float) -> dict[str, float]:
        trained.extend(sample.group for sample in samples[::2])
        torch.ones(3) @ torch.ones(3)
        return {"ess": 1.0, "vetoed_fraction": 0.0, "tokens": 1.0, "loss": 0.0}

    monkeypatch.setattr(phase, "probe", lambda *_, **__: None)
    monkeypatch.setattr(phase.TrainingStage, "record_start", lambda *_: None)
    monkeypatch.setattr(train, "save_if_due", lambda *_: None)
    monkeypatch.setattr(phase, "_utilization", lambda *_: {})
    monkeypatch.setattr(phase, "_optimizing", lambda *_: nullcontext(bar))
    monkeypatch.setattr(train, "update", update)
    assert train.optimize_stage(run, learner, nothing, Cursor(2, 0, 6)) == Cursor(3, 0, 8)
    assert trained == list(range(UPDATES * PROMPTS))
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "update000007-rank00002.json.gz"
    with gzip.open(trace) as file:
        assert "aten::dot" in {event.get("name") for event in json.load(file)["traceEvents"]}
    assert len(said) == 1
