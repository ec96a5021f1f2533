"""How many replicas an engine on CPU has, and the arguments of each.

SGLang's scheduler is one Python process: on short responses it is busy with requests, on long ones with a single
thread's share of the memory's bandwidth. Replicas in processes of their own, which share the host's imports, use the
other cores for both; more threads (`engine.threads`) only speed up the products and the attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mugrpo_megatron.engine.placement import EngineSlot
from mugrpo_megatron.observe.environment import usable_cores
from mugrpo_megatron.recipe.systems import EngineSection

MOST_REPLICAS = 2
"""That `engine.replicas = 0` takes: one host serves them all, and more were not measured."""
LARGEST_WEIGHTS = 1 << 28
"""Bytes of weights up to which it takes more than one; each replica holds its own."""
REPLICA_SEED_STRIDE = 104_729
"""Distance between the random seeds of two replicas."""


def replicas_of(engine: EngineSection, weight_bytes: float, local_engines: int, cores: int | None) -> int:
    """Replicas of each of a node's engines. `cores`: the node's CPU cores where they run on CPU, None on CUDA."""
    if engine.replicas or cores is None or engine.tensor > 1 or weight_bytes > LARGEST_WEIGHTS:
        return engine.replicas or 1
    return max(1, min(MOST_REPLICAS, cores // (local_engines * engine.threads)))


def replicas_here(engine: EngineSection, model_dir: Path, cuda: bool, slot: EngineSlot) -> int:
    """Replicas of the slot's engine on this machine."""
    weight_bytes = sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    return replicas_of(engine, weight_bytes, slot.local_engines, None if cuda else usable_cores())


def replica_arguments(arguments: dict[str, Any], replicas: int) -> list[dict[str, Any]]:
    """Arguments of `sglang.Engine` for each replica: its share of the requests and of the cache, its own random seed.

    `arguments` are those of an engine without replicas.
    """
    if replicas == 1:
        return [arguments]
    own = {"max_running_requests": -(-arguments["max_running_requests"] // replicas)}
    if tokens := arguments.get("max_total_tokens"):
        own["max_total_tokens"] = max(-(-tokens // replicas), arguments["context_length"])
    seed = arguments["random_seed"]
    return [arguments | own | {"random_seed": seed + REPLICA_SEED_STRIDE * number} for number in range(replicas)]
