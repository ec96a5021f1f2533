"""Compatibility with SGLang 0.5.15.post1 and 0.5.23; importing this module imports neither torch nor SGLang."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from mugrpo_megatron.cpu import sglang as cpu
from mugrpo_megatron.observe.environment import installed_version

MOST_TOP_LOGPROBS = 64
"""Largest top-k whose support ids are read from the top logprobs that SGLang returns with each token."""
MOST_MASKED = 4096
"""Largest top-k whose support ids SGLang returns as sampling masks (`sampling_mask_max_tokens`)."""


def is_new() -> bool:
    """Whether SGLang is newer than 0.5.15: it then has calls around a weight update, and returns sampling masks."""
    version = installed_version("sglang") or ""  # a machine that only reads finished runs may have no SGLang
    return tuple(map(int, re.findall(r"\d+", version)[:3])) > (0, 5, 15)


def has_gated_delta() -> bool:
    """Whether SGLang has the text models with gated delta networks (srt/models/qwen3_5_text.py)."""
    return is_new()


def most_support_ids() -> int:
    """Largest top-k whose support ids the engine can return."""
    return MOST_MASKED if is_new() else MOST_TOP_LOGPROBS


def allow_import_on_cpu() -> None:
    """Make SGLang's engine importable without its package of kernels, which has no wheel for CPU.

    Does nothing for SGLang 0.5.15, which does not import that package on CPU.
    """
    if is_new():
        cpu.name_kernels()


def engine_type(device: str) -> Callable[..., Any]:
    """Import SGLang, which takes seconds, and return what makes an engine on a device, `cpu` or `cuda`."""
    if device == "cpu":
        allow_import_on_cpu()
        return cpu.engine_type()
    from sglang.srt.entrypoints.engine import Engine

    return Engine  # type: ignore[no-any-return]


async def generate(engine: Any, masked: bool, **request: Any) -> list[dict[str, Any]]:
    """Return SGLang's outputs of a request, with its sampling masks if `masked`.

    Masks need a top-k from 2 to `MOST_MASKED`. Raises what SGLang raises for a request that it rejects.
    """
    if not masked:
        return await engine.async_generate(**request)  # type: ignore[no-any-return]
    # `Engine.async_generate` has no parameter `return_sampling_mask`.
    from sglang.srt.managers.io_struct import GenerateReqInput

    masked_request = GenerateReqInput(return_sampling_mask=True, **request)
    return await anext(engine.tokenizer_manager.generate_request(masked_request, None))  # type: ignore[no-any-return]


async def begin_update(engine: Any) -> None:
    """Begin a weight update in versions of SGLang that have this step; RuntimeError if SGLang refuses."""
    if is_new():
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        request = BeginWeightUpdateReqInput(selector="target")
        _check(await engine.tokenizer_manager.begin_weight_update(request, None), "to begin a weight update")


async def end_update(engine: Any) -> None:
    """End a weight update in versions of SGLang that have this step; RuntimeError if SGLang refuses.

    SGLang then computes what it derives from the weights of quantised layers.
    """
    if is_new():
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        request = EndWeightUpdateReqInput()
        _check(await engine.tokenizer_manager.end_weight_update(request, None), "to end a weight update")


async def update_weights(engine: Any, serialized: list[bytes], load_format: str) -> None:
    """Load serialised tensors, one item a tensor parallel rank, with `load_format`; RuntimeError if SGLang refuses."""
    # `Engine.update_weights_from_tensor` is not used, since it serialises its tensors once more
    # (entrypoints/engine.py).
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    # Update the target model, not the draft model of speculative decoding.
    target = {"selector": "target"} if is_new() else {}
    request = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=serialized, load_format=load_format, flush_cache=False, **target
    )
    _check(await engine.tokenizer_manager.update_weights_from_tensor(request, None), "a weight bucket")


async def release_memory(engine: Any, tags: list[str]) -> None:
    """Unmap the memory of `tags`.

    Unlike `Engine.release_memory_occupation`, it can be awaited, so it serves engines that share an event loop.
    """
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

    await engine.tokenizer_manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags), None)


async def resume_memory(engine: Any, tags: list[str]) -> None:
    """Map the memory of `tags` again."""
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

    await engine.tokenizer_manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None)


def _check(reply: tuple[bool, str], request: str) -> None:
    success, message = reply
    if not success:
        raise RuntimeError(f"the engine refused {request}: {message}")


def tool_parser(tools: Sequence[Any], name: str) -> Any:
    """Return SGLang's parser called `name`, which finds calls of `tools` in a text.

    `tools` have the form of OpenAI's chat API. Imports SGLang, which takes seconds.
    """
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)  # this logger prints the model's output
    return FunctionCallParser([Tool.model_validate(_read_by_parsers(tool)) for tool in tools], name)


def _read_by_parsers(tool: Any) -> Any:
    """The parts of a tool that parsers read: name and parameters of a function; another tool is unchanged.

    `Tool` would refuse a description that is no text, and only after the answer has been sampled.
    """
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    return {"type": "function", "function": {key: function[key] for key in ("name", "parameters") if key in function}}


def gather_on_first_rank(value: Any) -> list[Any] | None:
    """Gather `value` from the engine's tensor parallel ranks: the list on the first rank, None on the others."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    values = group.all_gather_object(value) if group.world_size > 1 else [value]
    return values if group.rank_in_group == 0 else None
