"""Serves the part of OpenAI's chat API that programs need; each session has an address and a key of its own.

The endpoint is an ASGI application. It knows neither tokens nor the engine: it translates a request into a call of
`Session.ask`, and the model's message into OpenAI's form. A key of a request is used, has no effect
(`WITHOUT_EFFECT`, and the values in `NEUTRAL`), or is refused; docs/episodes.md has the table.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mugrpo_megatron.data.files import messages_of
from mugrpo_megatron.extras.episodes.request_size import check_size
from mugrpo_megatron.extras.episodes.turns import Over
from mugrpo_megatron.files.json_text import as_text, parse_json
from mugrpo_megatron.recipe.functions import exception_text

MODEL = "policy"
BODY_BYTES = 4 << 20
"""Most bytes of a request: enough for `MOST_BYTES` of text, or for 699,000 characters that JSON escapes as 6 bytes."""
DISCARDED_BYTES = 64 << 20
"""Most bytes that are read and dropped of a request that is too large, before it is refused."""
HELD_BYTES = 256 << 20
"""Most bytes of all requests together that are being read."""
REQUESTS = 64
"""Most requests of a session that are open at a time."""
MOST_REFUSED = 64
"""Number of refused requests that ends a session."""
MOST_SINCE = 16
"""Number of requests to a session that has ended, after which the worker no longer waits for the program's result."""
STOPS, STOP_CHARS = 16, 1024
"""Most texts of `stop`, and most characters of each."""
USED = (
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "max_completion_tokens",
    "max_tokens",
    "stop",
    "stream",
    "stream_options",
)
"""Keys of a request that this module reads."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Keys of a request that change what is sampled or returned -> the values that are accepted, since they change
nothing."""
WITHOUT_EFFECT = (
    "model",
    "user",
    "seed",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
"""Keys that are accepted with any value and change nothing: there is one model, and each response has a random stream
of the run's own."""
CHOICES = ("auto", "none", "required")
ROLES = ("system", "developer", "user", "assistant", "tool")

Ask = Callable[..., Awaitable[dict[str, Any]]]
"""Takes what `request_of` returns, as keyword arguments, and gives the model's answer; ValueError for a refusal."""


@dataclass(slots=True)
class Session:
    """A program's access to the model during one episode."""

    ask: Ask
    sampling: Mapping[str, tuple[float, ...]]
    """Values that a request may set for temperature, top_p and the like."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    calls: int = 0
    requests: int = 0
    """Number of requests that are being read or wait for an answer."""
    limit: str | None = None
    """What has ended the session: the recipe key of a limit, or a phrase about refused requests."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the session has ended: every later request is refused."""
    deaf: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the program has sent MOST_SINCE requests to the session that has ended."""
    refused: int = 0
    """Number of refused requests that were well formed."""
    asked_since: int = 0
    """Number of requests since the session has ended."""

    def end(self, limit: str) -> None:
        self.limit = limit
        self.over.set()

    def refuse(self) -> None:
        """Count a refused request, and end the session at MOST_REFUSED: each costs work of the engine's leader."""
        self.refused += 1
        if self.refused >= MOST_REFUSED:
            self.end(f"{MOST_REFUSED} refused requests")

    def ask_again(self) -> None:
        """Count a request to a session that has ended."""
        self.asked_since += 1
        if self.asked_since >= MOST_SINCE:
            self.deaf.set()


class Refused(Exception):
    """Raised for a request that is answered with an error in OpenAI's format."""

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
        self._held = 0
        """Bytes of the requests that are being read."""

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
        # Close the connection after an error: the unread rest of a body would be read as the next request.
        headers = [(b"content-type", kind), *([(b"connection", b"close")] if status != 200 else ())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": as_text(body).encode()})

    async def _answer(self, scope: dict[str, Any], receive: Any) -> dict[str, Any] | str:
        """The body of the answer: JSON, or the text of an event stream if the request asks for a stream."""
        session = self._session(scope)
        method, path = scope["method"], scope["path"].split("/", 3)[3]
        known = {"v1/models": "GET", f"v1/models/{MODEL}": "GET", "v1/chat/completions": "POST"}
        if path not in known:
            raise Refused(f"there is no {_short(scope['path'])}; use chat.completions and models", 404, "not_found")
        if method != known[path]:
            raise Refused(f"{method} is not allowed on /{path}; use {known[path]}", 405, "method_not_allowed")
        if method == "GET":
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "mugrpo"}
            return model if path.endswith(MODEL) else {"object": "list", "data": [model]}
        with self._counted(session):
            return await self._completed(session, receive)

    async def _completed(self, session: Session, receive: Any) -> dict[str, Any] | str:
        try:
            body = parse_json(await self._body(receive))
        except ValueError as error:
            raise Refused(f"the body is not JSON ({error})") from None
        request = request_of(body, session)
        if session.over.is_set():
            session.ask_again()
            raise _over(session.limit)
        asked = asyncio.ensure_future(session.ask(**request))
        # The request is cancelled once the program has closed its connection.
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((asked, gone), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise Refused("the connection ended before the answer")
            return completion(asked.result(), body, session)
        except Over as error:
            if error.limit:
                session.end(error.limit)
            raise _over(error.limit, str(error)) from None
        except ValueError as error:
            session.refuse()
            raise Refused(str(error)) from None
        finally:
            asked.cancel()
            gone.cancel()

    @contextmanager
    def _counted(self, session: Session) -> Iterator[None]:
        if session.requests >= REQUESTS:
            raise Refused(
                f"{REQUESTS} requests of the session wait for an answer; wait for one of them before the next",
                429,
                "rate_limit_exceeded",
            )
        session.requests += 1
        try:
            yield
        finally:
            session.requests -= 1

    async def _body(self, receive: Any) -> bytes:
        body = bytearray()
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused("the connection ended within the request")
                piece = message.get("body", b"")
                body += piece
                self._held += len(piece)
                if len(body) > BODY_BYTES:
                    self._held -= len(body)
                    body.clear()
                    await _discard(receive, message)
                    raise Refused(f"the body has more than {BODY_BYTES:,} bytes; shorten it", 413, "request_too_large")
                if self._held > HELD_BYTES:
                    raise Refused(
                        f"the requests that are being read have more than {HELD_BYTES:,} bytes together; send this one "
                        "again later",
                        429,
                        "rate_limit_exceeded",
                    )
                if not message.get("more_body"):
                    return bytes(body)
        finally:
            self._held -= len(body)

    def _session(self, scope: Mapping[str, Any]) -> Session:
        """The session whose id stands in the request's path. Raises Refused for a wrong id or key, and does not say
        which of them is wrong."""
        parts = scope["path"].split("/", 3)
        session = self.sessions.get(parts[2]) if len(parts) == 4 and parts[1] == "s" else None
        keys = [value for name, value in scope["headers"] if name == b"authorization"]
        given = keys[0] if len(keys) == 1 else b""
        key = session.key if session else secrets.token_urlsafe(32)
        if not hmac.compare_digest(given, f"Bearer {key}".encode()) or session is None:
            raise Refused("the API key is not the key of this session", 401, "invalid_api_key")
        return session


async def _discard(receive: Any, message: Mapping[str, Any]) -> None:
    """Read what follows `message`, a piece of a body, up to DISCARDED_BYTES, and keep nothing of it.

    A connection that is closed while its client still sends is reset, and the client may never read the answer.
    """
    dropped = 0
    while message.get("more_body") and dropped < DISCARDED_BYTES:
        message = await receive()
        dropped += len(message.get("body", b""))


async def _disconnected(receive: Any) -> None:
    """Return once the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _over(limit: str | None, why: str = "") -> Refused:
    """The answer to a request of a session that has ended."""
    return Refused(why or f"the session has ended: {limit}", 409, limit or "session_ended", limit)


def request_of(body: Any, session: Session) -> dict[str, Any]:
    """The arguments of `Session.ask` for a request with this body.

    Raises Refused for a body that is malformed or too large, for a key that is not known, and for a value that would
    change what is sampled or returned.
    """
    if not isinstance(body, dict):
        raise Refused("the body is not a JSON object")
    try:
        check_size(body)
    except ValueError as error:
        raise Refused(f"the request has {error}", 413, "request_too_large") from None
    body = {name: value for name, value in body.items() if value is not None}
    _check_settings(body, session.sampling)
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and _is_function(tool) for tool in tools):
        raise Refused("tools is not a list of functions with names", param="tools")
    choice = body.get("tool_choice", "auto")
    if choice not in CHOICES and not isinstance(choice, dict):
        raise Refused(
            f"tool_choice = {_short(choice)} is neither an object nor one of {', '.join(CHOICES)}", param="tool_choice"
        )
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    most = body.get(limit)
    if most is not None and (not isinstance(most, int) or isinstance(most, bool)):
        raise Refused(f"{limit} = {_short(most)} is not a whole number of tokens", param=limit)
    arguments = body.get("chat_template_kwargs", {})
    if not isinstance(arguments, dict):
        raise Refused("chat_template_kwargs is not an object", param="chat_template_kwargs")
    return {
        "messages": _messages(body),
        "tools": tools,
        "parse": bool(tools) and choice != "none",
        "max_tokens": most,
        "stop": _stops(body.get("stop") or []),
        "arguments": arguments,
        "one_call": body.get("parallel_tool_calls") is False,
    }


def _check_settings(body: Mapping[str, Any], sampling: Mapping[str, tuple[float, ...]]) -> None:
    """Raise Refused for a key that is not known, for a setting that would change what is sampled or returned, and for
    a value of the wrong type."""
    for name, value in body.items():
        if name in sampling:
            if value not in sampling[name]:
                raise Refused(
                    f"{name} = {_short(value)}, and the recipe samples with {sampling[name][0]:g}: importance ratios "
                    "compare policies at one setting; leave it out",
                    param=name,
                )
        elif name in NEUTRAL:
            if value not in NEUTRAL[name]:
                raise Refused(f"{name} = {_short(value)} is not supported; leave it out", param=name)
        elif name not in USED and name not in WITHOUT_EFFECT:
            key = _short(name)
            raise Refused(f"{key} is not supported, and nothing would read it; leave it out", param=key)
    for name in ("stream", "parallel_tool_calls"):
        if not isinstance(body.get(name, False), bool):
            raise Refused(f"{name} = {_short(body[name])} is neither true nor false", param=name)
    options = body.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise Refused(
            "stream_options is not an object of include_usage and include_obfuscation alone; leave out all else",
            param="stream_options",
        )


def _stops(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > STOPS
        or not all(isinstance(text, str) and 0 < len(text) <= STOP_CHARS for text in stops)
    ):
        raise Refused(
            f"stop is neither a text nor a list of at most {STOPS} texts, each of 1 to {STOP_CHARS:,} characters",
            param="stop",
        )
    return stops


def _is_function(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return tool.get("type") == "function" and isinstance(function, dict) and isinstance(function.get("name"), str)


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The request's messages in the form that chat templates read.

    Each content is a text, the arguments of a tool call are an object, and the result of a call names its tool.
    """
    given, names = body.get("messages"), dict[Any, str]()
    if not isinstance(given, list) or not given:
        raise Refused("messages is empty, or not a list of messages", param="messages")
    try:
        messages = [dict(message) for message in messages_of(list(map(_with_text, given)))]
    except ValueError as error:
        raise Refused(str(error), param="messages") from None
    for number, message in enumerate(messages, start=1):
        if message["role"] not in ROLES:
            raise Refused(f"the role of message {number} is none of {', '.join(ROLES)}", param="messages")
        calls = message.get("tool_calls", ())
        if not all(_is_function(call) for call in calls):
            raise Refused(f"message {number} has a tool call that is not a function call", param="messages")
        message["role"] = "system" if message["role"] == "developer" else message["role"]
        message["content"] = message["content"] or ""
        names |= {str(call.get("id")): call["function"]["name"] for call in calls}
        if message["role"] == "tool":
            message.setdefault("name", names.get(str(message.get("tool_call_id")), ""))
    return messages


def _with_text(message: Any) -> Any:
    """The message, with "" as its content if that is null or an empty list, or if an assistant's message has none.

    An assistant's message may consist of tool calls alone, an MCP tool that returns nothing gives `[]`, and some
    clients send null for "".
    """
    if not isinstance(message, dict) or message.get("content") not in (None, []):
        return message
    return {**message, "content": ""} if "content" in message or message.get("role") == "assistant" else message


def one_call_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """The model's message with only the first of its tool calls, for a program that takes one call at a time."""
    return {**message, "tool_calls": message["tool_calls"][:1]} if message.get("tool_calls") else dict(message)


def _short(value: Any) -> str:
    return as_text(value)[:100]


def completion(answer: Mapping[str, Any], body: Mapping[str, Any], session: Session) -> dict[str, Any] | str:
    """The answer in the form of OpenAI's chat completion, or of a streamed completion."""
    said, calls = answer["message"], []
    said = one_call_of(said) if body.get("parallel_tool_calls") is False else said
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
    # A stream has all of the message's text in one event, and all of its tool calls in another.
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": message["content"] or ""}]
    deltas += [{"tool_calls": [{"index": number, **call} for number, call in enumerate(calls)]}] if calls else []
    events: list[Any] = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        events.append({"choices": [], "usage": usage})
    head["object"] = "chat.completion.chunk"
    return "".join(f"data: {json.dumps({**head, **event})}\n\n" for event in events) + "data: [DONE]\n\n"
