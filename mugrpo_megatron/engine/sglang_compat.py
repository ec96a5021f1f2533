"""Compatibility with SGLang 0.5.15.post1 and 0.5.23: what engine/ uses of it; each difference names the version that
ends it.

Importing this module imports neither torch nor SGLang.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from mugrpo_megatron.cpu import sglang as cpu
from mugrpo_megatron.observe.environment import installed_version

MOST_TOP_LOGPROBS = 64
"""Largest top-k whose tokens are read from the most likely tokens that SGLang returns with each position."""
MOST_MASKED = 4096
"""Largest top-k whose tokens it returns as the sampler's own mask (`sampling_mask_max_tokens`)."""


def is_new() -> bool:
    """Whether SGLang is newer than 0.5.15.

    It then updates weights between a call that begins it and one that ends it, and returns the sampler's masks. Ends
    with 0.5.15.
    """
    found = installed_version("sglang") or ""  # a machine that only reads runs may have none
    return tuple(map(int, re.findall(r"\d+", found)[:3])) > (0, 5, 15)


def most_support_ids() -> int:
    """Largest top-k whose tokens the engine can return, so that a stage keeps them."""
    return MOST_MASKED if is_new() else MOST_TOP_LOGPROBS


def allow_import_on_cpu() -> None:
    """Let SGLang's engine be imported in this process without its kernels, which have no wheel for CPU."""
    if is_new():
        cpu.name_kernels()


def engine_type(device: str) -> Callable[..., Any]:
    """What makes SGLang's engine of the arguments of its `ServerArgs`.

    Imports SGLang, which takes seconds.
    """
    if device == "cpu":
        allow_import_on_cpu()
        return cpu.engine_type()
    from sglang.srt.entrypoints.engine import Engine

    return Engine  # type: ignore[no-any-return]


async def generate(engine: Any, masked: bool, **request: Any) -> list[dict[str, Any]]:
    """SGLang's outputs of a request, with the sampler's masks where it is `masked`.

    Masks need 1 < top-k <= MOST_MASKED. Raises what SGLang raises for a request that it rejects.
    """
    if not masked:
        return await engine.async_generate(**request)  # type: ignore[no-any-return]
    from sglang.srt.managers.io_struct import GenerateReqInput  # `async_generate` does not pass this argument on

    whole = GenerateReqInput(return_sampling_mask=True, **request)
    return await anext(engine.tokenizer_manager.generate_request(whole, None))  # type: ignore[no-any-return]


async def begin_update(engine: Any) -> None:
    """Let the engine's model take weights; without effect before sessions. RuntimeError if SGLang refuses."""
    if is_new():
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        request = BeginWeightUpdateReqInput(selector="target")
        _accepted(await engine.tokenizer_manager.begin_weight_update(request, None), "to begin a weight update")


async def end_update(engine: Any) -> None:
    """Let the engine's model finish the weights that it took, as for a quantised layer. RuntimeError as above."""
    if is_new():
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        request = EndWeightUpdateReqInput()
        _accepted(await engine.tokenizer_manager.end_weight_update(request, None), "to end a weight update")


async def update_weights(engine: Any, serialized: list[bytes], load_format: str) -> None:
    """Have `load_format` load what is serialised for each tensor parallel rank. RuntimeError if SGLang refuses.

    `Engine.update_weights_from_tensor` would pickle again what the client has serialised.
    """
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    target = {"selector": "target"} if is_new() else {}  # a draft model keeps its own weights
    request = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=serialized, load_format=load_format, flush_cache=False, **target
    )
    _accepted(await engine.tokenizer_manager.update_weights_from_tensor(request, None), "a weight bucket")


def _accepted(answer: tuple[bool, str], what: str) -> None:
    accepted, message = answer
    if not accepted:
        raise RuntimeError(f"the engine refused {what}: {message}")


def tool_parser(tools: Sequence[Any], name: str) -> Any:
    """SGLang's parser of the calls of these tools, JSON schemas as in OpenAI's chat API. Imports SGLang: seconds."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    return FunctionCallParser([Tool.model_validate(tool) for tool in tools], name)


def of_all_ranks(own: Any) -> list[Any] | None:
    """What each tensor parallel rank of the engine gives, on the first of them; None on the others. Collective."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    ranks = group.all_gather_object(own) if group.world_size > 1 else [own]
    return ranks if group.rank_in_group == 0 else None
