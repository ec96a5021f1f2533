"""What the endpoint takes, refuses and counts, without a process: its application is called as a server calls it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.extras.episodes.endpoint import (
    BODY_BYTES,
    CHOICES,
    MOST_REFUSED,
    MOST_SINCE,
    NEUTRAL,
    REQUESTS,
    STOP_CHARS,
    USED,
    WITHOUT_EFFECT,
    Endpoint,
    Refused,
    Session,
    completion,
    request_of,
)
from mugrpo_megatron.extras.episodes.request_size import (
    MOST_BYTES,
    MOST_DEPTH,
    MOST_VALUES,
    size_of,
    texts_in,
    utf8_bytes,
)
from mugrpo_megatron.extras.episodes.turns import Over

PAGE = Path(__file__).parents[3] / "docs/episodes.md"
CHAT = [{"role": "user", "content": "hi"}]
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ANSWER = {"message": {"content": "yes"}, "finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 2}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


def session(ask: Any = None) -> Session:
    return Session(ask, {"temperature": (1.0,), "top_p": (0.9,), "top_k": (20,)})


def refused(**body: Any) -> Refused | None:
    try:
        request_of({"messages": CHAT, **body}, session())
    except Refused as refusal:
        return refusal
    return None


@given(name=st.text(st.characters(codec="ascii", categories=["Ll"]), min_size=1, max_size=9), value=JSON)
def test_a_key_is_used_or_named_or_refused(name: str, value: Any) -> None:
    """None is dropped in silence: a key that nothing lists is refused with its name, unless it is null."""
    known = {*USED, *NEUTRAL, *WITHOUT_EFFECT, "temperature", "top_p", "top_k"}
    if name in known:
        return
    refusal = refused(**{name: value})
    assert (refusal is None) is (value is None)
    assert refusal is None or (refusal.param == name and name in str(refusal))


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        *((name, values[0], "other") for name, values in NEUTRAL.items() if name != "top_k"),
        ("top_k", 20, -1),  # the recipe samples with 20
        ("temperature", 1, 0.7),
        ("top_p", 0.9, 1.0),
        ("tool_choice", "required", "some"),
        ("parallel_tool_calls", True, "no"),
        ("stream_options", {"include_usage": True}, {"continuous_usage_stats": True}),
        ("stream", False, "yes"),
        ("stop", ["a"], ["a" * (STOP_CHARS + 1)]),
        ("max_tokens", 5, True),
        ("max_completion_tokens", 5, "9"),
        ("chat_template_kwargs", {"a": 1}, [1]),
    ],
)
def test_a_setting_is_taken_at_the_recipes_value_alone(key: str, good: Any, bad: Any) -> None:
    assert refused(**{key: good}) is None
    assert refused(**{key: None}) is None
    refusal = refused(**{key: bad})
    assert refusal is not None
    assert refusal.status == 400
    assert refusal.param == key


def test_what_has_no_effect_changes_nothing() -> None:
    plain = request_of({"messages": CHAT}, session())
    for name in WITHOUT_EFFECT:
        assert request_of({"messages": CHAT, name: "x"}, session()) == plain, name


def test_the_page_has_every_key() -> None:
    words = set(re.findall(r"`([a-z_]+)`", PAGE.read_text(encoding="utf-8")))
    assert {*USED, *NEUTRAL, *WITHOUT_EFFECT, "temperature", "top_p"} - {"messages"} <= words | {"messages"}


def test_contents_that_are_null_or_empty_are_empty_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    turns = [
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": [], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": []},
        {"role": "tool", "tool_call_id": "c", "content": None},
        {"role": "system", "content": None},
        {"role": "user", "content": []},
    ]
    messages = request_of({"messages": turns}, session())["messages"]
    assert [message["content"] for message in messages] == [""] * len(turns)
    assert messages[3]["name"] == "add"
    for turn in ({"role": "user"}, {"role": "tool", "content": {}}, {"role": "user", "content": [1]}):
        assert refused(messages=[turn]) is not None, turn


def test_one_call_at_a_time_is_one_call() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    answer = {**ANSWER, "message": {"content": "", "tool_calls": [call] * 3}}
    for parallel, count in ((False, 1), (True, 3), (None, 3)):
        body = {"messages": CHAT, "tools": [ADD], "parallel_tool_calls": parallel}
        assert request_of(body, session())["one_call"] is (count == 1)
        said: Any = completion(answer, body, session())
        assert len(said["choices"][0]["message"]["tool_calls"]) == count


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x" * (MOST_BYTES + 1)}]},
        {"messages": [{"role": "user", "content": "x" * (MOST_BYTES // 100)}] * 101},
        {"messages": [{"role": "user", "content": "語" * (MOST_BYTES // 3 + 1)}]},
        {"messages": [{"role": "user", "content": "\ud800" * (MOST_BYTES // 3 + 1)}]},
        {"messages": [{"role": "user", "content": ""}] * (MOST_VALUES // 2)},
        {"tools": [ADD] * MOST_VALUES},
        {"tools": [{**ADD, "x": "y" * MOST_BYTES}]},
        {"tools": [{**ADD, "y" * MOST_BYTES: 1}]},
        {"tools": [{**ADD, "x": [10**4000] * 300}]},
        {"chat_template_kwargs": {"a": "x" * MOST_BYTES}},
        {"chat_template_kwargs": nested(MOST_DEPTH + 1)},
        {"metadata": [{}] * MOST_VALUES},
        {
            "messages": [
                *CHAT,
                {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "x" * MOST_BYTES}}]},
            ]
        },
    ],
    ids=lambda body: next(iter(body)),
)
def test_a_limit_counts_the_whole_request(body: dict[str, Any]) -> None:
    refusal = refused(**body)
    assert refusal is not None
    assert (refusal.status, refusal.code) == (413, "request_too_large")


@given(JSON)
def test_sizes_are_those_of_the_text(value: Any) -> None:
    size = size_of(value)
    texts = list(texts_in(value))
    assert sum(map(utf8_bytes, texts)) <= size.bytes
    # An integer's digits are estimated from its bits: a ninth more at most, and two.
    assert size.bytes <= 1.12 * utf8_bytes(json.dumps(value, ensure_ascii=False)) + len(texts) + 2 * size.values
    assert size.values == 1 + _inner(value)


def _inner(value: Any) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return len(inner) + sum(map(_inner, inner))


class Client:
    """A server's side of requests to the application."""

    def __init__(self, ask: Any) -> None:
        self.endpoint, self.session = Endpoint(), session(ask)
        self.endpoint.sessions[self.session.id] = self.session
        self.unread = 0
        """Pieces of the latest body that the application had not read when it answered."""

    async def post(self, body: bytes, gone: asyncio.Event | None = None, pieces: int = 1) -> tuple[int, Any]:
        """(status, body) of the answer; the client closes its connection at `gone`."""
        size = -(-len(body) // pieces) or 1
        messages = [
            {"type": "http.request", "body": body[at : at + size], "more_body": at + size < len(body)}
            for at in range(0, len(body) or 1, size)
        ]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop(0)
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": f"/s/{self.session.id}/v1/chat/completions",
            "headers": [(b"authorization", f"Bearer {self.session.key}".encode())],
        }
        await self.endpoint(scope, receive, send)
        self.unread = len(messages)
        return sent[0]["status"], json.loads(sent[1]["body"])


