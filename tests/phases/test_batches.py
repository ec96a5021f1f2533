"""Updates formed of informative groups: full, in order, from the stage on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.checkpoint_state import STATE
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.loss import make_loss_inputs
from mugrpo_megatron.phases import column_passes as learner_passes
from mugrpo_megatron.phases import stage as module
from mugrpo_megatron.phases.batches import StageBatches, columns_of, training_rewards
from mugrpo_megatron.phases.column_passes import compute_ref, refresh_proximal
from mugrpo_megatron.recipe import ObjectiveSection, Recipe
from mugrpo_megatron.run.cursor import Cursor, checkpoint_name
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.record import RunRecord
from mugrpo_megatron.run.stopping import Stopped
from mugrpo_megatron.samples import Sample, trained_lengths
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.weights.families import fingerprint
from tests.phases.stand import bare_run

UPDATES, PROMPTS, RESPONSES = 3, 2, 4
EQUAL = {0, 3, 4}
"""Groups whose rewards are all equal."""


def group(index: int) -> list[Sample]:
    rewards = [1.0] * RESPONSES if index in EQUAL else [1.0, 0.0, 0.0, 1.0]
    ids, logprobs = np.array([index], dtype=np.int32), np.zeros(1, dtype=np.float32)
    return [Sample(index, f"p{index}", ids, ids, logprobs, reward, 0, "stop") for reward in rewards]


def sealed(directory: Path) -> StageStore:
    store = StageStore(directory)
    for index in range(UPDATES * PROMPTS):
        store.append(group(index))
    store.seal(UPDATES, PROMPTS)
    return store


def problems_of_updates(directory: Path, zero_variance: str, epochs: int = 1) -> list[list[str]]:
    store = sealed(directory)
    recipe = Recipe.model_validate(
        {"rollout": {"prompts_per_update": PROMPTS}, "objective": {"zero_variance": zero_variance}}
    )
    columns = columns_of(recipe, RunDirectory(directory), "r", store, 0)
    of_stage = StageBatches(recipe, store, 0, columns)
    updates = [of_stage.batch(Cursor(0, age, age)).samples for age in range(UPDATES * epochs)]
    for update in updates:
        assert len({sample.group for sample in update}) == PROMPTS
        assert len(update) == PROMPTS * RESPONSES
    return [[sample.problem for sample in update[::RESPONSES]] for update in updates]


@pytest.mark.parametrize("zero_variance", ["count", "mask"])
def test_a_stage_is_read_as_it_is(tmp_path: Path, zero_variance: str) -> None:
    assert problems_of_updates(tmp_path, zero_variance) == [["p0", "p1"], ["p2", "p3"], ["p4", "p5"]]


def test_an_update_says_how_many_of_its_groups_have_equal_rewards() -> None:
    logged = []
    for groups in ((0, 1), (3, 4), (1, 2, 5)):
        samples = [sample for index in groups for sample in group(index)]
        logged.append(module._figures(samples, Cursor()))
    assert [figures["zero_variance_fraction"] for figures in logged] == [0.5, 1.0, 0.0]


def test_groups_of_equal_rewards_are_left_out(tmp_path: Path) -> None:
    assert problems_of_updates(tmp_path, "leave_out") == [["p1", "p2"], ["p5", "p1"], ["p2", "p5"]]


def test_a_length_makes_no_group_informative(tmp_path: Path) -> None:
    """Groups are chosen by what they had before the overlong penalty, in updates, statistics and losses."""
    ids, logprobs = np.arange(1, 5, dtype=np.int32), np.zeros(4, dtype=np.float32)
    store, groups = StageStore(tmp_path), []
    for index, verdicts in enumerate(([0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.1, 0.1])):
        scores = [(v - p, {"math": v, "overlong": p}) for v, p in zip(verdicts, (0.7, 0.1), strict=True)]
        group = [Sample(index, f"p{index}", ids, ids, logprobs, r, 0, "stop", components=c) for r, c in scores]
        groups += group
        store.append(group)
    store.seal(2, 2)
    assert store.statistics()["zero_variance_fraction"] == module._figures(groups, Cursor())["zero_variance_fraction"]
    assert store.statistics()["zero_variance_fraction"] == 0.75
    recipe = Recipe.model_validate({"rollout": {"prompts_per_update": 2}, "objective": {"zero_variance": "leave_out"}})
    of_stage = StageBatches(recipe, store, 0, columns_of(recipe, RunDirectory(tmp_path), "r", store, 0))
    assert {sample.problem for age in (0, 1) for sample in of_stage.batch(Cursor(0, age, age)).samples} == {"p1"}
    for zero_variance, counted in (("count", [1, 1, 1, 1]), ("mask", [0, 1, 0, 0]), ("leave_out", [0, 1, 0, 0])):
        section = ObjectiveSection.model_validate({"zero_variance": zero_variance})
        behaviour = [replace(sample, behaviour_logprobs=logprobs) for sample in groups]
        weights = make_loss_inputs(section, 4, behaviour, np.zeros(8), torch.device("cpu")).segments.weights
        assert (weights > 0).tolist() == [bool(share) for share in counted for _ in range(2)]


@pytest.mark.parametrize("zero_variance", ["count", "leave_out"])
def test_later_passes_take_the_same_updates_in_another_order(tmp_path: Path, zero_variance: str) -> None:
    taken = problems_of_updates(tmp_path, zero_variance, epochs=3)
    epochs = [taken[:UPDATES], taken[UPDATES : 2 * UPDATES], taken[2 * UPDATES :]]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert len({str(one) for one in epochs}) > 1


def test_a_users_advantages_get_the_lengths_and_the_rows_of_the_stage(tmp_path: Path) -> None:
    """The rows are columns for people, which other objectives leave unread."""
    store = StageStore(tmp_path)
    ids, logprobs, mask = np.arange(1, 5, dtype=np.int32), np.zeros(4, dtype=np.float32), np.array([1, 0, 1, 1], bool)
    for index in range(PROMPTS):
        row = f'{{"n": {index}}}'
        store.append(
            [Sample(index, "p", ids, ids, logprobs, r, 0, "stop", loss_mask=mask, row=row) for r in (0.0, 1.0)]
        )
    store.seal(1, PROMPTS)
    for advantage, rows in (("group_mean", [""] * 4), ("os:abort", ['{"n": 0}'] * 2 + ['{"n": 1}'] * 2)):
        recipe = Recipe.model_validate(
            {"rollout": {"prompts_per_update": PROMPTS}, "objective": {"advantage": advantage}}
        )
        columns = columns_of(recipe, RunDirectory(tmp_path), "r", store, 0)
        batch = StageBatches(recipe, store, 0, columns).batch(Cursor())
        assert (trained_lengths(batch.samples), [sample.row for sample in batch.samples]) == ([3] * 4, rows)


EVERY = 2
LEARNER: Any = None


class Refreshed:
    """A sealed stage and a run of one rank on it, whose learner gives every token of problem p at update u p + u/10."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, zero_variance: str, epochs: int = 1) -> None:
        self.directory = RunDirectory(path)
        self.store = sealed(self.directory.stage(0))
        recipe = Recipe.model_validate(
            {
                "rollout": {"prompts_per_update": PROMPTS},
                "schedule": {"stages": 1, "updates_per_stage": UPDATES, "epochs": epochs},
                "objective": {"name": "off_policy_grpo", "proximal_every": EVERY, "zero_variance": zero_variance},
            }
        )
        self.run = bare_run(recipe, self.directory)
        self.updates = StageBatches(recipe, self.store, 0, columns_of(recipe, self.directory, "r", self.store, 0))
        self.updates_taken = 0
        monkeypatch.setattr(learner_passes, "token_logprobs", self._logprobs)

    def _logprobs(self, learner: None, samples: Sequence[Sample]) -> list[np.ndarray]:
        return [(sample.prompt_ids + self.updates_taken / 10).astype(np.float32) for sample in samples]

    def take(self, age: int) -> list[Sample]:
        self.updates_taken = age
        refresh_proximal(self.run, LEARNER, self.updates, Cursor(0, age, age))
        return self.updates.batch(Cursor(0, age, age)).samples

    def save(self, age: int) -> None:
        """A checkpoint as far as it is looked for."""
        state = self.directory.checkpoints / checkpoint_name(Cursor(0, age)) / STATE
        state.parent.mkdir(parents=True)
        state.touch()

    @property
    def files(self) -> list[str]:
        found = sorted(path.name for path in self.directory.proximal_files.iterdir())
        parquet = [name for name in found if name.endswith(".parquet")]
        assert found == sorted([*parquet, *(name.replace(".parquet", ".json") for name in parquet)])
        return parquet


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("zero_variance", ["mask", "leave_out"])
def test_samples_carry_the_logprobs_of_the_policy_at_the_refresh(
    zero_variance: str, epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an update is formed of groups that lie in several stored ones; the last stretch is shorter.

    With several epochs a stretch between two refreshes reaches from one pass into the next.
    """
    refreshed = Refreshed(tmp_path, monkeypatch, zero_variance, epochs)
    for age in range(UPDATES * epochs):
        samples = refreshed.take(age)
        for sample in samples:
            assert sample.proximal_logprobs is not None
            assert sample.proximal_logprobs == np.float32(int(sample.problem[1:]) + (age - age % EVERY) / 10)
    assert refreshed.files == [f"stage00000-age{age:05d}.parquet" for age in range(0, UPDATES * epochs, EVERY)]


def test_a_run_that_resumes_between_refreshes_reads_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Refreshed(tmp_path, monkeypatch, "mask")
    before.take(0)
    first = before.take(1)
    before.updates_taken = 7  # whatever the learner is now, update 1 clips around what update 0 began with
    assert [s.proximal_logprobs for s in before.updates.batch(Cursor(0, 1, 1)).samples] == [
        s.proximal_logprobs for s in first
    ]
    for file in before.directory.proximal_files.iterdir():
        file.unlink()
    with pytest.raises(UserError, match=r"age00000\.parquet is missing.* the checkpoints after stage00000-age00000"):
        before.take(1)


def test_a_refresh_that_is_cut_short_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refreshed = Refreshed(tmp_path, monkeypatch, "mask")
    whole = refreshed._logprobs

    def dies(learner: None, samples: Sequence[Sample]) -> list[np.ndarray]:
        if samples[0].problem == "p2":
            raise KeyboardInterrupt
        return whole(learner, samples)

    monkeypatch.setattr(learner_passes, "token_logprobs", dies)
    with pytest.raises(KeyboardInterrupt):
        refreshed.take(0)
    assert refreshed.files == []


def test_a_request_to_stop_is_answered_between_two_updates_of_a_refresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refreshed = Refreshed(tmp_path, monkeypatch, "mask")
    refreshed.run.saver = SimpleNamespace(wait=lambda: None)
    asked: list[str] = []

    def asks(learner: None, samples: Sequence[Sample]) -> list[np.ndarray]:
        asked.append(samples[0].problem)
        refreshed.run.stop.requested = True
        return refreshed._logprobs(learner, samples)

    monkeypatch.setattr(learner_passes, "token_logprobs", asks)
    with pytest.raises(Stopped, match="saved at update 0"):
        refreshed.take(0)
    assert len(asked) == 1
    assert refreshed.files == []


def test_files_go_once_every_kept_checkpoint_lies_behind_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refreshed = Refreshed(tmp_path, monkeypatch, "mask")
    refreshed.take(0)
    refreshed.save(1)
    refreshed.take(2)
    assert refreshed.files == ["stage00000-age00000.parquet", "stage00000-age00002.parquet"], "update 1 needs the first"
    (refreshed.directory.checkpoints / checkpoint_name(Cursor(0, 1)) / STATE).unlink()
    refreshed.save(2)
    refreshed.take(2)
    assert refreshed.files == ["stage00000-age00002.parquet"]


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
        compute_ref(run, learner, first, Cursor(0, 0))  # it is there
        (model / "model.safetensors").write_bytes(b"later")
        with pytest.raises(UserError, match=r"used other weights than|weights in .* have changed since"):
            compute_ref(run, learner, second, Cursor(1, 0, 4))
        (model / "model.safetensors").write_bytes(b"first")
