"""A sealed stage in a run directory, and an engine that answers without a model and dies when it is told to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from mugrpo_megatron.engine.wire import SampledGroup, Sampling
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.phases.batches import StageBatches, columns_of
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.record import RunRecord
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.stopping import StopRequest
from mugrpo_megatron.run.world import World
from mugrpo_megatron.samples import Prompt, Response
from mugrpo_megatron.stages.store import StageStore
from tests.engine.tiny import group

UPDATES, PROMPTS, RESPONSES = 5, 2, 4
WIDTH = PROMPTS * RESPONSES
COUNT = UPDATES * WIDTH
CPU = SimpleNamespace(device=SimpleNamespace(type="cpu"))
LEARNER = cast(Learner, SimpleNamespace(ranks=CPU, offload=lambda part: None, reload=lambda: None))


class Killed(BaseException):
    """Stands for SIGKILL: nothing tidies up."""


class Answers:
    """What the run's engines were asked, over all of their starts; the next one fails or is killed after `after`."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []
        self.starts = 0
        self.after: int | None = None
        self.error: type[BaseException] = EngineFailure

    def text_of(self, prompt: Prompt) -> np.ndarray:
        """The ids that are sampled for a prompt."""
        raise NotImplementedError


class StandInEngine:
    """`engine.client.Engine` as an auxiliary model's turn uses it."""

    def __init__(self, answers: Answers) -> None:
        self.answers, self.running, self.memory = answers, True, 1e9
        answers.starts += 1

    def stop(self) -> None:
        self.running = False

    def restart(self) -> None:
        self.running = True
        self.answers.starts += 1

    def generate_from(self, take: Any, n: int, how: Sampling) -> Iterator[SampledGroup]:
        waiting: list[Prompt] = []
        answered = 0
        while True:
            while prompts := take(len(waiting), 8):
                waiting += prompts
            if not waiting:
                return
            if self.answers.after is not None and answered >= self.answers.after:
                self.answers.after, self.running = None, False
                raise self.answers.error("it died")
            prompt = waiting.pop(0)
            self.answers.prompts.append(prompt)
            answered += 1
            yield SampledGroup(prompt, [self._response(prompt)])

    def _response(self, prompt: Prompt) -> Response:
        if prompt.logprob_tokens:
            ids = np.array(prompt.ids[-prompt.logprob_tokens :], dtype=np.int32)
            return Response(ids, score_of(ids), "length", 0)
        ids = self.answers.text_of(prompt)
        return Response(ids, np.zeros(len(ids), np.float32), "stop", 0)


def score_of(ids: np.ndarray) -> np.ndarray:
    """Log-probabilities that tell the tokens apart."""
    return (-ids / 1000).astype(np.float32)


def sealed_stage(directory: RunDirectory, number: int = 0) -> StageStore:
    """A stage of `UPDATES` updates with random responses."""
    store = StageStore(directory.stage(number))
    for index in range(UPDATES * PROMPTS):
        store.append(group(index, RESPONSES, seed=number))
    store.seal(UPDATES, PROMPTS)
    return store


def stand(recipe: Recipe, directory: Path) -> Any:
    """A run of one rank that shows nothing and logs into lists."""
    rows: list[tuple[str, dict[str, float]]] = []
    said: list[str] = []

    @contextmanager
    def phase(name: str, cursor: Any) -> Iterator[dict[str, float]]:
        facts: dict[str, float] = {}
        yield facts
        rows.append((name, facts))

    stop = StopRequest()
    bar = SimpleNamespace(done=0, tokens=0, advance=lambda *_: None)
    run: Any = SimpleNamespace(
        recipe=recipe,
        directory=RunDirectory(directory),
        record=RunRecord("r"),
        learner_saver=None,
        is_main=True,
        rows=rows,
        said=said,
        phase=phase,
        log=SimpleNamespace(event=lambda kind, text: said.append(kind)),
        display=SimpleNamespace(bar=lambda *_: nullcontext(bar), say=said.append),
        world=World(engines=1, stop=stop),
        stop=stop,
    )
    run.save_and_stop, run.stop_if_asked = partial(Run.save_and_stop, run), partial(Run.stop_if_asked, run)
    return run


def taught(tmp_path: Path) -> Recipe:
    """A recipe with the teacher `big`."""
    model = tmp_path / "teacher"
    model.mkdir(exist_ok=True)
    (model / "model.safetensors").write_bytes(b"weights")
    return Recipe.model_validate(
        {
            "run": {"dir": tmp_path / "run"},
            "rollout": {"prompts_per_update": PROMPTS, "responses_per_prompt": RESPONSES},
            "objective": {"teacher": "big", "teacher_coef": 1.0},
            "auxiliary": {"big": {"model": model}},
        }
    )


def stage_updates(run: Any, store: StageStore) -> StageBatches:
    """Stage 0 of the run with its columns."""
    return StageBatches(run.recipe, store, 0, columns_of(run.recipe, run.directory, "r", store, 0))


def check_scored(run: Any, store: StageStore) -> None:
    """Every token has the teacher's score."""
    updates = stage_updates(run, store)
    for age in range(UPDATES):
        for sample in updates.samples(age):
            np.testing.assert_array_equal(sample.teacher_logprobs, score_of(sample.response_ids))
