"""An engine on CPU: replicas, kernels and shared weights. Importing this module imports neither torch nor SGLang.

SGLang's scheduler is one Python process, which leaves cores idle. With short responses most of its time goes into the
handling of requests. With long ones it waits for memory, of whose bandwidth a single thread gets only a part. Replicas
are forked processes of their own, and use the other cores to handle requests and to read memory. More threads in one
process would only speed up matrix products and attention.
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
"""The largest number of replicas: copies of an engine that share its requests, and that one host process starts. More
were not measured."""
LARGEST_WEIGHTS = 1 << 30
"""An engine with more bytes of weights than this has one replica, since each replica holds a copy."""
KV_BYTES = 1 << 29
"""The bytes of KV cache that an engine on CPU may have on any machine."""
KV_SHARE = 16
"""An engine on CPU may have more KV cache than `KV_BYTES` if the cache is at most 1 / 16 of the machine's memory."""
REPLICA_SEED_STRIDE = 104_729
"""Difference between the random seeds of two neighbouring replicas."""
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
"""The kernels of `sgl_kernel` that SGLang 0.5.23 imports by name on CPU."""


def replicas_of(engine: EngineSection, weight_bytes: float, local_engines: int, cores: int | None) -> int:
    """The number of replicas of each engine of a node.

    `cores` is the number of the node's CPU cores if engines run on CPU, and None on CUDA.
    """
    if cores is None or engine.tensor > 1 or weight_bytes > LARGEST_WEIGHTS:
        return 1
    return max(1, min(MOST_REPLICAS, cores // local_engines))


def most_kv_bytes(memory: float) -> int:
    """The largest KV cache, in bytes, that an engine may have on a machine with `memory` bytes."""
    return max(KV_BYTES, int(memory) // KV_SHARE)


def replica_arguments(arguments: dict[str, Any], replicas: int) -> list[dict[str, Any]]:
    """The arguments of `sglang.Engine` for each replica, from the `arguments` of an engine without replicas.

    A replica gets its share of the requests and of the cache, and a random seed of its own.
    """
    if replicas == 1:
        return [arguments]
    limits = {"max_running_requests": -(-arguments["max_running_requests"] // replicas)}
    if tokens := arguments.get("max_total_tokens"):
        limits["max_total_tokens"] = max(-(-tokens // replicas), arguments["context_length"])
    seed = arguments["random_seed"]
    return [arguments | limits | {"random_seed": seed + REPLICA_SEED_STRIDE * number} for number in range(replicas)]


def engine_type() -> Callable[..., Any]:
    """Import SGLang, and return a function that makes a `CpuEngine` from SGLang's arguments.

    A C compiler, if there is one, builds the functions that the engine decodes with; it runs while SGLang is imported.
    """
    from mugrpo_megatron.cpu.kernels import Build

    build = Build()
    from mugrpo_megatron.cpu.forked_engine import CpuEngine

    return partial(CpuEngine, build.wait())


def name_kernels() -> None:
    """Let SGLang 0.5.23 be imported without `sgl_kernel`, whose wheel is for CUDA and takes 600 MB.

    SGLang 0.5.23 imports the `NAMED_KERNELS` of speculative decoding on CPU, although it does not use them there;
    0.5.15 imports none. Remove this function when SGLang no longer imports them.
    """
    if find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = kernels = ModuleType("sgl_kernel")
        vars(kernels).update(dict.fromkeys(NAMED_KERNELS, _no_kernel))


def _no_kernel(*_: Any) -> Any:
    raise RuntimeError(
        "an engine on CPU has no speculative decoding, because SGLang's kernels for it are not installed; remove the "
        "keys speculative_* from engine.extra"
    )


def load_mapped(model: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load weights from a sync's shared memory, and keep that memory mapped until the engine ends."""
    # Mapping 221 MB anew for each sync took 27 ms, as long as a copy (24 ms). Unpickling uses a mapping that exists, so
    # the mappings are kept. Every sync uses the same one or two buffers, so no further memory is kept.
    mapped = model.__dict__.setdefault("mapped", {})
    mapped.update({tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for _, tensor in tensors})
    model.load_weights(tensors)  # type: ignore[operator]
