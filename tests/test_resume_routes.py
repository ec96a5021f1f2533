"""A mixture of experts that replays its routes, stopped and killed inside a stage: it ends as if it had not been."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.run.checkpoints import newest_cursor
from mugrpo_megatron.run.record import claim
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.manifest import Origin
from mugrpo_megatron.stages.routes import FILE_NAMES
from mugrpo_megatron.stages.store import StageStore
from tests.test_resume import interrupted, kill, update_rows, weights
from tests.tiny import FINISHED, mugrpo, save_model, take_stages, write_run

pytestmark = pytest.mark.process

UPDATES, GROUPS, RESPONSES = FINISHED["updates_per_stage"], 4, 4
REPLAYED: dict[str, Any] = {"learner": {"routing_replay": "learner"}}
CLOCKS = {"time", "seconds", "tflops", "mfu"}


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Megatron compiles of its routers takes seconds in every command; `learner/test_layouts.py` compiles it."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


def figures(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Every metric of every update but those of the clock; an update that was taken twice has the same ones twice."""
    found: dict[int, dict[str, Any]] = {}
    for row in read_rows(run_dir / "metrics.jsonl"):
        if row["kind"] == "update":
            own = {name: value for name, value in row.items() if name not in CLOCKS}
            assert found.setdefault(row["update"], own) == own
    return found


def stop(name: str, recipe: Path, updates: int) -> None:
    """SIGTERM after as many updates."""
    with interrupted(name, recipe, updates) as command:
        psutil.Process(command.pid).send_signal(signal.SIGTERM)
        assert command.wait() == 0, command.said
        assert "stopped as asked" in command.stdout


def check_same(unbroken: Path, resumed: Path, stages: int) -> None:
    """Weights, metrics and recorded routes, bit by bit."""
    assert weights(resumed) == weights(unbroken)
    assert figures(resumed) == figures(unbroken)
    assert set(figures(resumed)) == set(range(stages * UPDATES))
    for number in range(stages):
        mine, theirs = (run / "stages" / f"{number:05d}" for run in (resumed, unbroken))
        assert (mine / FILE_NAMES["learner"]).with_suffix(".json").exists()
        assert (mine / FILE_NAMES["learner"]).read_bytes() == (theirs / FILE_NAMES["learner"]).read_bytes()
    flipped = [row["routes_flipped_tokens"] for _, row in sorted(figures(unbroken).items())]
    assert flipped[0] == 0.0
    assert max(flipped) > 0, "the routers moved, so that without replay other experts would have been chosen"


def write_stage(run_dir: Path, vocabulary: int) -> None:
    """A sealed first stage of random responses, half of them rewarded."""
    run_dir.mkdir(parents=True)
    rng = np.random.default_rng(0)
    store = StageStore(run_dir / "stages" / "00000", origin=Origin(claim(run_dir).id, 0, 0))
    for group in range(UPDATES * GROUPS):
        prompt = rng.integers(0, vocabulary, 5).astype(np.int32)
        lengths = rng.integers(1, 7, RESPONSES)
        answers = [rng.integers(0, vocabulary, length).astype(np.int32) for length in lengths]
        store.append(
            [
                Sample(
                    group, f"p{group}", prompt, ids, np.full(len(ids), -3, dtype=np.float32), float(i % 2), 0, "stop"
                )
                for i, ids in enumerate(answers)
            ]
        )
    store.seal(UPDATES, GROUPS)


def test_a_stage_with_routes_that_was_stopped_and_killed_ends_bitwise_like_the_unbroken_one(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "qwen3_moe")
    unbroken, resumed = (write_run(tmp_path / name, model, **REPLAYED) for name in ("unbroken", "resumed"))
    write_stage(unbroken.parent / "run", vocabulary=20)
    take_stages(unbroken.parent / "run", resumed.parent / "run")
    mugrpo("optimize", unbroken)
    stop("optimize", resumed, 4)
    stood = newest_cursor(resumed.parent / "run" / "checkpoints")
    assert stood.age > 0, "inside the stage"
    repeated = kill("optimize", resumed, 8)
    mugrpo("optimize", resumed)
    check_same(unbroken.parent / "run", resumed.parent / "run", stages=1)
    assert len(update_rows(resumed.parent / "run")) == UPDATES + repeated, "an orderly stop repeats nothing"


@pytest.mark.night
def test_a_run_with_routes_that_was_stopped_and_killed_ends_bitwise_like_the_unbroken_one(tmp_path: Path) -> None:
    """Two stages that the engine samples: SIGTERM inside the first, SIGKILL inside the second."""
    model = save_model(tmp_path / "model", "qwen3_moe")
    unbroken, resumed = (write_run(tmp_path / name, model, **REPLAYED) for name in ("unbroken", "resumed"))
    mugrpo("train", unbroken)
    take_stages(unbroken.parent / "run", resumed.parent / "run")
    for number in range(FINISHED["stages"]):
        stage = resumed.parent / "run" / "stages" / f"{number:05d}"
        for left in (*stage.glob("learner_routes.*"), *stage.glob("behaviour.*")):
            left.unlink()  # computed again, with the weights of the run that is interrupted
    stop("train", resumed, 4)
    kill("train", resumed, UPDATES + 5)
    mugrpo("train", resumed)
    check_same(unbroken.parent / "run", resumed.parent / "run", stages=FINISHED["stages"])
