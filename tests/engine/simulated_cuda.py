"""SGLang's `ServerArgs` on a machine that claims to have eight H200s: `python -m tests.engine.simulated_cuda`.

Reads a JSON list of keyword arguments from stdin and prints what SGLang makes of each. A process of its own, because it
replaces functions of torch and modules that only CUDA machines have. No kernel runs and no model is loaded.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import MagicMock

import torch

H200 = types.SimpleNamespace(
    major=9, minor=0, name="NVIDIA H200", total_memory=150_754_820_096, multi_processor_count=132
)
NVIDIA_SMI = '#!/bin/sh\ncase "$*" in *memory*) echo 143771 ;; *) echo "NVIDIA H200" ;; esac\n'
"""SGLang asks this program for the size of the memory."""
ONLY_ON_CUDA = ("sgl_kernel", "sentencepiece")


class Stub(types.ModuleType):
    """A module in which every name exists."""

    __version__ = "0.4.4"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of CUDA machines."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        wanted = fullname.split(".")[0] in self.names
        return importlib.util.spec_from_loader(fullname, self, is_package=True) if wanted else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


def simulate(stubs: Sequence[str] = ONLY_ON_CUDA) -> None:
    """Let torch and the import system answer as on such a machine, with stubs of these modules."""
    torch.version.cuda = "13.0"
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "get_device_capability": lambda *_, **__: (H200.major, H200.minor),
        "get_device_properties": lambda *_, **__: H200,
        "get_device_name": lambda *_: H200.name,
        "current_device": lambda: 0,
        "device_count": lambda: 8,
    }
    for name, function in replaced.items():
        setattr(torch.cuda, name, function)
    sys.meta_path.insert(0, Stubs(stubs))


def facts(arguments: dict[str, Any]) -> dict[str, Any]:
    """What the engine would do with these arguments."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import ServerArgs

    raw: Any = ServerArgs(**arguments)
    getattr(raw, "resolve_once", bool)()  # SGLang 0.5.15 makes its choices in the constructor
    made: Any = resolved_view(raw)
    graphs = made.cuda_graph_config
    model = ModelConfig.from_server_args(raw)
    scheme = Fp8Config.from_config(model.hf_config.quantization_config) if model.quantization else None
    return {
        "device": made.device,
        "attention": made.attention_backend,
        "decode_graph": graphs.decode.backend,
        "largest_decode_graph": graphs.decode.max_bs,
        "decode_graphs": len(graphs.decode.bs),
        "prefill_graph": graphs.prefill.backend,
        "fused_all_reduce": made.flashinfer_allreduce_fusion_backend,
        "memory_saver": made.enable_memory_saver,
        "overlap": not made.disable_overlap_schedule,
        "base_gpu_id": made.base_gpu_id,
        "deterministic": made.enable_deterministic_inference,
        "sampler": made.sampling_backend,
        "custom_all_reduce": not made.disable_custom_all_reduce,
        "prefix_cache": not made.disable_radix_cache,
        "seed": SamplingParams(sampling_seed=3).sampling_seed,
        "load_format": made.load_format,
        "quantization": model.quantization,
        "blocks": scheme and scheme.weight_block_size,
        "serialized": scheme and scheme.is_checkpoint_fp8_serialized,
        "fp8_gemm": made.fp8_gemm_runner_backend,
        "experts": made.moe_runner_backend,
    }


if __name__ == "__main__":
    simulate()
    print(json.dumps([facts(arguments) for arguments in json.load(sys.stdin)]))
