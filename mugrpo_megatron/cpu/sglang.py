"""An engine on CPU: replicas, kernels and shared weights. Importing this module imports neither torch nor SGLang.

SGLang's scheduler is one Python process: on short responses it is busy with requests, on long ones with a single
thread's share of the memory's bandwidth. Replicas in processes of their own, which share the host's imports, use the
other cores for both; more threads of one process would only speed up the products and the attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mugrpo_megatron.recipe.systems import EngineSection

if TYPE_CHECKING:
    import torch

MOST_REPLICAS = 2
"""Largest number of copies of an engine that share its requests; one host process serves all of them. More copies were
not measured."""
LARGEST_WEIGHTS = 1 << 30
"""Largest weights in bytes for more than one replica, since each replica holds a copy."""
KV_BYTES = 1 << 29
"""KV cache that an engine on CPU may always have."""
KV_SHARE = 16
"""Divisor of the machine's memory that gives the largest KV cache of an engine above `KV_BYTES`."""
REPLICA_SEED_STRIDE = 104_729
"""Distance between the random seeds of two replicas."""
NAMED_KERNELS = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)
"""Kernels that SGLang 0.5.23 imports on CPU."""


def replicas_of(engine: EngineSection, weight_bytes: float, local_engines: int, cores: int | None) -> int:
    """Replicas of each of a node's engines. `cores`: the node's CPU cores where they run on CPU, None on CUDA."""
    if cores is None or engine.tensor > 1 or weight_bytes > LARGEST_WEIGHTS:
        return 1
    return max(1, min(MOST_REPLICAS, cores // local_engines))


def most_kv_bytes(memory: float) -> int:
    """Returns the largest KV cache in bytes of an engine on a machine with `memory` bytes."""
    return max(KV_BYTES, int(memory) // KV_SHARE)


def replica_arguments(arguments: dict[str, Any], replicas: int) -> list[dict[str, Any]]:
    """Arguments of `sglang.Engine` for each replica: a fraction of the requests and of the cache, and its random seed.

    `arguments`: for an engine without replicas.
    """
    if replicas == 1:
        return [arguments]
    limits = {"max_running_requests": -(-arguments["max_running_requests"] // replicas)}
    if tokens := arguments.get("max_total_tokens"):
        limits["max_total_tokens"] = max(-(-tokens // replicas), arguments["context_length"])
    seed = arguments["random_seed"]
    return [arguments | limits | {"random_seed": seed + REPLICA_SEED_STRIDE * number} for number in range(replicas)]


def engine_type() -> Callable[..., Any]:
    """Constructor of a `CpuEngine` from SGLang's arguments; it decodes with functions in C if there is a compiler.

    Imports SGLang, while the C compiler runs.
    """
    from mugrpo_megatron.cpu.kernels import Build

    build = Build()
    from mugrpo_megatron.cpu.forked_engine import CpuEngine

    return partial(CpuEngine, build.wait())


def name_kernels() -> None:
    """Let SGLang 0.5.23 be imported without `sgl_kernel`, whose wheel is for CUDA and takes 600 MB.

    Its speculative decoding imports these functions on CPU, whether or not it decodes so. Ends with a SGLang that does
    not; 0.5.15 imports none.
    """
    if find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = kernels = ModuleType("sgl_kernel")
        vars(kernels).update(dict.fromkeys(NAMED_KERNELS, _no_kernel))


def _no_kernel(*_: Any) -> Any:
    raise RuntimeError("an engine on CPU has no speculative decoding: SGLang's kernels for it are not installed")


def load_mapped(model: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load weights from a sync's shared memory, and keep that memory mapped until the engine ends."""
    # The mappings are kept: to map 221 MB again for each sync took 27 ms, as long as a copy (24 ms). Unpickling finds a
    # mapping that is alive, and a sync uses the same one or two buffers, so no other memory is kept.
    mapped = model.__dict__.setdefault("mapped", {})
    mapped.update({tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for _, tensor in tensors})
    model.load_weights(tensors)  # type: ignore[operator]
