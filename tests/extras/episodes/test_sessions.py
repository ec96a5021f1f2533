"""A thousand sessions of programs that continue, repeat, rewrite and branch, against what the engine was fed.

The programs are generators and the processes a queue; requests, messages, branches, tokens and records are the real
ones. The engine writes down every prompt it gets and every response it gives.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mugrpo_megatron.engine.wire import Request, Sampling
from mugrpo_megatron.extras.episodes.endpoint import Refused, Session, completion, request_of
from mugrpo_megatron.extras.episodes.episodes import Episodes
from mugrpo_megatron.extras.episodes.processes import Attempt
from mugrpo_megatron.extras.episodes.turns import PROGRAM
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.samples import Prompt, Response
from tests.extras.episodes.agents import ADD
from tests.extras.episodes.fake import EOS, TOKENIZER, FakeEngine
from tests.extras.episodes.test_episodes import TOOLS, prompts_of, recipe_of

Program = Generator[list[dict[str, Any]], list[Any], None]
"""Yields requests that are asked at once, and gets their completions."""
Turn = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""Prompt, what was sampled to it, and its logprobs."""
TEXTS = [
    "",
    " ",
    "plain",
    "größer 🙂 ≠ ",
    "<|im_end|>\n<|im_start|>user\nSay 7.",
    "\u202e\x00",
    "a\n\n",
    "</tool_call>",
]
OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}


class Parser:
    """SGLang's parser of Qwen's calls in two lines; the real one takes seconds to import."""

    detector = SimpleNamespace(bot_token="<tool_call>")

    def has_tool_call(self, text: str) -> bool:
        return "<tool_call>" in text

    def parse_non_stream(self, text: str) -> tuple[str, list[Any]]:
        calls = [json.loads(call) for call in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.S)]
        found = [SimpleNamespace(name=call["name"], parameters=json.dumps(call["arguments"])) for call in calls]
        return text.split("<tool_call>")[0], found


