"""Auxiliary models whose engines need no model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mugrpo_megatron.extras.auxiliary import phase, shard
from tests.extras.auxiliary.stand import Answers, StandInEngine, sealed_stage, stand, taught


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Answers:
    """What all engines answer; of a kind that the test's module names."""
    answers: Answers = getattr(request.module, "ANSWERS", Answers)()
    for module in (phase, shard):
        monkeypatch.setattr(module, "Engine", SimpleNamespace(start=lambda *_: StandInEngine(answers)))
    return answers


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A run with a teacher and a sealed stage, `run.store`."""
    run = stand(taught(tmp_path), tmp_path / "run")
    run.store = sealed_stage(run.directory)
    return run
