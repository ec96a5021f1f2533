"""The learner's routes: recorded once before a stage's first update, in the pass that the behaviour logprobs are of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.phases import column_passes as learner_passes
from mugrpo_megatron.phases.batches import StageBatches, columns_of
from mugrpo_megatron.phases.column_passes import compute_behaviour
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.routes import RouteColumn
from mugrpo_megatron.stages.store import StageStore
from tests.phases.stand import bare_run
from tests.phases.test_batches import PROMPTS, UPDATES, sealed

LAYERS = 2
LEARNER: Any = None


class Recorded:
    """A sealed stage and a run of one rank on it; a recorded expert is the prompt's token plus the layer."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str) -> None:
        self.directory = RunDirectory(path)
        self.store = StageStore(sealed(self.directory.stage(0)).directory, replay="learner")
        sections = {
            "rollout": {"prompts_per_update": PROMPTS, "behaviour": behaviour},
            "learner": {"routing_replay": "learner"},
        }
        recipe = Recipe.model_validate(sections)
        self.run = bare_run(recipe, self.directory)
        columns = columns_of(recipe, self.directory, "r", self.store, 0)
        self.updates = StageBatches(recipe, self.store, 0, columns)
        self.recorded, self.scored = 0, 0
        monkeypatch.setattr(learner_passes, "record_routes", self._record)
        monkeypatch.setattr(learner_passes, "token_logprobs", self._logprobs)

    def _record(self, learner: None, samples: Sequence[Sample]) -> tuple[list[np.ndarray], Iterator[np.ndarray]]:
        self.recorded += 1
        tokens = np.concatenate([sample.prompt_ids for sample in samples])  # a token with routes in each
        layers = ((tokens + layer).astype(np.uint8)[:, None] for layer in range(LAYERS))
        return [-sample.prompt_ids.astype(np.float32) for sample in samples], layers

    def _logprobs(self, learner: None, samples: Sequence[Sample]) -> list[np.ndarray]:
        self.scored += 1
        assert all(sample.routes is not None for sample in samples), "scored with the recorded routes"
        return [-sample.prompt_ids.astype(np.float32) for sample in samples]

    def begin(self, age: int = 0) -> None:
        compute_behaviour(self.run, LEARNER, self.updates, Cursor(0, age, age))

    @property
    def routes(self) -> RouteColumn:
        assert self.updates.columns.routes
        return self.updates.columns.routes


@pytest.mark.parametrize("behaviour", ["engine", "learner"])
def test_samples_come_with_the_recorded_routes(behaviour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(tmp_path, monkeypatch, behaviour)
    recorded.begin()
    recorded.begin()
    assert (recorded.recorded, recorded.scored) == (UPDATES, 0), "one pass, once"
    for age in range(UPDATES):
        for sample in recorded.updates.batch(Cursor(0, age, age)).samples:
            assert sample.routes is not None
            np.testing.assert_array_equal(
                sample.routes.read([1, 0]).ravel(), [sample.prompt_ids[0] + 1, sample.prompt_ids[0]]
            )
            if behaviour == "learner":
                np.testing.assert_array_equal(sample.behaviour_logprobs, -sample.prompt_ids)


def test_what_a_crash_between_the_two_files_left_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(tmp_path, monkeypatch, "learner")
    recorded.begin()
    recorded.directory.behaviour(0).unlink()
    recorded.begin()
    assert (recorded.recorded, recorded.scored) == (UPDATES, UPDATES)
    recorded.routes.index.unlink()
    recorded.begin()
    assert recorded.routes.complete
    assert (recorded.recorded, recorded.scored) == (2 * UPDATES, UPDATES)


@pytest.mark.parametrize("half", ["learner_routes.bin", "learner_routes.json"])
def test_routes_that_are_gone_inside_a_stage_are_named(
    half: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(tmp_path, monkeypatch, "engine")
    recorded.begin()
    (recorded.directory.stage(0) / half).unlink()
    said = rf"{half} is missing.*; restore both.* the checkpoints inside this stage"
    with pytest.raises(UserError, match=said):
        recorded.begin(age=1)