class Pool:
    """In the place of the worker processes: runs each attempt's program until it waits for an answer."""

    def __init__(self, program: Callable[[random.Random, list[Any]], Program], seed: int) -> None:
        self._program, self._draw = program, random.Random(seed)
        self.waiting: deque[Attempt] = deque()
        self.connections: list[Any] = []
        self.episodes: dict[int, Attempt] = {}
        self.processes = [self]
        self.cancelled: dict[int, float] = {}
        self.cut: set[str] = set()
        """Attempts that a limit ended: the engine may have answered them since."""
        self._programs: dict[int, Program] = {}
        self._asked: dict[int, tuple[int, int, dict[str, Any]]] = {}
        self._answers: dict[int, list[Any]] = {}
        self._outbox: deque[dict[str, Any]] = deque()
        self._session = Session(None, {"temperature": (1.0,)})  # type: ignore[arg-type]

    def place(self, start: Callable[[Attempt], dict[str, Any]]) -> None:
        while self.waiting:
            attempt = self.waiting.popleft()
            self.episodes[attempt.key] = attempt
            self._programs[attempt.key] = self._program(random.Random(attempt.key), start(attempt)["messages"])
            self._resume(attempt.key, None)

    def _resume(self, key: int, answers: list[Any] | None) -> None:
        try:
            bodies = self._programs[key].send(answers)  # type: ignore[arg-type]
        except StopIteration:
            attempt = self.episodes[key]
            self._outbox.append({"done": key, "reward": 1.0, "why": "", "parts": {}, "cut": bool(attempt.limit)})
            return
        self._answers[key] = [None] * len(bodies)
        for place, body in enumerate(bodies):
            number = len(self._asked)
            self._asked[number] = (key, place, body)
            try:
                asked = request_of(json.loads(json.dumps(body)), self._session)
            except Refused as refusal:
                self.send({"request": number, "error": str(refusal)})
                continue
            self._outbox.append({"ask": key, "request": number, "what": PROGRAM, **asked})

    def send(self, message: Mapping[str, Any]) -> None:
        if "cancel" in message:
            return
        key, place, body = self._asked[message["request"]]
        if "limit" in message:
            attempt = self.episodes[key]
            self.cut.add(f"{attempt.group.prompt.index}/{attempt.number}/{attempt.retries}")
        value = message["error"] if "error" in message else completion(message["value"], body, self._session)
        self._answers[key][place] = value
        if None not in self._answers[key]:
            self._resume(key, self._answers[key])

    def messages(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        for _ in range(len(self._outbox)):
            yield self, self._outbox.popleft()

    def cancel(self, process: Any, episode: Attempt) -> None:
        self.episodes.pop(episode.key, None)
        self.cut.add(f"{episode.group.prompt.index}/{episode.number}/{episode.retries}")

    def late(self, now: float) -> list[Any]:
        return []


class Recorder(FakeEngine):
    """Says what a seed gives, answers in any order, and writes down every prompt and its response."""

    def __init__(self, seed: int) -> None:
        super().__init__(lambda context: "")
        self._draw = random.Random(seed)
        self.fed: dict[str, list[Turn]] = defaultdict(list)
        """Turns of each attempt: index of the prompt, number in the group, and retries."""

    def poll_groups(self, others: Any, timeout_s: float) -> list[tuple[int, list[Response]]] | None:
        self._draw.shuffle(self._waiting)
        count = self._draw.randint(0, len(self._waiting))
        work, self._waiting = self._waiting[:count], self._waiting[count:]
        return [(request.key, [self._response(request)]) for request in work] or None

    def _response(self, work: Request) -> Response:
        text = self._draw.choice(TEXTS)
        for _ in range(self._draw.choice([0, 0, 1, 2])):
            terms = self._draw.choice(["1+2", "ü", '"', "<|im_end|>"])
            text += f'<tool_call>\n{{"name":  "add","arguments":{{"terms": {json.dumps(terms)}}} }}\n</tool_call>'
        ids = TOKENIZER.encode(text, add_special_tokens=False)
        if self._draw.random() < 0.1:  # bytes that are no UTF-8, and special tokens in the middle
            ids += [200, 255, self._draw.choice([EOS, 256])]
        ids = [*ids, EOS][: work.max_tokens] if self._draw.random() < 0.9 else (ids or [65])[: work.max_tokens]
        logprobs = [-self._draw.random() for _ in ids]
        values = np.array(logprobs, np.float32)
        attempt = str(work.seed_key).rpartition("/")[0]
        self.fed[attempt].append((tuple(work.ids), tuple(ids), tuple(values.tolist())))
        return Response(np.array(ids, np.int32), values, self._draw.choice(["stop", "length"]), self.version)


def erratic(draw: random.Random, messages: list[Any]) -> Program:
    """Goes on as libraries do: sends messages again in other forms, repeats, compacts, edits and asks in parallel."""
    tools: Any = draw.choice([[], [ADD], [ADD, OTHER]])
    for _ in range(draw.randrange(1, 6)):
        body: dict[str, Any] = {"messages": messages, "tools": tools}
        body |= draw.choice([{}, {"stop": ["a"]}, {"max_tokens": 7}, {"tool_choice": "none"}, {"temperature": 1.0}])
        asked = [body]
        if draw.random() < 0.2:
            asked = [{**body, "messages": [*messages, {"role": "user", "content": f"{k}"}]} for k in range(3)]
            asked += [body] * draw.randrange(2)
        answers = yield asked
        place = draw.randrange(len(answers))
        if isinstance(answers[place], str):
            return
        messages = [*asked[place]["messages"], answers[place]["choices"][0]["message"]]
        for call in messages[-1].get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": draw.choice(TEXTS)})
        if messages[-1]["role"] == "assistant" or draw.random() < 0.3:
            messages.append({"role": "user", "content": draw.choice(TEXTS)})
        match draw.randrange(8):
            case 0:
                messages = [{"role": "user", "content": f"So far: {draw.choice(TEXTS)}"}]
            case 1:
                messages = messages[:1]
            case 2:
                messages = json.loads(json.dumps(messages))
                for message in messages:
                    message["content"] = [{"type": "text", "text": message["content"] or ""}]
                    for call in message.get("tool_calls") or ():
                        arguments = json.loads(call["function"]["arguments"])
                        call["function"]["arguments"] = json.dumps(arguments, indent=1)
            case 3:
                messages = [{**message, "content": f"{message['content']}!"} for message in messages]
            case 4:
                tools = draw.choice([[], [ADD]])


def turns_of(response: Response) -> Iterator[Turn]:
    """The turns of a stored response."""
    assert response.episode
    prompt, ids = response.episode.prompt_ids.tolist(), response.ids.tolist()
    edges = np.flatnonzero(np.diff(np.concatenate([[0], response.episode.mask.astype(int), [0]])))
    for start, end in edges.reshape(-1, 2).tolist():
        yield (*prompt, *ids[:start]), tuple(ids[start:end]), tuple(response.logprobs[start:end].tolist())
    assert not response.logprobs[~response.episode.mask].any()


def sessions(
    recipe: Recipe, program: Callable[..., Program], groups: int, n: int, seed: int = 5
) -> Iterator[tuple[list[Response], list[Turn], bool]]:
    """Each session's responses, what the engine was fed in it, and whether a limit ended it."""
    source = iter(prompts_of([f"{number}+1" for number in range(groups)]))
    engine = Recorder(seed)
    episodes = Episodes(recipe, engine)  # type: ignore[arg-type]
    episodes.close()
    episodes._pool = pool = Pool(program, seed)  # type: ignore[assignment]

    def take(held: int, slots: int) -> list[Prompt]:
        return list(islice(source, 8))

    how = Sampling(1.0, 1.0, recipe.rollout.max_response_tokens, (EOS,))
    stored = {prompt.index: responses for prompt, responses in episodes.generate(take, n, how)}
    assert len(stored) == groups
    for index, responses in stored.items():
        firsts = [k for k, r in enumerate(responses) if r.episode and not r.episode.scored_with_previous]
        assert len(firsts) == n, "every session of the group has a scored response"
        for number, (start, end) in enumerate(pairwise([*firsts, len(responses)])):
            attempt = f"{index}/{number}/{int(responses[start].episode.parts['retries'])}"  # type: ignore[union-attr]
            yield responses[start:end], engine.fed[attempt], attempt in pool.cut


@pytest.fixture
def program_recipe(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setattr("mugrpo_megatron.engine.sglang_compat.tool_parser", lambda tools, name: Parser())
    (tmp_path / "tools.jinja").write_text(TOOLS, encoding="utf-8")
    recipe = recipe_of(model, "unused")
    rollout = recipe.rollout.model_copy(update={"max_response_tokens": 250, "function": None, "agent": "unused"})
    data = recipe.data.model_copy(update={"chat_template": tmp_path / "tools.jinja", "max_prompt_tokens": 300})
    return recipe.model_copy(update={"rollout": rollout, "data": data})


def test_a_thousand_sessions_store_what_the_engine_was_fed(program_recipe: Recipe) -> None:
    """Every prompt and response of the engine is in exactly one stored response, token by token."""
    shapes: Counter[str] = Counter()
    for responses, fed, cut in sessions(program_recipe, erratic, groups=250, n=4):
        first = responses[0].episode
        assert first
        if first.failed:
            shapes["failed"] += 1
            continue
        turns = Counter(turn for response in responses for turn in turns_of(response))
        assert turns <= Counter(fed)
        assert cut or turns == Counter(fed)
        assert sum(turns.values()) == first.parts["turns"]
        assert {tuple(response.episode.parts.items()) for response in responses} == {tuple(first.parts.items())}
        assert all(len(response.episode.prompt_ids) + len(response.ids) <= 550 for response in responses)
        shapes["cut"] += cut
        shapes["several"] += len(responses) > 1
        prompts = [tuple(response.episode.prompt_ids.tolist()) for response in responses]
        answered = [(*context, *sampled) for context, sampled, _ in fed]
        shapes["forked"] += any(prompt[: len(ids)] == ids for prompt in prompts for ids in answered)
        shapes["calls"] += first.parts["calls"] > 1
    assert shapes["failed"] < 50, shapes
    assert min(shapes[name] for name in ("cut", "several", "forked", "calls")) > 30, shapes


def test_a_session_that_rewrites_nothing_is_one_response(program_recipe: Recipe) -> None:
    def patient(draw: random.Random, messages: list[Any]) -> Program:
        for _ in range(4):
            (answer,) = yield [{"messages": messages, "tools": [ADD]}]
            if isinstance(answer, str):
                return
            message = answer["choices"][0]["message"]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in message.get("tool_calls") or ()
            ]
            messages = [*messages, message, *(results or [{"role": "user", "content": "Go on."}])]

    for responses, fed, _ in sessions(program_recipe, patient, groups=10, n=4):
        assert [turn for response in responses for turn in turns_of(response)] == fed
        assert len(responses) == 1
