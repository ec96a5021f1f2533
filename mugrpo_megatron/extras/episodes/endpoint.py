"""The part of OpenAI's chat API that programs need, each session under an address and a key of its own.

An ASGI application. It knows neither tokens nor the engine: a session asks for a message, and this module translates.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mugrpo_megatron.data.files import messages_of
from mugrpo_megatron.files.json_text import as_text, parse_json
from mugrpo_megatron.recipe.functions import exception_text

MODEL = "policy"
BODY_BYTES = 8 << 20
REQUESTS = 64
"""Requests of one session at a time."""
NEUTRAL = {"n": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "logprobs": (False,), "logit_bias": ({},)}
"""Settings that change what is sampled or returned -> values at which they do not."""
ROLES = ("system", "developer", "user", "assistant", "tool")

Ask = Callable[..., Awaitable[dict[str, Any]]]
"""(messages, tools, parse, max_tokens, stop) -> the model's answer. Raises ValueError for what it refuses."""


@dataclass(slots=True)
class Session:
    """A program's access to the model."""

    ask: Ask
    sampling: Mapping[str, tuple[float, ...]]
    """Values that a request may set for temperature and top_p."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    calls: int = 0
    requests: int = 0
    """Requests that wait for an answer."""


class Refused(Exception):
    """A request that is answered with an error of OpenAI's form."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Endpoint:
    """Serves the sessions in `sessions`, by id, as an ASGI application."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        try:
            status, body = 200, await self._answer(scope, receive)
        except Refused as refusal:
            status, body = refusal.status, refusal.body
        except Exception as error:
            status, body = 500, Refused(exception_text(error), 500).body
        kind = b"text/event-stream" if isinstance(body, str) else b"application/json"
        # What is left of an unread body would be read as the next request.
        headers = [(b"content-type", kind), *([(b"connection", b"close")] if status != 200 else ())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": as_text(body).encode()})

    async def _answer(self, scope: dict[str, Any], receive: Any) -> dict[str, Any] | str:
        """The body of the answer, the text of a stream where the request asks for one."""
        session = self._session(scope)
        method, path = scope["method"], scope["path"].split("/", 3)[3]
        known = {"v1/models": "GET", f"v1/models/{MODEL}": "GET", "v1/chat/completions": "POST"}
        if path not in known:
            raise Refused(f"there is no {scope['path']}; use chat.completions and models", 404, "not_found")
        if method != known[path]:
            raise Refused(f"{method} is not allowed on /{path}", 405, "method_not_allowed")
        if method == "GET":
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "mugrpo"}
            return model if path.endswith(MODEL) else {"object": "list", "data": [model]}
        try:
            body = parse_json(await _body(receive))
        except ValueError as error:
            raise Refused(f"the body is not JSON ({error})") from None
        request = request_of(body, session)
        if session.requests >= REQUESTS:
            raise Refused(f"{REQUESTS} requests of the session wait for an answer", 429, "rate_limit_exceeded")
        session.requests += 1
        try:
            answer = await session.ask(**request)
        except ValueError as error:
            raise Refused(str(error)) from None
        finally:
            session.requests -= 1
        return completion(answer, body, session)

    def _session(self, scope: Mapping[str, Any]) -> Session:
        """The session of a request's path and key. Raises Refused, the same for a wrong id and a wrong key."""
        parts = scope["path"].split("/", 3)
        session = self.sessions.get(parts[2]) if len(parts) == 4 and parts[1] == "s" else None
        keys = [value for name, value in scope["headers"] if name == b"authorization"]
        given = keys[0] if len(keys) == 1 else b""
        key = session.key if session else secrets.token_urlsafe(32)
        if not hmac.compare_digest(given, f"Bearer {key}".encode()) or session is None:
            raise Refused("the key is not the one of this session", 401, "invalid_api_key")
        return session


async def _body(receive: Any) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused("the connection ended within the request")
        body += message.get("body", b"")
        if len(body) > BODY_BYTES:
            raise Refused(f"a body of more than {BODY_BYTES:,} bytes", 413, "request_too_large")
        if not message.get("more_body"):
            return bytes(body)


