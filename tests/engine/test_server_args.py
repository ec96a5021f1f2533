"""The launch arguments as SGLang's own ServerArgs understands them on a simulated H200; one process for all cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from mugrpo_megatron.checks.layouts import bundled_configs
from mugrpo_megatron.engine.launch import engine_arguments
from mugrpo_megatron.engine.placement import ALONE
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.engine_spec import engine_spec
from tests.engine.simulated_cuda import NVIDIA_SMI

pytestmark = pytest.mark.process

QWEN2_7B = bundled_configs()["Qwen2.5-7B"] | {
    "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
}  # fmt: skip
QWEN3_MOE = bundled_configs()["Qwen3-30B-A3B"] | {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu", "torch_dtype": "bfloat16",
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "512": (QWEN2_7B, "bfloat16", {"max_running_requests": 512}),
    "tensor": (QWEN2_7B, "bfloat16", {"max_running_requests": 512, "tensor": 4}),
    "2048": (QWEN2_7B, "bfloat16", {"max_running_requests": 2048, "between_stages": "restart"}),
    "float32": (QWEN2_7B, "float32", {}),
    "chosen": (QWEN2_7B, "float32", {"extra": {"attention_backend": "flashinfer"}}),
    "experts": (QWEN3_MOE, "bfloat16", {"tensor": 2}),
    "deterministic": (QWEN2_7B, "bfloat16", {"tensor": 2}),
    "fp8": (QWEN2_7B, "bfloat16", {"quantization": "fp8"}),
    "fp8 experts": (QWEN3_MOE, "bfloat16", {"tensor": 2, "quantization": "fp8"}),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("simulated")
    smi = folder / "nvidia-smi"
    smi.write_text(NVIDIA_SMI)
    smi.chmod(0o755)
    arguments = []
    for name, (config, dtype, engine) in CASES.items():
        model = folder / name
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config))
        (model / "model.safetensors").touch()
        recipe = Recipe.model_validate(
            {
                "run": {"deterministic": dtype == "float32" or name == "deterministic"},
                "model": {"path": model, "dtype": dtype},
                "data": {"max_prompt_tokens": 1024},
                "rollout": {"max_response_tokens": 3000},
                "engine": engine,
            }
        )
        arguments.append(engine_arguments(engine_spec(recipe), model, cuda=True, slot=replace(ALONE, gpu=2)))
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.simulated_cuda"],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_decode_graphs_reach_what_is_decoded_together(found: dict[str, dict[str, Any]]) -> None:
    largest = {name: one["largest_decode_graph"] for name, one in found.items()}
    assert largest == dict.fromkeys(CASES, 1024) | {"512": 512, "tensor": 512}
    assert {one["decode_graph"] for one in found.values()} == {"full"}
    assert max(one["decode_graphs"] for one in found.values()) < 80, "each is captured at every start"
    assert {one["prefill_graph"] for one in found.values()} == {"disabled"}


def test_half_precision_attention_is_not_given_float32(found: dict[str, dict[str, Any]]) -> None:
    assert [found[name]["attention"] for name in ("512", "float32", "chosen")] == ["fa3", "triton", "flashinfer"]


def test_devices_and_memory(found: dict[str, dict[str, Any]]) -> None:
    assert {(one["device"], one["base_gpu_id"], one["overlap"]) for one in found.values()} == {("cuda", 2, True)}
    assert [found[name]["memory_saver"] for name in ("512", "2048")] == [True, False]
    assert {one["fused_all_reduce"] for one in found.values()} == {None}


def test_a_deterministic_engine(found: dict[str, dict[str, Any]]) -> None:
    """SGLang takes a backend that is alike in every batch, its own sampler, and a fixed order between the ranks."""
    one, other = found["deterministic"], found["tensor"]
    assert (one["deterministic"], one["attention"], one["sampler"], one["custom_all_reduce"]) == (
        True, "fa3", "pytorch", False,
    )  # fmt: skip
    assert (other["deterministic"], other["custom_all_reduce"]) == (False, True)
    assert one["prefix_cache"], "generation of a group shares its prompt"
    assert one["seed"] == 3, "a request may have its own"


def test_fp8_weights_are_blocks_that_nothing_rearranges(found: dict[str, dict[str, Any]]) -> None:
    """SGLang takes the scheme from the changed config, as from that of an fp8 checkpoint."""
    for name in ("fp8", "fp8 experts"):
        assert found[name]["quantization"] == "fp8"
        assert found[name]["blocks"] == [128, 128]
        assert found[name]["serialized"] is True
        assert (found[name]["fp8_gemm"], found[name]["experts"]) == ("triton", "triton")
        assert found[name]["load_format"] == "dummy"
    assert found["512"]["quantization"] is None
