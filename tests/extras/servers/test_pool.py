"""Servers that take prompts from one queue: each prompt is answered once, whatever a server does."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.servers import pool as pool_module
from mugrpo_megatron.extras.servers.attested import Patience, attested_groups
from mugrpo_megatron.extras.servers.pool import LEAST_UNREAD, UNREAD, Pool, StageRequest
from mugrpo_megatron.extras.servers.replies import Asked
from mugrpo_megatron.samples import Problem, Prompt
from tests.extras.servers.fake import NAME, Fake, Handler, serving
from tests.refusals import refuses

ASKED = Asked(n=2, max_tokens=4, vocab_size=50, ends=frozenset({1}), stop=(), version=0)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(pool_module, "LONGEST_PAUSE_S", 0.01)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(index, Problem(str(index), "q", "a"), [2, 3, index + 4]) for index in range(count)]


def request(timeout_s: float = 60.0, concurrency: int = 4) -> StageRequest:
    return StageRequest(NAME, Sampling(1.0, 1.0, 4, (1,)), ASKED, 8, concurrency, timeout_s)


def answered(fakes: list[Fake], count: int, patience_s: float = 60.0, **kind: Any) -> tuple[list[int], list[str]]:
    """Indices of the prompts in order of their answers, and what was said."""
    said: list[str] = []
    with Pool(lambda: [fake.url for fake in fakes], request(**kind)) as pool:
        groups = attested_groups(pool, prompts(count), None, Patience(patience_s), lambda: False, said.append)
        return [group.prompt.index for group in groups], said


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "openai"])
def test_every_prompt_is_answered_once(dialect: Any) -> None:
    with serving(Fake(dialect)) as fake:
        indices, said = answered([fake], 20)
    assert sorted(indices) == list(range(20))
    assert not said
    assert sorted(fake.prompts) == sorted(prompt.ids for prompt in prompts(20))


@settings(max_examples=10)
@given(st.lists(st.sampled_from(["answer", "die", "half", "busy", "away"]), min_size=1, max_size=30))
def test_a_server_that_fails_loses_and_doubles_nothing(does: list[str]) -> None:
    """The first requests fail in these ways, the later ones succeed."""
    turns, lock = iter(does), threading.Lock()

    def instead(handler: Handler) -> bool:
        with lock:
            now = next(turns, "answer")
        match now:
            case "die":
                return handler.die()
            case "half":
                handler.send_response(200)
                handler.send_header("Content-Length", "1000")
                handler.end_headers()
                handler.wfile.write(b'{"choices": [')
                handler.wfile.flush()
                return handler.die()
            case "busy":
                handler.send(429, {"error": "later"})
            case "away":
                handler.send(502, {"error": "bad gateway"})
        return now != "answer"

    with serving(Fake(instead=instead)) as shaky, serving(Fake("sglang")) as steady:
        for fakes in ([shaky], [shaky, steady]):
            indices, _ = answered(fakes, 12)
            assert sorted(indices) == list(range(12))


def test_a_server_that_comes_back_goes_on() -> None:
    fake, came_back = Fake(), threading.Event()
    with ExitStack() as first:
        first.enter_context(serving(fake))
        port = int(fake.url.rsplit(":", 1)[1])
        with Pool(lambda: [fake.url], request()) as pool, ExitStack() as second:

            def say(line: str) -> None:
                if not came_back.is_set():
                    came_back.set()
                    second.enter_context(serving(fake, port))

            groups = attested_groups(pool, prompts(30), None, Patience(60.0), lambda: False, say)
            indices = [next(groups).prompt.index]
            fake.instead = Handler.die
            first.close()
            fake.instead = lambda handler: False
            indices += [group.prompt.index for group in groups]
    assert sorted(indices) == list(range(30))


def test_a_server_is_waited_for_until_it_has_the_weights() -> None:
    """`mugrpo train --server` writes hf/, and servers load it when they can."""
    fake = Fake(name="run-before")

    def say(line: str) -> None:
        assert f"serves run-before, and the stage needs the weights named {NAME}" in line
        fake.name = NAME

    with serving(fake), Pool(lambda: [fake.url], request()) as pool:
        groups = attested_groups(pool, prompts(5), None, Patience(60.0), lambda: False, say)
        assert sorted(group.prompt.index for group in groups) == list(range(5))


def test_a_server_may_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "JOIN_S", 0.01)
    with serving(Fake(name="another")) as away, serving(Fake("sglang")) as joins:
        urls = [away.url]
        with Pool(lambda: urls, request()) as pool:
            groups = attested_groups(
                pool, prompts(5), None, Patience(60.0), lambda: False, lambda line: urls.append(joins.url)
            )
            assert sorted(group.prompt.index for group in groups) == list(range(5))


def test_patience_ends() -> None:
    with serving(Fake(name="another")) as fake:
        refuses(r"no server has answered for \d+ s \(--patience\).*serves another", answered, [fake], 5, patience_s=0.0)
    refuses(r"no server has answered", answered, [Fake(url="http://127.0.0.1:9")], 5, patience_s=0.0)


def mended(change: Callable[[dict[str, Any]], object]) -> Callable[[Any], Any]:
    """A reply whose second response is changed, in either dialect."""

    def mend(body: Any) -> Any:
        rows = body["choices"] if isinstance(body, dict) else body
        change(rows[1])
        return body

    return mend


def endless(handler: Handler) -> bool:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b"1000\r\n" + b" " * 4096 + b"\r\n")
    except OSError:
        return True


def sends(status: int, content: bytes, **headers: str) -> Callable[[Handler], bool]:
    def instead(handler: Handler) -> bool:
        handler.send_bytes(status, content, **headers)
        return True

    return instead


LIES: dict[str, tuple[Fake, str]] = {
    "endless stream": (Fake(instead=endless), "sends more than"),
    "huge body": (Fake(instead=sends(200, b"[" * (1 << 20))), "sends more than"),
    "deep body": (Fake(instead=sends(200, b"[" * 30_000)), "not JSON"),
    "compressed": (Fake(instead=sends(200, b"x", Content_Encoding="gzip")), "compresses"),
    "redirect": (Fake(instead=sends(307, b"", Location="http://127.0.0.1:1/")), "307"),
    "no text": (Fake(instead=sends(200, b"<html>")), "not JSON"),
    "refusal": (Fake(instead=sends(400, b'{"error": {"message": "too long"}}')), r"400 \(too long\)"),
    "another vocabulary": (Fake(mend=mended(lambda row: row.update(token_ids=[50]))), "the model's ids are 0 to 49"),
    "negative id": (Fake(mend=mended(lambda row: row.update(token_ids=[-1]))), "the token id -1"),
    "true as an id": (Fake(mend=mended(lambda row: row.update(token_ids=[True]))), "the token id True"),
    "no ids": (Fake(mend=mended(lambda row: (row.pop("token_ids"), row["logprobs"].pop("tokens")))), "no token ids"),
    "words for ids": (
        Fake(mend=mended(lambda row: (row.pop("token_ids"), row["logprobs"].update(tokens=["a"])))),
        "no token ids",
    ),
    "other prompt": (
        Fake(mend=mended(lambda row: row.update(prompt_token_ids=[9]))),
        "are not the prompt that it was sent",
    ),
    "longer prompt": (
        Fake("sglang", mend=mended(lambda row: row["meta_info"].update(prompt_tokens=4))),
        "counts 4 tokens in a prompt of 3",
    ),
    "too few": (Fake(mend=lambda body: body | {"choices": body["choices"][:1]}), "1 responses to a prompt, and 2"),
    "too many": (Fake("sglang", mend=lambda body: body * 2), "4 responses to a prompt, and 2"),
    "another model": (Fake(mend=lambda body: body | {"model": "gpt"}), "answers with another model"),
    "infinite": (
        Fake(mend=mended(lambda row: row["logprobs"].update(token_logprobs=[-float("inf")]))),
        "those of sampled tokens are -110 to 0",
    ),
    "NaN": (
        Fake(mend=mended(lambda row: row["logprobs"].update(token_logprobs=[float("nan")]))),
        "those of sampled tokens are -110 to 0",
    ),
    "positive": (
        Fake(mend=mended(lambda row: row["logprobs"].update(token_logprobs=[0.5]))),
        "of 0.5, and those of sampled",
    ),
    "huge integer": (
        Fake(mend=mended(lambda row: row["logprobs"].update(token_logprobs=[-(10**999)]))),
        "those of sampled tokens are -110 to 0",
    ),
    "text for a number": (
        Fake(mend=mended(lambda row: row["logprobs"].update(token_logprobs=["-1"]))),
        "those of sampled tokens are -110 to 0",
    ),
    "no log-probabilities": (Fake(mend=mended(lambda row: row.update(logprobs=None))), "no log-probabilities"),
    "one too many": (
        Fake(mend=mended(lambda row: row["logprobs"].update(token_logprobs=[-1.0, -1.0]))),
        "2 log-probabilities for 1 tokens",
    ),
    "of other tokens": (
        Fake("sglang", mend=mended(lambda row: row.update(output_ids=[2]))),
        "of other tokens than its response has",
    ),
    "finish reason": (Fake(mend=mended(lambda row: row.update(finish_reason="tool_calls"))), "neither `stop` nor"),
    "cut short": (Fake(mend=mended(lambda row: row.update(finish_reason="length"))), "cuts a response after 1 tokens"),
    "a stop of its own": (
        Fake(mend=mended(lambda row: row.update(token_ids=[7]))),
        "ends with token 7, which is no end token of the model: the server has another tokenizer",
    ),
    "goes on": (
        Fake(answers=lambda prompt, settings: [([1, 1], [-1.0, -1.0], "stop")] * 2),
        "goes on after the model's end token",
    ),
    "empty": (Fake(answers=lambda prompt, settings: [([], [], "stop")] * 2), "a response of 0 tokens"),
    "no answer at all": (Fake("sglang", mend=lambda body: {"error": "x"}), "no `meta_info`"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_is_refused_and_the_others_go_on(lie: str) -> None:
    fake, why = LIES[lie]
    with serving(fake):
        refuses(rf"no server can be used: .*{why}", answered, [fake], 3)
        with serving(Fake("sglang")) as honest:
            indices, said = answered([fake, honest], 12)
    assert sorted(indices) == list(range(12))
    assert len(said) <= 1, "it is asked no more"


def test_the_last_error_says_why_each_server_was_refused() -> None:
    one_is_refused, turns = threading.Event(), itertools.count()

    def lies_after_three_answers(handler: Handler) -> bool:
        one_is_refused.wait(60)
        return next(turns) >= 3 and sends(200, b"<html>")(handler)

    def ask(urls: list[str]) -> None:
        with Pool(lambda: urls, request(concurrency=1)) as pool:
            patience = Patience(60.0)
            list(attested_groups(pool, prompts(12), None, patience, lambda: False, lambda line: one_is_refused.set()))

    with serving(Fake(mend=lambda body: body | {"model": "gpt"})) as one, serving(Fake()) as other:
        other.instead = lies_after_three_answers
        refuses(r"no server can be used: .*another model.*; .*not JSON", ask, [one.url, other.url])


def test_a_reply_that_drips_ends_with_the_timeout() -> None:
    ended = threading.Event()

    def drip(handler: Handler) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", "10000")
        handler.end_headers()
        ended.wait(30.0)
        return handler.die()

    with serving(Fake(instead=drip)) as fake:
        try:
            refuses(r"the answer was not complete after 0\.05 s", answered, [fake], 1, patience_s=0.0, timeout_s=0.05)
        finally:
            ended.set()


def test_the_key_is_sent_and_a_wrong_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Fake(key="secret")) as fake:
        refuses("without a key: set MUGRPO_SERVER_KEY", answered, [fake], 1)
        monkeypatch.setenv("MUGRPO_SERVER_KEY", "secret")
        assert answered([fake], 3)[0]
        monkeypatch.setenv("MUGRPO_SERVER_KEY", "guess")
        refuses("refuses a request .401. with the key of MUGRPO_SERVER_KEY", answered, [fake], 1)


def test_a_server_has_a_limited_number_of_requests_at_a_time() -> None:
    running, most, lock = itertools.count(), [0, 0], threading.Lock()

    def answers(prompt: list[int], settings: dict[str, Any]) -> Any:
        with lock:
            most[0] += 1
            most[1] = max(most)
        next(running)
        with lock:
            most[0] -= 1
        return [([1], [-1.0], "stop")] * settings["n"]

    with serving(Fake(answers=answers)) as fake:
        answered([fake], 40, concurrency=3)
    assert 1 <= most[1] <= 3


@pytest.mark.parametrize(("concurrency", "most"), [(1, LEAST_UNREAD), (64, UNREAD * 64)])
def test_a_server_goes_on_until_many_of_its_answers_are_unread(concurrency: int, most: int) -> None:
    """One prompt at a time, too: a batch is collected and checked while the server answers."""
    with serving(Fake()) as fake, Pool(lambda: [fake.url], request(concurrency=concurrency)) as pool:
        pool.put(prompts(most + 2 * concurrency))
        answers = 0
        while answers < most and (events := pool.events(60.0)):
            answers += len(events)
        assert most <= answers <= most + concurrency


def test_a_stop_ends_the_groups() -> None:
    with serving(Fake()) as fake, Pool(lambda: [fake.url], request()) as pool:
        groups = attested_groups(pool, prompts(50), None, Patience(60.0), lambda: True, print)
        assert list(groups) == []


def test_a_body_that_is_no_text_of_a_language_is_refused() -> None:
    fake = Fake(instead=sends(200, json.dumps("\ud800").encode()))
    with serving(fake), pytest.raises(UserError):
        answered([fake], 1)