def request_of(body: Any, session: Session) -> dict[str, Any]:
    """The arguments of `Session.ask`. Raises Refused for what is malformed, or would change the distribution."""
    if not isinstance(body, dict):
        raise Refused("the body is not a JSON object")
    for name, neutral in NEUTRAL.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise Refused(f"{name} = {_short(body[name])} is not supported", param=name)
    for name, values in session.sampling.items():
        if body.get(name) is not None and body[name] not in values:
            raise Refused(
                f"{name} = {_short(body[name])}, and the recipe samples with {values[0]:g}: importance ratios compare "
                "policies at one setting; leave it out",
                param=name,
            )
    if (body.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise Refused("response_format would change what the model samples", param="response_format")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and _is_function(tool) for tool in tools):
        raise Refused("tools is not a list of functions with names", param="tools")
    limits = (body.get(name) for name in ("max_completion_tokens", "max_tokens"))
    most = next((limit for limit in limits if limit is not None), None)
    if most is not None and (not isinstance(most, int) or isinstance(most, bool)):
        raise Refused(f"max_tokens = {_short(most)} is no number of tokens", param="max_tokens")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > 16 or not all(isinstance(text, str) and text for text in stop):
        raise Refused("stop is no list of at most 16 texts", param="stop")
    parse = bool(tools) and body.get("tool_choice") != "none"
    return {"messages": _messages(body), "tools": tools, "parse": parse, "max_tokens": most, "stop": stop}


def _is_function(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return tool.get("type") == "function" and isinstance(function, dict) and isinstance(function.get("name"), str)


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages as chat templates read them: contents are texts, arguments objects, and results name their tool."""
    given, names = body.get("messages"), dict[Any, str]()
    if not isinstance(given, list) or not given:
        raise Refused("messages is not a list of messages", param="messages")
    try:
        messages = [dict(message) for message in messages_of(given)]
    except ValueError as error:
        raise Refused(str(error), param="messages") from None
    for number, message in enumerate(messages, start=1):
        if message["role"] not in ROLES:
            raise Refused(f"message {number} has no role of {', '.join(ROLES)}", param="messages")
        calls = message.get("tool_calls", ())
        if not all(_is_function(call) for call in calls):
            raise Refused(f"message {number} has a call of no function", param="messages")
        message["role"] = "system" if message["role"] == "developer" else message["role"]
        message["content"] = message["content"] or ""
        names |= {str(call.get("id")): call["function"]["name"] for call in calls}
        if message["role"] == "tool":
            message.setdefault("name", names.get(str(message.get("tool_call_id")), ""))
    return messages


def _short(value: Any) -> str:
    return as_text(value)[:100]


def completion(answer: Mapping[str, Any], body: Mapping[str, Any], session: Session) -> dict[str, Any] | str:
    """The answer as OpenAI's completion, or as the stream of one."""
    said, calls = answer["message"], []
    for call in said.get("tool_calls", ()):
        session.calls += 1
        arguments = call["function"]["arguments"]
        function = {"name": call["function"]["name"] or "", "arguments": as_text(arguments)}
        # Nine letters and digits: templates of Mistral take no other id.
        calls.append({"id": f"call{session.calls:05d}", "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": said["content"] or (None if calls else "")}
    message |= {"tool_calls": calls} if calls else {}
    reason = "tool_calls" if calls else answer["finish_reason"]
    usage = {name: answer[name] for name in ("prompt_tokens", "completion_tokens")}
    usage["total_tokens"] = sum(usage.values())
    head: dict[str, Any] = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": MODEL}
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        return {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
    # All of its text in one event, and all of its calls in another.
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": message["content"] or ""}]
    deltas += [{"tool_calls": [{"index": number, **call} for number, call in enumerate(calls)]}] if calls else []
    events: list[Any] = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        events.append({"choices": [], "usage": usage})
    head["object"] = "chat.completion.chunk"
    return "".join(f"data: {json.dumps({**head, **event})}\n\n" for event in events) + "data: [DONE]\n\n"
