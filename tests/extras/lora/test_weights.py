"""What leaves a learner with adapters: merged weights, PEFT's files, a checkpoint; and the reference policy inside."""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.lora.adapters import gather
from mugrpo_megatron.extras.lora.low_rank import LowRank, merge
from mugrpo_megatron.files.torch_dist import read_index
from mugrpo_megatron.learner import checkpoint
from mugrpo_megatron.learner.learner import build_learner, swapped_weights
from mugrpo_megatron.learner.update import token_logprobs, update
from mugrpo_megatron.weights.buckets import build_plan, planned_tensors
from tests import models
from tests.extras.lora.adapted import ALPHA, RANK, adapted, factors, write_adapter, write_files
from tests.learner.tiny import VOCAB, advantages, recipe, samples, save_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.process
CURSOR = {"stage": 1, "age": 2, "updates": 6}
BFLOAT16 = {"model": {"dtype": "bfloat16"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same shape with other weights."""
    directory = tmp_path_factory.mktemp("other")
    models.save_model(directory, seed=1, tie_word_embeddings=True, vocab_size=VOCAB, max_position_embeddings=128)
    return str(directory)


def sent(learner: Any) -> dict[str, torch.Tensor]:
    """What a sync sends, by Hugging Face names."""
    plan = build_plan(learner.models, learner.architecture, 1 << 16)
    return {name: tensor.clone() for name, tensor in planned_tensors(plan, learner.models, learner.architecture)}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def merged_by_hand(base: dict[str, torch.Tensor], adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """W + alpha / r B A of every layer, from a checkpoint's tensors and an adapter's."""
    found = dict(base)
    for name, weight in base.items():
        expert = OF_EXPERT.fullmatch(name)
        module = name.removesuffix(".weight")
        if expert:
            module = expert["module"] + ("" if expert["kind"] == "down" else ".base_layer")
        a, b = (adapter.get(f"base_model.model.{module}.lora_{factor}.weight") for factor in "AB")
        if a is None or b is None:
            continue
        if expert:
            number, experts = int(expert["number"]), len(a) // RANK
            a, b = a[number * RANK :][:RANK], b[:, number::experts]
            if expert["kind"] != "down":
                b = b.chunk(2)[expert["kind"] == "up"]
        found[name] = merge(weight, a, b, ALPHA / RANK).to(weight.dtype)
    return found


def test_a_merge_on_cuda_adds_narrow_matrices_and_rounds_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, a, b = ((torch.randn(*shape) * 0.02).bfloat16() for shape in ((256, 384), (16, 384), (256, 16)))
    exact = (weight.double() + 2 * b.double() @ a.double()).bfloat16()
    wide = merge(weight, a, b, 2.0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    narrow = merge(weight, a, b, 2.0)
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    for found in (narrow, wide.bfloat16()):
        assert (found != exact).double().mean() < 1e-4
        torch.testing.assert_close(found, exact, rtol=2**-7, atol=0)


OF_EXPERT = re.compile(r"(?P<module>.*\.experts)\.(?P<number>\d+)\.(?P<kind>gate|up|down)_proj\.weight")


def what_is_sent(model: str, other: str, sections: dict[str, Any], layers: int = 4 * 7) -> None:
    """At the start the base bit by bit; after updates the merged weights; with a reference policy's weights those
    alone."""
    learner = adapted(model, sections)
    plain = recipe(Path(model), **{name: keys for name, keys in sections.items() if name != "lora"})
    base = sent(build_learner(plain, learner.ranks))
    section = plain.model.model_copy(update={"path": Path(other)})
    ref = build_learner(plain.model_copy(update={"model": section}), learner.ranks)
    theirs = np.concatenate(token_logprobs(ref, samples()))
    start = sent(learner)
    assert start.keys() == base.keys()
    assert all(bits(start[name]) == bits(base[name]) for name in base)
    first = np.concatenate(token_logprobs(learner, samples()))
    for _ in range(2):
        update(learner, samples(), advantages(24))
    moved = np.concatenate(token_logprobs(learner, samples()))
    expected, now = merged_by_hand(base, gather(learner.models)), sent(learner)
    assert all(bits(now[name]) == bits(expected[name]) for name in base)
    assert sum(bits(now[name]) != bits(base[name]) for name in base) == layers
    before = factors(learner)
    with swapped_weights(learner, Path(model)):
        assert np.array_equal(np.concatenate(token_logprobs(learner, samples())), first)
    with swapped_weights(learner, Path(other)):
        assert np.array_equal(np.concatenate(token_logprobs(learner, samples())), theirs)
    assert np.array_equal(np.concatenate(token_logprobs(learner, samples())), moved)
    after = factors(learner)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert not np.array_equal(first, moved)


@pytest.mark.parametrize(
    ("world", "sections"),
    [
        (1, {}),
        (1, BFLOAT16),
        (2, {**BFLOAT16, "parallel": {"tensor": 2}}),
    ],
)
def test_a_sync_sends_the_merged_weights_bit_by_bit(
    world: int, sections: dict[str, Any], model: str, other: str
) -> None:
    run_ranks(world, what_is_sent, model, other, sections)


def merged_at_once(model: str) -> int:
    """The most merged matrices that are alive when another is made, in an update."""
    learner = adapted(model, {})
    alive: list[weakref.ref[torch.Tensor]] = []
    counts: list[int] = []
    merged = LowRank.merged

    def counted(self: LowRank) -> torch.Tensor:
        counts.append(sum(reference() is not None for reference in alive))
        result = merged(self)
        alive.append(weakref.ref(result))
        return result

    with patch.object(LowRank, "merged", counted):
        update(learner, samples(), advantages(24))
    assert len(counts) >= 2 * 4 * 4, "each of four layers in each of four blocks, forward and backward"
    return max(counts)


def test_no_second_model_is_kept(model: str) -> None:
    assert run_ranks(1, merged_at_once, model)[0] <= 1


def computes_what_is_sent(model: str, start: str, other: str) -> None:
    """The learner's log-probabilities are bitwise those of a learner of what is sent."""
    from mugrpo_megatron.weights.hf import save_hf

    learner = adapted(model, BFLOAT16, start=start)
    logprobs = np.concatenate(token_logprobs(learner, samples()))
    save_hf(learner.models, learner.architecture, Path(model), Path(other))
    plain = build_learner(recipe(Path(other), **BFLOAT16), learner.ranks)
    assert np.array_equal(logprobs, np.concatenate(token_logprobs(plain, samples())))


def test_the_merged_forward_pass_is_that_of_the_engine_s_weights(model: str, tmp_path: Path) -> None:
    start = write_adapter(tmp_path / "start", Path(model))
    run_ranks(1, computes_what_is_sent, model, str(start), str(tmp_path / "hf"))


def files_of(model: str, start: str, sections: dict[str, Any]) -> dict[str, Any]:
    learner = adapted(model, sections, start=start)
    assert learner.adapters
    return learner.adapters.files(learner.models)


def check_comes_back(model: str, start: str, folder: Path, world: int, sections: dict[str, Any]) -> Any:
    """PEFT -> the learner -> PEFT, over the ranks of a layout; PEFT's model with what came back."""
    files, *others = run_ranks(world, files_of, model, start, sections)
    assert others == [{}] * (world - 1)
    write_files(folder, files)
    before, after = (Path(path) / "adapter_model.safetensors" for path in (start, folder / "adapter"))
    assert after.read_bytes() == before.read_bytes()
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with_adapter = peft.PeftModel.from_pretrained(base, after.parent)
    state, tensors = peft.get_peft_model_state_dict(with_adapter), load_file(before)
    assert state.keys() == tensors.keys()
    assert all(state[name].equal(tensor) for name, tensor in tensors.items())
    return with_adapter


@pytest.mark.parametrize(("world", "parallel"), [(1, {}), (4, {"tensor": 2, "pipeline": 2})])
def test_an_adapter_comes_back_as_it_was_read(world: int, parallel: dict[str, int], model: str, tmp_path: Path) -> None:
    start = write_adapter(tmp_path / "start", Path(model))
    check_comes_back(model, str(start), tmp_path / "hf", world, {"parallel": parallel})


def train_and_save(model: str, directory: str, sections: dict[str, Any]) -> tuple[list[dict[str, float]], Any]:
    learner = adapted(model, sections)
    for seed in range(2):
        update(learner, samples(seed=seed), advantages(24, seed))
    checkpoint.begin_save(learner, Path(directory), {"run": "r", "cursor": CURSOR}, copy=True)()
    return [update(learner, samples(seed=seed), advantages(24, seed)) for seed in (2, 3)], factors(learner)


def resume(model: str, directory: str, sections: dict[str, Any]) -> tuple[list[dict[str, float]], Any]:
    learner = adapted(model, sections)
    checkpoint.load(learner, Path(directory))
    return [update(learner, samples(seed=seed), advantages(24, seed)) for seed in (2, 3)], factors(learner)


def refused(directory: str, *cases: tuple[str, dict[str, Any]]) -> None:
    """A checkpoint is none of these learners', each of a model and its keys of `[lora]`."""
    ranks = None
    for model, keys in cases:
        learner = build_learner(recipe(Path(model), **({"lora": keys} if keys else {})), ranks)
        ranks = learner.ranks
        with pytest.raises(UserError, match="resume with the model the run was started from"):
            checkpoint.load(learner, Path(directory))


def check_checkpoint(model: str, directory: Path, *layouts: dict[str, Any]) -> None:
    """It has the adapters alone, and goes on bitwise in its own layout and closely in others."""
    [(metrics, final)] = run_ranks(1, train_and_save, model, str(directory), {})
    assert all(".adapter_linear_" in name for name in read_index(directory))
    [(again, same)] = run_ranks(1, resume, model, str(directory), {})
    for ours, theirs in zip(again, metrics, strict=True):
        assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}
    assert all(np.array_equal(same[name], final[name]) for name in final)
    for sections in layouts:
        for found, other in run_ranks(2, resume, model, str(directory), sections):
            assert found[1]["loss"] == pytest.approx(metrics[1]["loss"], rel=1e-3)
            for name in final:
                np.testing.assert_allclose(other[name], final[name], atol=1e-4)


def test_a_checkpoint_goes_on_in_any_layout_but_with_no_other_adapter_and_no_other_base(
    model: str, other: str, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoint"
    check_checkpoint(model, directory, {"parallel": {"tensor": 2}})
    run_ranks(1, refused, str(directory), (model, {"rank": 8}), (model, {}), (other, {"rank": RANK, "alpha": ALPHA}))
