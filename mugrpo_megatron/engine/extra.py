"""`[engine.extra]`: further arguments of SGLang's server, checked against the source of the installed SGLang.

The source is read and not imported: that takes a tenth of a second instead of ten, and works in a recipe's check.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError

_SOURCE = "srt/server_args.py"
_PLAIN: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (float, int), "bool": (bool,)}
_WORDS = {"str": "text", "int": "an integer", "float": "a number", "bool": "true or false"}
_BY_RECIPE = {
    "model_path": "model.path",
    "dtype": "model.dtype",
    "tp_size": "engine.tensor",
    "base_gpu_id": "engine.tensor and engine.per_node",
    "context_length": "data.max_prompt_tokens and rollout.max_response_tokens",
    "max_running_requests": "engine.max_running_requests",
    "max_total_tokens": "engine.max_total_tokens",
    "mem_fraction_static": "engine.memory_fraction",
    "enable_memory_saver": "engine.between_stages",
    "attention_backend": "engine.attention_backend",
    "enable_return_routed_experts": "learner.routing_replay",
    "random_seed": "run.seed",
    "enable_deterministic_inference": "run.deterministic",
    "device": "run.device",
    "quantization": "engine.quantization",
    "nnodes": "engine.nodes",
    "preferred_sampling_params": "[rollout]",
}
"""What a key of the recipe decides."""
_BY_PROJECT = {
    **dict.fromkeys(
        ("custom_weight_loader", "load_format", "json_model_override_args", "fp8_gemm_runner_backend"), "weight sync"
    ),
    **dict.fromkeys(
        ("ep_size", "moe_a2a_backend", "ep_num_redundant_experts", "enable_eplb", "init_expert_location"),
        "checking the engine's weights",
    ),
    **dict.fromkeys(("pp_size", "dp_size", "node_rank", "dist_init_addr", "gpu_id_step"), "placing engines"),
    **dict.fromkeys(
        ("skip_tokenizer_init", "tokenizer_path", "grammar_backend", "enable_lora"), "the engine's protocol"
    ),
    **dict.fromkeys(("host", "port", "nccl_port", "skip_server_warmup", "log_level"), "the engine's process"),
    "trust_remote_code": "running no code of a checkpoint",
}
"""What the project needs to be as it is, and for what."""


def check_extra(extra: Mapping[str, Any]) -> None:
    """UserError for a key that SGLang does not know, that the project decides, or whose value has another type.

    Where SGLang is not installed, only the project's own keys are known.
    """
    known = _known() if extra else {}
    for name, value in extra.items():
        key = f"engine.extra.{name}"
        if name in _BY_RECIPE:
            raise UserError(f"{key}: this is decided by {_BY_RECIPE[name]}; set that instead")
        if name in _BY_PROJECT:
            raise UserError(f"{key}: {_BY_PROJECT[name]} depends on it, so it cannot be set; remove it")
        if known and name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see `python -m sglang.launch_server --help`"
            raise UserError(f"{key}: the installed SGLang has no such argument; {hint}")
        if known and not _accepts(known[name], value):
            raise UserError(f"{key} = {value!r}: SGLang takes {_described(known[name])} here")


@cache
def _known() -> Mapping[str, ast.expr]:
    """The fields of the installed SGLang's `ServerArgs` with their types; empty where there is no SGLang."""
    package = find_spec("sglang")
    if package is None or package.origin is None:
        return {}
    tree = ast.parse((Path(package.origin).parent / _SOURCE).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "ServerArgs":
            fields = (one for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name))
            return {one.target.id: _type(one.annotation) for one in fields if isinstance(one.target, ast.Name)}
    return {}


def _type(annotation: ast.expr) -> ast.expr:
    """The type in `A[type, help]`, which is SGLang's short form of Annotated."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("A", "Annotated"):
        parts = annotation.slice
        return parts.elts[0] if isinstance(parts, ast.Tuple) else parts
    return annotation


def _accepts(kind: ast.expr, value: Any) -> bool:
    """Whether a TOML value has the type; one that this does not read accepts everything."""
    if isinstance(kind, ast.Name):
        wanted = _PLAIN.get(kind.id)
        return wanted is None or (isinstance(value, wanted) and (kind.id == "bool" or not isinstance(value, bool)))
    if not isinstance(kind, ast.Subscript):
        return True
    inside = list(kind.slice.elts) if isinstance(kind.slice, ast.Tuple) else [kind.slice]
    match ast.unparse(kind.value):
        case "Optional" | "Union":
            return any(_accepts(one, value) for one in inside)
        case "List" | "list" | "set":
            return isinstance(value, list) and all(_accepts(inside[0], one) for one in value)
        case "Dict" | "dict":
            return isinstance(value, dict)
        case "Literal":
            return value in [ast.literal_eval(one) for one in inside]
    return True


def _described(kind: ast.expr) -> str:
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Optional":
        return _described(kind.slice)
    text = ast.unparse(kind)
    if text.startswith("Literal["):
        return "one of " + text.removeprefix("Literal[").removesuffix("]")
    return _WORDS.get(text, text)
