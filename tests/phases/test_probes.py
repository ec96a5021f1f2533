"""The probe: which responses, at which ages, and that training does not notice."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.cli import main
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.phases import column_passes as module
from mugrpo_megatron.phases import stage
from mugrpo_megatron.phases.column_passes import PROBED_UPDATES, choose_responses, probe
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.probe import INTERVALS, MIN_UPDATES_APART, probe_ages, read_probe
from mugrpo_megatron.stages.store import StageStore
from tests.forked import fork
from tests.phases.stand import bare_run
from tests.tiny import FINISHED, rows

UPDATES, PROMPTS, RESPONSES = 16, 2, 4
LEARNER: Any = None


@given(updates=st.integers(1, 5000))
def test_ages_are_the_ends_of_equal_parts(updates: int) -> None:
    ages = probe_ages(updates)
    if updates < MIN_UPDATES_APART:
        assert ages == ()
        return
    assert (ages[0], ages[-1], len(ages)) == (0, updates, 1 + min(INTERVALS, updates // MIN_UPDATES_APART))
    assert max(np.diff(ages)) - min(np.diff(ages)) <= 1
    assert min(np.diff(ages)) >= MIN_UPDATES_APART


def sealed(directory: Path) -> StageStore:
    """Of each group the first response is right; group 3 of every four has no right one."""
    store = StageStore(directory)
    for group in range(UPDATES * PROMPTS):
        rewards = [float(place == 0 and group % 4 != 3) for place in range(RESPONSES)]
        ids = [np.array([5, 6 + place % 3, 7], dtype=np.int32) for place in range(RESPONSES)]
        samples = [
            Sample(group, f"p{group}", own, own, np.zeros(3, dtype=np.float32), reward, 0, "stop")
            for own, reward in zip(ids, rewards, strict=True)
        ]
        store.append(samples)
    store.seal(UPDATES, PROMPTS)
    return StageStore(directory)


@settings(max_examples=15)
@given(count=st.integers(1, 40))
def test_mostly_negative_responses_of_evenly_spaced_updates(
    count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "stage-of-the-probe"
    store = StageStore(path) if path.exists() else sealed(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PROBED", count)
        chosen, again = choose_responses(store, Recipe().objective), choose_responses(store, Recipe().objective)
    assert [(u, s.group, s.response_ids.tolist()) for u, s, _ in chosen] == [
        (u, s.group, s.response_ids.tolist()) for u, s, _ in again
    ]
    assert len(chosen) == min(count, PROBED_UPDATES * PROMPTS * RESPONSES)
    assert {update for update, _, _ in chosen} <= {0, 4, 8, 12}
    if count >= 2 * PROBED_UPDATES:
        assert len({update for update, _, _ in chosen}) == PROBED_UPDATES
        assert sum(advantage < 0 for _, _, advantage in chosen) >= len(chosen) * 3 // 8


class Stand:
    """A run of one rank whose learner gives every token of a response its age / 10."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        build_arithmetic_tokenizer().save_pretrained(path / "model")
        recipe = Recipe.model_validate(
            {
                "model": {"path": str(path / "model")},
                "schedule": {"stages": 1, "updates_per_stage": UPDATES},
            }
        )
        self.directory = RunDirectory(path)
        self.store = sealed(self.directory.stage(0))
        self.run = bare_run(recipe, self.directory)
        self.passes = 0
        self.age = 0
        monkeypatch.setattr(module, "token_logprobs", self._logprobs)

    def _logprobs(self, learner: None, samples: Sequence[Sample]) -> list[np.ndarray]:
        self.passes += 1
        return [np.full(len(s.response_ids), -self.age / 10, dtype=np.float32) for s in samples]

    def optimize(self, ages: range) -> None:
        """Where the phase looks: before the first update, and after each."""
        for age in ages:
            if age == 0:
                probe(self.run, LEARNER, self.store, Cursor(0, 0, 0), age=0)
            self.age = age + 1
            probe(self.run, LEARNER, self.store, Cursor(0, age, age), age=age + 1)


def test_what_is_written_is_read_and_costs_a_pass_for_each_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(tmp_path, monkeypatch)
    assert read_probe(stand.directory.probe(0)) is None
    stand.optimize(range(UPDATES))
    assert stand.passes == len(probe_ages(UPDATES)) == 3
    found = read_probe(stand.directory.probe(0))
    assert found
    assert list(found.logprobs) == [0, 8, 16]
    for age, logprobs in found.logprobs.items():
        assert all((own == np.float32(-age / 10)).all() for own in logprobs)
    tokenizer = build_arithmetic_tokenizer()
    for one, (update, sample, advantage) in zip(
        found.responses, choose_responses(stand.store, stand.run.recipe.objective), strict=True
    ):
        assert (one.update, one.group, one.reward) == (update, sample.group, sample.reward)
        assert one.advantage == pytest.approx(advantage)
        assert one.tokens == [tokenizer.decode([token]) for token in sample.response_ids]


def test_a_run_that_resumes_has_the_ages_before_and_those_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand(tmp_path, monkeypatch)
    stand.optimize(range(7))
    stand.optimize(range(5, UPDATES))  # the newest checkpoint was at update 5
    found = read_probe(stand.directory.probe(0))
    assert found
    assert tuple(found.logprobs) == probe_ages(UPDATES)


@pytest.mark.parametrize("file", ["responses.parquet", "age00008.parquet"])
def test_a_damaged_file_is_one_sentence(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(tmp_path, monkeypatch)
    stand.optimize(range(UPDATES))
    path = stand.directory.probe(0) / file
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"damaged.* remove it, the report does not need it"):
        read_probe(stand.directory.probe(0))


def optimized(run_dir: Path, source: Path) -> None:
    """`mugrpo optimize` of the source's first stage without the probe."""
    stage.probe = lambda *_, **__: None
    options = ["--stage", "0", "--from", str(source), "--set", f"run.dir={run_dir}"]
    sys.exit(main(["optimize", str(source / "recipe.toml"), *options]))


@pytest.mark.process
def test_training_ends_with_the_same_bytes_and_metrics(finished_run: Path, tmp_path: Path) -> None:
    process = fork(optimized, tmp_path / "run", finished_run)
    process.join()
    assert process.exitcode == 0
    assert not (tmp_path / "run" / "probe").exists()
    ends = []
    for run_dir in (tmp_path / "run", finished_run):
        state = (run_dir / "checkpoints/stage00001-age00000/__0_0.distcp").read_bytes()
        clocks = {"time", "seconds", "tflops", "mfu"}
        learned = [
            {name: row[name] for name in row.keys() - clocks}
            for row in rows(run_dir, "update")[: FINISHED["updates_per_stage"]]
        ]
        ends.append((state, learned))
    assert ends[0] == ends[1]
    found = read_probe(RunDirectory(finished_run).probe(0))
    assert found
    assert tuple(found.logprobs) == probe_ages(FINISHED["updates_per_stage"])
    moved = [
        np.abs(last - first).max()
        for first, last in zip(found.logprobs[0], found.logprobs[FINISHED["updates_per_stage"]], strict=True)
    ]
    assert min(moved) > 0
