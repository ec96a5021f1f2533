"""The warm start: what it leaves behind, and that its accuracy is that of greedy decoding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from mugrpo_megatron.commands import sft
from mugrpo_megatron.commands.sft import greedy_accuracy, train, updates_on
from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.learner.packing import TokenSequence
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.policy import SftSection
from tests.learner.tiny import VOCAB, recipe, save_model
from tests.ranks import run_ranks
from tests.refusals import refuses

pytestmark = pytest.mark.process


def warm_start(out: str, **changes: object) -> Recipe:
    sft = {"output": out, "layers": 2, "hidden": 32}
    return Recipe.model_validate(
        {
            "data": {"eval_problems": 20},
            "model": {"dtype": "float32"},
            "learner": {"threads": 1},
            "sft": {**sft, "target_accuracy": 1.0, **changes},
        }
    )


def trained(out: str) -> list[int]:
    """Times of the checkpoint's files after a first and a second call."""
    sft.GENERATED, sft.MAX_UPDATES, times = 500, 30, []
    for _ in range(2):
        train(warm_start(out))
        times.append(max(path.stat().st_mtime_ns for path in (Path(out) / "hf").rglob("*")))
    return times


def test_a_warm_start_loads_with_transformers_and_is_made_once(tmp_path: Path) -> None:
    out = tmp_path / "warm"
    [(first, second)] = run_ranks(1, trained, str(out))
    assert first == second
    model = AutoModelForCausalLM.from_pretrained(out / "hf")
    tokenizer = AutoTokenizer.from_pretrained(out / "hf")
    assert tokenizer.decode(tokenizer.encode("12+34=")) == "12+34="
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    refuses("another recipe", train, warm_start(str(out), hidden=64))


def test_only_bundled_tasks_have_answers_to_imitate(tmp_path: Path) -> None:
    own = warm_start(str(tmp_path)).model_copy(
        update={"data": Recipe.model_validate({"data": {"train": "x.jsonl"}}).data}
    )
    refuses("bundled task", train, own)


@settings(max_examples=50)
@given(epochs=st.integers(1, 9), rows=st.integers(1, 9_999_999), batch=st.integers(1, 512))
def test_every_row_is_learned_epochs_times(epochs: int, rows: int, batch: int) -> None:
    section = SftSection(epochs=epochs, batch=batch)
    if epochs * rows > 99_999 * batch:
        refuses(r"at most 99,999 can be numbered; raise sft\.batch", updates_on, rows, section)
    else:
        assert epochs * rows <= updates_on(rows, section) * batch < epochs * rows + batch


def accuracy(model: str, sequences: list[TokenSequence], sections: dict[str, dict[str, int]]) -> float:
    return greedy_accuracy(build_learner(recipe(Path(model), **sections)), sequences)


@pytest.mark.parametrize(("world", "sections"), [(1, {}), (2, {"parallel": {"tensor": 2}}), (2, {})])
def test_accuracy_is_that_of_greedy_decoding(tmp_path: Path, world: int, sections: dict[str, dict[str, int]]) -> None:
    path = save_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rng = np.random.default_rng(0)
    sequences = []
    for number in range(8):
        ids = rng.integers(0, VOCAB, 4).tolist()
        for _ in range(5):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if number < 2:
            ids[-1] = (ids[-1] + 1) % VOCAB
        sequences.append(TokenSequence(np.array(ids), 4))
    assert run_ranks(world, accuracy, str(path), sequences, sections) == [0.75] * world