GOOD = json.dumps({"messages": CHAT}).encode()


async def answering(**_: Any) -> Any:
    return ANSWER


def test_a_limit_that_ends_the_session_is_named_in_every_later_answer() -> None:
    async def ask(**_: Any) -> Any:
        raise Over("the session has ended: episodes.turns = 2 is reached", "episodes.turns")

    async def play() -> list[tuple[int, Any]]:
        client = Client(ask)
        answers = [await client.post(GOOD) for _ in range(MOST_SINCE)]
        assert client.session.over.is_set()
        assert not client.session.deaf.is_set()
        await client.post(GOOD)
        assert client.session.deaf.is_set(), "a program that goes on to ask is not waited for"
        return answers

    for status, body in asyncio.run(play()):
        assert status == 409
        assert body["error"]["code"] == "episodes.turns"
        assert "episodes.turns" in body["error"]["message"]


def test_a_session_of_refused_requests_ends() -> None:
    async def ask(**_: Any) -> Any:
        raise ValueError("the chat template refuses the messages")

    async def play() -> list[int]:
        client = Client(ask)
        return [(await client.post(GOOD))[0] for _ in range(MOST_REFUSED + 1)]

    assert asyncio.run(play()) == [400] * MOST_REFUSED + [409]


def test_nobody_waits_for_the_answer_to_a_client_that_has_gone() -> None:
    """Its request is cancelled, so that the engine's can be aborted, and the others have their answers."""
    cancelled: list[int] = []

    async def play() -> None:
        ready, gone, free = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def ask(messages: Any, **_: Any) -> Any:
            ready.set()
            try:
                await free.wait()
            except asyncio.CancelledError:
                cancelled.append(len(messages))
                raise
            return ANSWER

        client = Client(ask)
        first = asyncio.ensure_future(client.post(GOOD, gone))
        second = asyncio.ensure_future(client.post(json.dumps({"messages": CHAT * 2}).encode()))
        await ready.wait()
        gone.set()
        assert (await first)[0] == 400
        assert client.session.requests == 1
        free.set()
        assert (await second)[0] == 200
        assert client.session.requests == 0

    asyncio.run(play())
    assert cancelled == [1]


