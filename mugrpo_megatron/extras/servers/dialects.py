"""Writes requests for responses by token ids, and reads ids and log-probabilities from replies, for each protocol.

    sglang        POST /generate          SGLang's own server (entrypoints/http_server.py, managers/io_struct.py)
    vllm, openai  POST /v1/completions    vLLM's own server (entrypoints/openai/completion/protocol.py), and every
                                          other that returns the same fields

A request has every setting that changes what is sampled, since SGLang and vLLM take a setting that it lacks from the
model's generation_config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.extras.servers.connection import Connection, ServerRefusal
from mugrpo_megatron.extras.servers.replies import Reply
from mugrpo_megatron.samples import Prompt

Dialect = Literal["sglang", "vllm", "openai"]
TOKEN = "token_id:"
"""Prefix of a token's name where a server names tokens by their ids (vLLM's `return_tokens_as_token_ids`)."""
NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says about itself."""

    dialect: Dialect
    names: tuple[str, ...]
    """Names of the models that the server serves."""
    context: int | None
    """Most tokens of prompt and response together; None where the server does not say."""
    version: str
    """Version of the server; empty where the server does not say."""


async def ask_what_is_served(connection: Connection) -> Served:
    """Ask a server for its protocol, models, context and version.

    Raises ServerTrouble while it starts, and ServerRefusal if it is no server of these kinds.
    """
    models = await connection.get("/v1/models")
    info = await _said(connection, "/model_info") or await _said(connection, "/get_model_info")
    version = await _said(connection, "/version")
    rows = models.get("data") if isinstance(models, dict) else None
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    names = tuple(row["id"] for row in rows if isinstance(row.get("id"), str))
    contexts = [row["max_model_len"] for row in rows if type(row.get("max_model_len")) is int]
    text = version.get("version") if isinstance(version, dict) else None
    said = names, min(contexts, default=None), text if isinstance(text, str) else ""
    if isinstance(info, dict) and "is_generation" in info:
        return Served("sglang", *said)
    if names:
        return Served("vllm" if said[2] else "openai", *said)
    raise ServerRefusal(f"{connection.url} names no model at /v1/models, so it is no vLLM, SGLang or OpenAI server")


async def _said(connection: Connection, path: str) -> Any:
    """The JSON value at a path that only some servers have; None if the server has no such path or refuses it."""
    try:
        return await connection.get(path)
    except ServerRefusal:
        return None


def request_of(dialect: Dialect, model: str, prompt: Prompt, n: int, sampling: Sampling) -> tuple[str, dict[str, Any]]:
    """Path and body of a request for `n` responses to one prompt."""
    common = {"n": n, "temperature": sampling.temperature, "top_p": sampling.top_p, "stop": list(sampling.stop)}
    common |= NEUTRAL | {"stop_token_ids": list(sampling.stop_ids), "skip_special_tokens": False}
    if dialect == "sglang":
        settings = common | {"max_new_tokens": sampling.max_tokens, "top_k": sampling.top_k or -1, "no_stop_trim": True}
        return "/generate", {
            "input_ids": prompt.ids,
            "sampling_params": settings,
            "return_logprob": True,
            "logprob_start_len": -1,
        }
    return "/v1/completions", common | {
        "model": model,
        "prompt": prompt.ids,
        "max_tokens": sampling.max_tokens,
        "top_k": sampling.top_k,
        "include_stop_str_in_output": True,
        "add_special_tokens": False,
        # With 0, vLLM returns the sampled token's log-probability alone. Other servers may return none then; with 1
        # they may add that of the likeliest token, which is not read.
        "logprobs": 0 if dialect == "vllm" else 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def read_replies(dialect: Dialect, body: Any, model: str) -> list[Reply]:
    """The responses in a reply's JSON, in the order of their indices; their values are not checked.

    Raises ServerRefusal if fields are missing, if the reply names another model than `model`, or if its
    log-probabilities are of other tokens than its ids.
    """
    if dialect == "sglang":
        return [_of_sglang(row) for row in (body if isinstance(body, list) else [body])]
    rows: Any = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ServerRefusal("its answer has no list `choices` of JSON objects")
    if body.get("model", model) != model:
        raise ServerRefusal(f"it answers with another model than {model}")
    if not all(type(row.get("index", 0)) is int for row in rows):
        raise ServerRefusal("an `index` of its `choices` is not a whole number")
    return [_of_completions(row) for row in sorted(rows, key=lambda row: row.get("index", 0))]


def _of_sglang(row: Any) -> Reply:
    meta = row.get("meta_info") if isinstance(row, dict) else None
    if not isinstance(meta, dict):
        raise ServerRefusal("its answer has no `meta_info`")
    reason = meta.get("finish_reason")
    entries: Any = meta.get("output_token_logprobs")
    pairs = isinstance(entries, list) and all(isinstance(entry, list) and len(entry) >= 2 for entry in entries)
    ids = row.get("output_ids")
    if pairs and isinstance(ids, list) and [entry[1] for entry in entries] != ids:
        raise ServerRefusal("its log-probabilities are of other tokens than its response has")
    return Reply(
        ids,
        [entry[0] for entry in entries] if pairs else None,
        reason.get("type") if isinstance(reason, dict) else reason,
        prompt_tokens=meta.get("prompt_tokens"),
    )


def _of_completions(row: Mapping[str, Any]) -> Reply:
    logprobs = row.get("logprobs")
    logprobs = logprobs if isinstance(logprobs, dict) else {}
    ids = row.get("token_ids")
    names = logprobs.get("tokens")
    if ids is None and isinstance(names, list) and all(isinstance(name, str) for name in names):
        ids = ids_of_names(names)
    if ids is None:
        raise ServerRefusal(
            "it returns no token ids: neither `token_ids` (vLLM's `return_token_ids`) nor tokens named `token_id:N`"
        )
    if logprobs.get("token_logprobs") is None:
        raise ServerRefusal("it returns no log-probabilities of the sampled tokens (`logprobs.token_logprobs`)")
    return Reply(ids, logprobs["token_logprobs"], row.get("finish_reason"), row.get("prompt_token_ids"))


def ids_of_names(names: list[str]) -> list[int] | None:
    """Ids from names such as `token_id:42`; None if a name has another form."""
    digits = [name[len(TOKEN) :] if name.startswith(TOKEN) else "" for name in names]
    named = all(text.isascii() and text.isdecimal() and len(text) < 10 for text in digits)
    return [int(text) for text in digits] if named else None
