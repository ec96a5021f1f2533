"""The door to SGLang 0.5.15.post1 and 0.5.23: what engine/ uses of it; each difference names the version that ends it.

Importing this module imports neither torch nor SGLang.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any


def has_sessions() -> bool:
    """Whether weights are updated between a call that begins it and one that ends it. Ends with 0.5.15."""
    return tuple(map(int, re.findall(r"\d+", version("sglang"))[:3])) > (0, 5, 15)


def engine_class() -> type:
    """`sglang.Engine`, whose arguments are those of `ServerArgs`."""
    from sglang.srt.entrypoints.engine import Engine

    return Engine  # type: ignore[no-any-return]


async def begin_update(engine: Any) -> None:
    """Let the engine's model take weights; without effect before sessions. RuntimeError if SGLang refuses."""
    if has_sessions():
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        request = BeginWeightUpdateReqInput(selector="target")
        _accepted(await engine.tokenizer_manager.begin_weight_update(request, None), "to begin a weight update")


async def end_update(engine: Any) -> None:
    """Let the engine's model finish the weights that it took, as for a quantised layer. RuntimeError as above."""
    if has_sessions():
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        request = EndWeightUpdateReqInput()
        _accepted(await engine.tokenizer_manager.end_weight_update(request, None), "to end a weight update")


async def update_weights(engine: Any, serialized: list[bytes], load_format: str) -> None:
    """Have `load_format` load what is serialised for each tensor parallel rank. RuntimeError if SGLang refuses.

    `Engine.update_weights_from_tensor` would pickle again what the client has serialised.
    """
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    target = {"selector": "target"} if has_sessions() else {}  # a draft model keeps its own weights
    request = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=serialized, load_format=load_format, flush_cache=False, **target
    )
    _accepted(await engine.tokenizer_manager.update_weights_from_tensor(request, None), "a weight bucket")


def _accepted(answer: tuple[bool, str], what: str) -> None:
    accepted, message = answer
    if not accepted:
        raise RuntimeError(f"the engine refused {what}: {message}")


def of_all_ranks(own: Any) -> list[Any] | None:
    """What each tensor parallel rank of the engine gives, on the first of them; None on the others. Collective."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    ranks = group.all_gather_object(own) if group.world_size > 1 else [own]
    return ranks if group.rank_in_group == 0 else None
