"""Shapes stand in types: loss inputs, segments, samples and what an engine returns have them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.learner.loss import make_loss_inputs
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.samples import Response, Sample
from mugrpo_megatron.stages.store import StageStore
from tests.algorithm.batches import random_batch
from tests.learner.tiny import advantages, samples
from tests.shapes import wrong_shapes

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@given(LENGTHS, st.data())
def test_loss_inputs_and_their_parts(lengths: list[int], data: st.DataObject) -> None:
    inputs = random_batch(0, lengths).inputs(ObjectiveSection())
    assert wrong_shapes(inputs) == []
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, sum(lengths))] * 2)))
    assert wrong_shapes(inputs.chunk(slice(begin, end))) == []
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True))
    assert wrong_shapes(inputs.select(torch.tensor(chosen, dtype=torch.int64))) == []


def test_samples_and_the_loss_inputs_of_an_update() -> None:
    update = [replace(sample, behaviour_logprobs=sample.engine_logprobs) for sample in samples(3, 2)]
    assert [line for sample in update for line in wrong_shapes(sample)] == []
    inputs = make_loss_inputs(ObjectiveSection(), 64, update, advantages(6), torch.device("cpu"))
    assert wrong_shapes(inputs) == []


@pytest.mark.process
def test_samples_of_a_stage_on_disk(finished_run: Path) -> None:
    store = StageStore(finished_run / "stages/00000")
    found = [sample for update in range(2) for sample in store.read_update(update)]
    assert found
    assert [line for sample in found for line in wrong_shapes(sample)] == []


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("behaviour", torch.zeros(4)),
        ("behaviour", torch.zeros(3, dtype=torch.int64)),
        ("advantages", torch.zeros(3)),
        ("ref", torch.zeros(3, 1)),
    ],
)
def test_another_shape_or_dtype_is_found(field: str, values: torch.Tensor) -> None:
    inputs = random_batch(0, [2, 1]).inputs(ObjectiveSection())
    lines = wrong_shapes(replace(inputs, **{field: values}))  # type: ignore[arg-type]
    assert lines, "at this field, or at those of another length that come after it"


def test_another_dtype_of_a_response_is_found() -> None:
    ids, logprobs = np.zeros(3, np.int64), np.zeros(3, np.float32)
    assert [line.partition(":")[0] for line in wrong_shapes(Response(ids, logprobs, "stop", 0))] == ["ids"]


def test_a_prompt_and_a_response_may_have_different_lengths() -> None:
    ids, logprobs = np.zeros(3, np.int32), np.zeros(3, np.float32)
    sample = Sample(0, "p", np.zeros(5, np.int32), ids, logprobs, 1.0, 0, "stop")
    assert wrong_shapes(sample) == []
    assert wrong_shapes(replace(sample, prompt_ids=np.zeros((5, 1), np.int32))) != []
