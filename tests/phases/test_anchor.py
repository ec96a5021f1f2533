"""The KL penalty on whole runs: no KL at first, held back later, and bit by bit the same after a resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.phases.batches import StageUpdates, columns_of, training_rewards
from mugrpo_megatron.phases.column_passes import compute_anchor
from mugrpo_megatron.recipe import ObjectiveSection, Recipe
from mugrpo_megatron.run.checkpoints import complete
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.record import Record
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.weights.families import fingerprint
from tests.phases.bare import bare_run
from tests.phases.branches import optimize
from tests.tiny import rows, weights


def sample(reward: float, behaviour: float, anchor: float | None) -> Sample:
    ids, logprobs = np.zeros(3, np.int32), np.full(3, behaviour, np.float32)
    held = None if anchor is None else np.full(3, anchor, np.float32)
    return Sample(0, "p", ids, ids, logprobs, reward, 0, "stop", anchor_logprobs=held)


def test_rewards_are_those_of_the_verifier_unless_the_kl_is_in_them() -> None:
    samples = [sample(1.0, -1.0, -1.5), sample(0.0, -2.0, -1.0)]
    np.testing.assert_array_equal(training_rewards(samples, ObjectiveSection()), [1.0, 0.0])
    in_loss = ObjectiveSection(kl_anchor="start", kl_coef=0.1)
    np.testing.assert_array_equal(training_rewards(samples, in_loss), [1.0, 0.0])
    in_reward = ObjectiveSection(kl_anchor="start", kl_coef=0.1, kl_penalty="reward")
    np.testing.assert_allclose(training_rewards(samples, in_reward), [1 - 0.1 * 1.5, 0.1 * 3])
    with pytest.raises(ValueError, match="every sample's anchor_logprobs"):
        training_rewards([*samples, sample(1.0, -1.0, None)], in_reward)


def test_the_fingerprint_follows_the_weights(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).bytes(300_000)
    for name, data in (("a", whole), ("b", whole), ("c", whole[:-1] + b"?"), ("d", whole[:-1])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(data)
    a, b, c, d = (fingerprint(tmp_path / name) for name in "abcd")
    assert a == b
    assert len({a, c, d}) == 3


def test_an_anchor_keeps_its_weights_from_stage_to_stage(tmp_path: Path) -> None:
    """A run resumes at a stage's start, where that stage has no anchor's file yet."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"first")
    store: Any = SimpleNamespace(content="c", updates=1, replay="off", directory=tmp_path)
    learner = cast(Learner, None)
    directory = RunDirectory(tmp_path / "run")
    path = directory.anchor(0)
    path.parent.mkdir(parents=True)
    for anchor in ("start", str(model)):
        section = {"kl_anchor": anchor, "kl_coef": 0.1}
        run = bare_run(Recipe.model_validate({"objective": section, "model": {"path": model}}), directory)
        run.record = Record("r", weights=fingerprint(model))
        first, second = (
            StageUpdates(run.recipe, store, number, columns_of(run.recipe, directory, "r", store, number))
            for number in (0, 1)
        )
        assert first.columns.anchor
        with first.columns.anchor.write(weights=fingerprint(model)) as append:
            append([np.zeros(2, np.float32)])
        compute_anchor(run, learner, first, Cursor(0, 0))  # it is there
        (model / "model.safetensors").write_bytes(b"later")
        with pytest.raises(UserError, match=r"other weights than"):
            compute_anchor(run, learner, second, Cursor(1, 0, 4))
        (model / "model.safetensors").write_bytes(b"first")


def optimized(source: Path, run_dir: Path, *changes: str) -> list[dict[str, Any]]:
    """The first stage of the run in `source`, at a learning rate that moves the policy far in each update."""
    optimize(source, run_dir, "optimizer.lr=1e-2", *changes)
    return rows(run_dir, "update")


START = ("objective.kl_anchor=start", "objective.kl_coef=0.5")


@pytest.mark.process
@pytest.mark.slow
def test_a_run_stays_near_its_anchor_and_resumes_bit_by_bit(finished_run: Path, tmp_path: Path) -> None:
    held = optimized(finished_run, tmp_path / "held", *START)
    free = optimized(finished_run, tmp_path / "free", START[0])
    assert held[0]["kl_anchor"] == held[0]["kl_anchor_k1"] == 0.0
    assert held[0]["loss"] == free[0]["loss"]
    assert held[0]["grad_norm"] == free[0]["grad_norm"]
    assert 0 < held[-1]["kl_anchor"] < free[-1]["kl_anchor"]
    assert (tmp_path / "held" / "anchor" / "stage00000.parquet").exists()

    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "held", resumed)
    for path in [*complete(resumed / "checkpoints"), resumed / "hf"]:
        if path.name > "stage00000-age00006" or path.name == "hf":
            shutil.rmtree(path)
    shutil.rmtree(resumed / "anchor")  # the run's first weights are on disk, so it is computed again
    optimized(finished_run, resumed, *START)
    assert weights(resumed) == weights(tmp_path / "held")
    assert weights(resumed) != weights(tmp_path / "free")


@pytest.mark.process
@pytest.mark.slow
def test_other_anchors(finished_run: Path, tmp_path: Path) -> None:
    """The stage's first weights cost no pass where the learner has scored it; a directory may hold any weights."""
    stage = optimized(finished_run, tmp_path / "stage", "objective.kl_anchor=stage", START[1])
    start = optimized(finished_run, tmp_path / "start", *START)
    assert [row["kl_anchor"] for row in stage] == [row["kl_anchor"] for row in start]
    assert not (tmp_path / "stage" / "anchor").exists()
    moved = f"objective.kl_anchor={tmp_path / 'stage' / 'hf'}"
    towards = optimized(finished_run, tmp_path / "towards", moved, "objective.kl_coef=50")
    assert towards[-1]["kl_anchor"] < towards[0]["kl_anchor"] > 0
    refused = optimize(finished_run, tmp_path / "wrong", f"objective.kl_anchor={tmp_path}", code=2)
    assert 'name the directory of a checkpoint like the model\'s, or "start" or "stage"' in refused.stderr