def test_a_body_that_is_too_large_is_read_to_its_end_and_an_endless_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that still sends when its connection is closed is reset, and may never read the answer."""
    monkeypatch.setattr("mugrpo_megatron.extras.episodes.endpoint.DISCARDED_BYTES", BODY_BYTES)

    async def play() -> None:
        client = Client(answering)
        assert (await client.post(b"x" * (BODY_BYTES + 8), pieces=16))[0] == 413
        assert client.unread == 0
        assert (await client.post(b"x" * (4 * BODY_BYTES), pieces=16))[0] == 413
        assert client.unread > 0
        assert client.endpoint._held == 0

    asyncio.run(play())


def test_bodies_are_counted_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mugrpo_megatron.extras.episodes.endpoint.HELD_BYTES", BODY_BYTES)

    async def play() -> None:
        client = Client(answering)
        assert (await client.post(b"x" * (BODY_BYTES + 1), pieces=7))[0] == 413
        halves = [asyncio.ensure_future(client.post(b" " * (BODY_BYTES // 2) + GOOD, pieces=3)) for _ in range(3)]
        statuses = sorted([(await half)[0] for half in halves])
        assert statuses[0] == 200 or statuses[-1] == 429
        assert client.endpoint._held == 0
        assert (await client.post(GOOD))[0] == 200
        client.session.requests = REQUESTS
        assert (await client.post(GOOD))[0] == 429, "before the body is read"

    asyncio.run(play())


def test_no_choice_of_a_tool_is_forced() -> None:
    for choice in (*CHOICES, {"type": "function", "function": {"name": "add"}}):
        request = request_of({"messages": CHAT, "tools": [ADD], "tool_choice": choice}, session())
        assert request["parse"] is (choice != "none")


def hostile(draw: random.Random) -> bytes:
    """A request that no program should send: wrong types, floods in any place, damaged JSON, or raw bytes."""
    many = draw.choice([*[1] * 5, *[300] * 10, 40_000])
    long = draw.choice([*[1] * 10, *[10_000] * 10, 1_100_000])
    flood = draw.choice(["x", "<|im_end|>", "\u0000", "\U0001f642", "{{ 7 * 7 }}", "\\", '"'])
    text = flood * (long // len(flood) + 1)
    kinds: list[Callable[[], Any]] = [
        lambda: draw.choice([None, True, -1, 10**400, 1e308, "", [], {}, text]),
        lambda: [[]] * many,
        lambda: [{}] * many,
        lambda: {str(k): k for k in range(many)},
        lambda: [text[:20]] * many,
        lambda: nested(draw.choice([3, 60, 900])),
        lambda: [{**ADD, "x": text[:99]}] * many,
    ]

    def value() -> Any:
        return draw.choice(kinds)()

    call = {"type": "function", "function": {"name": "add", "arguments": draw.choice(["{", text, "[]"])}}
    message = {"role": draw.choice(["user", "assistant", "tool", "king"]), "content": value(), "tool_calls": [call]}
    body: dict[str, Any] = {"messages": draw.choice([CHAT, [*CHAT, message], CHAT * many])}
    for _ in range(draw.randrange(4)):
        body[draw.choice([*USED, *NEUTRAL, *WITHOUT_EFFECT, "temperature", text, "functions"])] = value()
    raw = json.dumps(body, ensure_ascii=draw.random() < 0.5).encode()
    match draw.randrange(8):
        case 0:
            place = draw.randrange(len(raw))
            raw = raw[:place] + draw.choice([b"", b"\xff", b"}", b"\x00", b"\\ud800"]) + raw[place + 1 :]
        case 1:
            raw = draw.choice([b"[" * long, b"{" * long, b'"' * long, draw.randbytes(1000), b"NaN", b""])
    return raw


def test_three_hundred_hostile_requests() -> None:
    """Each is answered, good ones with the model's answer and others with an error of OpenAI's form."""
    asked: list[dict[str, Any]] = []

    async def ask(**request: Any) -> Any:
        asked.append(request)
        return ANSWER

    async def play() -> Counter[int]:
        client, draw, statuses, slowest = Client(ask), random.Random(80), Counter[int](), 0.0
        for _ in range(300):
            raw, begin = hostile(draw), time.thread_time()
            status, body = await client.post(raw, pieces=draw.choice([1, 3]))
            slowest = max(slowest, time.thread_time() - begin)
            statuses[status] += 1
            if status != 200:
                assert set(body["error"]) == {"message", "type", "param", "code"}
                assert body["error"]["message"]
                assert len(body["error"]["message"]) < 1000
        assert (await client.post(GOOD))[0] == 200
        print(f"{dict(statuses)}, the slowest took {slowest:.2f} CPU seconds")
        return statuses

    statuses = asyncio.run(play())
    assert set(statuses) <= {200, 400, 413}
    for request in asked:
        sent = [request[name] for name in ("messages", "tools", "arguments", "stop")]
        size = size_of(sent)
        assert size.bytes <= MOST_BYTES
        assert size.values <= MOST_VALUES + 5
