"""The learner on the device that there is against the same learner on the CPU, in a process that sees no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mugrpo_megatron.extras.plan.case import make_case
from mugrpo_megatron.extras.plan.hardware import Assumptions, make_cluster
from mugrpo_megatron.extras.plan.memory import PackedRows, learner_memory
from mugrpo_megatron.learner import checkpoint
from mugrpo_megatron.learner.groups import shutdown
from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.learner.update import token_logprobs, update
from mugrpo_megatron.samples import Sample
from tests import models
from tests.gpu.tiny import CUDA
from tests.gpu.tiny import save_model as save_qwen3
from tests.learner.tiny import VOCAB, advantages, recipe, samples, save_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.process

ON_CPU = "from tests.gpu.test_learner import two_updates; import json, sys; print(json.dumps(two_updates(sys.argv[1])))"


def two_updates(model: str, dtype: str = "float32") -> list[list[float]]:
    """Loss and gradient norm of two updates, then the log-probabilities after them."""
    learner = build_learner(recipe(Path(model), model={"dtype": dtype}))
    data = samples()
    found = []
    for _ in range(2):
        metrics = update(learner, data, advantages(len(data)))
        found.append([metrics["loss"], metrics["grad_norm"]])
    after = np.concatenate(token_logprobs(learner, data)).tolist()
    shutdown()
    return [*found, after]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("routed")
    models.save_model(directory, "qwen3_moe", vocab_size=VOCAB, moe_intermediate_size=16, num_hidden_layers=2)
    return directory


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("qwen3"))


def on_cpu(model: Path) -> list[list[float]]:
    """`two_updates` in float32, in a process that sees no GPU."""
    if not torch.cuda.is_available():
        return run_ranks(1, two_updates, str(model))[0]  # type: ignore[no-any-return]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", ON_CPU, str(model)], env=hidden, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["model", "routed"])
def test_updates_are_those_of_the_cpu(kind: str, request: pytest.FixtureRequest) -> None:
    model: Path = request.getfixturevalue(kind)
    for found, known in zip(two_updates(str(model)), on_cpu(model), strict=True):
        np.testing.assert_allclose(found, known, rtol=2e-3, atol=2e-3)


def test_updates_in_bfloat16_are_near_those_in_float32_on_the_cpu(qwen3: Path) -> None:
    """On a GPU the first one to try: flash attention, Triton's kernels and products of narrow inputs."""
    for found, known in zip(two_updates(str(qwen3), "bfloat16"), on_cpu(qwen3), strict=True):
        np.testing.assert_allclose(found, known, rtol=0.05, atol=0.05)


@pytest.mark.gpu
def test_transformer_engine_takes_the_updates_of_the_local_layers(model: Path) -> None:
    """In bfloat16, which Transformer Engine multiplies in as Megatron's own layers do."""
    pytest.importorskip("transformer_engine")
    found = {}
    for layers in ("local", "transformer_engine"):
        learner = build_learner(recipe(model, model={"dtype": "bfloat16"}, learner={"layers": layers}))
        data = samples()
        metrics = [update(learner, data, advantages(len(data))) for _ in range(2)]
        found[layers] = [[row["loss"], row["grad_norm"]] for row in metrics]
        shutdown()
    np.testing.assert_allclose(found["transformer_engine"], found["local"], rtol=0.03, atol=0.03)


@pytest.mark.gpu
def test_updates_in_fp8_are_near_those_in_bfloat16(tmp_path: Path) -> None:
    pytest.importorskip("transformer_engine")
    found = {}
    for layers in ("transformer_engine", "fp8_tensorwise", "fp8_blockwise"):
        chosen = {"layers": layers, "micro_batch_tokens": 4096}
        learner = build_learner(recipe(save_wide(tmp_path), model={"dtype": "bfloat16"}, learner=chosen))
        data = full_rows()
        found[layers] = update(learner, data, advantages(len(data)))
        shutdown()
    for layers in ("fp8_tensorwise", "fp8_blockwise"):
        for name in ("loss", "grad_norm", "entropy"):
            assert found[layers][name] == pytest.approx(found["transformer_engine"][name], rel=0.1, abs=0.01)
        assert found[layers]["grad_norm"] != found["transformer_engine"]["grad_norm"]


def test_a_learner_that_slept_is_the_learner_that_was(model: Path) -> None:
    learner = build_learner(recipe(model))
    data = samples()
    update(learner, data, advantages(len(data)))
    before, awake = token_logprobs(learner, data), torch.cuda.memory_allocated()
    learner.offload("optimizer")
    learner.offload("weights")
    moved = sum(copy.bytes for copies in learner.offloaded.values() for copy in copies)
    # cuBLAS keeps a workspace of 32 MiB, more than this model; a CPU has no other memory to move to.
    assert awake - torch.cuda.memory_allocated() >= 0.9 * moved or not CUDA
    learner.reload()
    for found, known in zip(token_logprobs(learner, data), before, strict=True):
        np.testing.assert_array_equal(found, known)
    shutdown()


def test_a_checkpoint_holds_what_the_device_held_when_it_began(model: Path, tmp_path: Path) -> None:
    """Training goes on between the copy and the writing."""
    learner = build_learner(recipe(model, model={"dtype": "bfloat16"}))
    data = samples()
    update(learner, data, advantages(len(data)))
    before = token_logprobs(learner, data)
    place = {"run": "r", "cursor": {"stage": 1, "age": 0, "updates": 4}}
    write = checkpoint.begin_save(learner, tmp_path / "c", place, copy=True)
    update(learner, data, advantages(len(data)))
    write()
    assert place.items() <= checkpoint.load(learner, tmp_path / "c").items()
    for found, known in zip(token_logprobs(learner, data), before, strict=True):
        np.testing.assert_array_equal(found, known)
    shutdown()


@pytest.mark.gpu
def test_planned_memory_is_what_the_device_holds(tmp_path: Path) -> None:
    """Full rows of 16,384 tokens through a model whose activations outweigh everything that is not planned."""
    path = save_wide(tmp_path)
    chosen = recipe(path, learner={"micro_batch_tokens": 16384, "loss_chunk_tokens": 1024}, model={"dtype": "bfloat16"})
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    learner = build_learner(chosen)
    state = torch.cuda.memory_allocated() - before
    data = full_rows()
    update(learner, data, advantages(len(data)))
    torch.cuda.reset_peak_memory_stats()
    update(learner, data, advantages(len(data)))
    peak = torch.cuda.max_memory_allocated() - before - state
    case = make_case(chosen, learner.architecture, {}, make_cluster(1, 1, "h200"), Assumptions())
    planned = learner_memory(case, PackedRows(16384, 1), pp_stage=0)
    shutdown()
    assert planned.state.total == pytest.approx(state, rel=0.02)
    assert planned.update == pytest.approx(peak, rel=0.1)


def save_wide(directory: Path) -> Path:
    models.save_model(
        directory,
        scale=None,
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    return directory


def full_rows() -> list[Sample]:
    rng = np.random.default_rng(0)
    return [
        Sample(
            group=index // 4,
            problem=str(index // 4),
            prompt_ids=rng.integers(0, VOCAB, 24).astype(np.int32),
            response_ids=rng.integers(0, VOCAB, 1000).astype(np.int32),
            engine_logprobs=np.zeros(1000, np.float32),
            behaviour_logprobs=rng.normal(-4.5, 0.3, 1000).astype(np.float32),
            reward=float(index % 2),
            weight_version=0,
            finish_reason="length",
        )
        for index in range(16)
    ]
