"""The KL penalty in the rewards, and weights of a reference policy that may not change; `test_epochs.py` has whole
runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.phases.batches import StageBatches, columns_of, training_rewards
from mugrpo_megatron.phases.column_passes import compute_ref_logprobs
from mugrpo_megatron.recipe import ObjectiveSection, Recipe
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.record import RunRecord
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.weights.families import fingerprint
from tests.phases.bare import bare_run


def sample(reward: float, behaviour: float, ref: float | None) -> Sample:
    ids, logprobs = np.zeros(3, np.int32), np.full(3, behaviour, np.float32)
    held = None if ref is None else np.full(3, ref, np.float32)
    return Sample(0, "p", ids, ids, logprobs, reward, 0, "stop", behaviour_logprobs=logprobs, ref_logprobs=held)


def test_rewards_are_those_of_the_verifier_unless_the_kl_is_in_them() -> None:
    samples = [sample(1.0, -1.0, -1.5), sample(0.0, -2.0, -1.0)]
    np.testing.assert_array_equal(training_rewards(samples, ObjectiveSection()), [1.0, 0.0])
    in_loss = ObjectiveSection(kl_ref="start", kl_coef=0.1)
    np.testing.assert_array_equal(training_rewards(samples, in_loss), [1.0, 0.0])
    in_reward = ObjectiveSection(kl_ref="start", kl_coef=0.1, kl_penalty="reward")
    np.testing.assert_allclose(training_rewards(samples, in_reward), [1 - 0.1 * 1.5, 0.1 * 3])
    with pytest.raises(ValueError, match="ref_logprobs of every sample"):
        training_rewards([*samples, sample(1.0, -1.0, None)], in_reward)


def test_the_fingerprint_follows_the_weights(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).bytes(300_000)
    for name, data in (("a", whole), ("b", whole), ("c", whole[:-1] + b"?"), ("d", whole[:-1])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(data)
    a, b, c, d = (fingerprint(tmp_path / name) for name in "abcd")
    assert a == b
    assert len({a, c, d}) == 3


def test_a_ref_keeps_its_weights_from_stage_to_stage(tmp_path: Path) -> None:
    """A run resumes at a stage's start, where that stage has no reference policy's file yet."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"first")
    store: Any = SimpleNamespace(content="c", updates=1, replay="off", directory=tmp_path)
    learner = cast(Learner, None)
    directory = RunDirectory(tmp_path / "run")
    path = directory.ref(0)
    path.parent.mkdir(parents=True)
    for ref in ("start", str(model)):
        section = {"kl_ref": ref, "kl_coef": 0.1}
        run = bare_run(Recipe.model_validate({"objective": section, "model": {"path": model}}), directory)
        run.record = RunRecord("r", weights=fingerprint(model))
        first, second = (
            StageBatches(run.recipe, store, number, columns_of(run.recipe, directory, "r", store, number))
            for number in (0, 1)
        )
        assert first.columns.ref
        with first.columns.ref.write(weights=fingerprint(model)) as append:
            append([np.zeros(2, np.float32)])
        compute_ref_logprobs(run, learner, first, Cursor(0, 0))  # it is there
        (model / "model.safetensors").write_bytes(b"later")
        with pytest.raises(UserError, match=r"other weights than"):
            compute_ref_logprobs(run, learner, second, Cursor(1, 0, 4))
        (model / "model.safetensors").write_bytes(b"first")
