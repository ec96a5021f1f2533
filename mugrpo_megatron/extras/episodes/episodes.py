"""Plays episodes: one loop of the engine leader serves the engine and the processes that run the user's function.

The loop begins further episodes from the prompt queue as long as the engine has room. An episode that waits for a tool
takes no room, so slow tools do not leave the engine idle. The leader keeps the record of the tokens, renders the chat
template and applies the limits, since the user's code is not trusted with these. The processes only run that code.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from mugrpo_megatron.data.fields import TOOLS, row_arguments
from mugrpo_megatron.data.prompts import messages_to_render, template_of, with_question_asked
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.engine.client import Engine, PromptSource
from mugrpo_megatron.engine.wire import Request, SampledGroup, Sampling
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.episodes.chat import Chat, TooLong
from mugrpo_megatron.extras.episodes.endpoint import one_call_of
from mugrpo_megatron.extras.episodes.processes import Asked, Attempt, EpisodeProcess, Group, Pool, worker_options
from mugrpo_megatron.extras.episodes.request_size import MOST_BYTES, MOST_VALUES, size_of, texts_in
from mugrpo_megatron.extras.episodes.trajectory import Broken, Trajectory, continued
from mugrpo_megatron.extras.episodes.turns import PROGRAM, sampling_settings
from mugrpo_megatron.files.json_text import as_text
from mugrpo_megatron.files.scratch import Scratch
from mugrpo_megatron.observe.environment import usable_cores
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.functions import exception_text
from mugrpo_megatron.samples import Episode as Outcome
from mugrpo_megatron.samples import Response

FIRST = 16
"""Until this many episodes have finished, `episodes.max_failure_share` is a share of this number."""
IN_FLIGHT = 16
"""Episodes in flight for each request that the engine runs at a time; most of them wait for tools."""
LOST = "lost"
"""Name, in a response's `parts`, of the share of its group's episodes that have failed."""
RETRIES = 1
"""Number of times that a failed episode is begun again, before it is dropped from its group."""
BYTES_A_TOKEN = 64
"""Most bytes of a request for each token of the context: a longer request cannot fit into the context and is not
rendered."""
TURNS, TOKENS = "episodes.turns", "rollout.max_response_tokens"
CUT: dict[str, Any] = {"reward": None, "why": "", "parts": {}, "cut": True}
"""Result of an episode that a limit has ended."""


class Episodes:
    """Plays the episodes of one engine; `generate` takes prompts and yields groups as `Engine.generate_from` does."""

    def __init__(self, recipe: Recipe, engine: Engine) -> None:
        self._recipe, self._engine, self._section = recipe, engine, recipe.episodes
        self._tokenizer = load_tokenizer(recipe.model.directory)
        self._template = template_of(recipe.data)
        parser = recipe.engine.extra.get("tool_call_parser")
        self._chat = Chat(self._tokenizer, self._template, parser, recipe.longest_sequence)
        limit = max(1, usable_cores() // 2 // engine.slot.local_engines)
        # The leader removes it, because a worker that is killed leaves its programs' files.
        self._scratch = Scratch("agent")
        options = worker_options(recipe, str(self._scratch.path))
        self._key, self._name = options["key"], options["name"]
        self._programs = recipe.episodes.programs if recipe.rollout.agent else math.inf
        self._pool = Pool(options, recipe.episodes, limit, self._programs)
        self._keys = itertools.count()
        self.busy_s, self.total_s = 0.0, 0.0
        """Seconds of `generate` in which the engine had a request, and all seconds of `generate`."""

    def close(self) -> None:
        self._pool.close()
        self._scratch.remove()

    def generate(self, take: PromptSource, n: int, sampling: Sampling) -> Generator[SampledGroup]:
        """Yield groups of `n` episodes as they are completed, until none is in flight and `take` returns no prompt."""
        self._sampling, self._n = sampling, n
        # The longest context, in tokens: the longest prompt and the longest response.
        self._longest = self._recipe.data.max_prompt_tokens + sampling.max_tokens
        # The counts start again with each generation: if they included the thousands of episodes of a stage, an
        # evaluation in which most episodes fail would stay below the share.
        self._finished, self._dropped = 0, 0
        self._groups: dict[int, Group] = {}
        self._requests: dict[int, Asked] = {}
        self._work: list[Request] = []
        self._aborted: list[int] = []
        last_answer = last = time.monotonic()
        silence_s = self._recipe.engine.request_timeout_s
        with self._engine.generation(sampling):
            try:
                while self._take(take):
                    self._pool.place(self._start)
                    self._flush()
                    answers = self._engine.poll_groups(self._pool.connections, 1.0)
                    now = time.monotonic()
                    self.busy_s += (now - last) * bool(self._requests)
                    self.total_s += now - last
                    last = now
                    if answers is None and self._requests and now - last_answer > silence_s:
                        # Raises EngineFailure with the state of the engine's processes.
                        answers = list(self._engine.receive_groups())
                    last_answer = now if answers is not None or not self._requests else last_answer
                    for key, (response,) in answers or ():
                        self._answer(self._requests.pop(key, None), response)
                    for process, message in self._pool.messages():
                        self._handle(process, message)
                    for process, episode, why in self._pool.late(now):
                        self._stop(process, episode, why)
                    self._flush()  # requests go out before the caller spends time on storing finished episodes
                    for group in [group for group in self._groups.values() if all(group.responses)]:
                        del self._groups[id(group)]
                        lost = group.failed / n
                        responses = [_with_part(response, lost) for each in group.responses for response in each]
                        yield SampledGroup(group.prompt, responses)
            finally:
                self._pool.waiting.clear()
                for process in self._pool.processes:
                    for episode in list(process.episodes.values()):
                        self._pool.cancel(process, episode)

    # ------------------------------------------------------------ beginning episodes

    def _take(self, take: PromptSource) -> bool:
        """Begin episodes as long as the engine has room; returns whether any is in flight."""
        at_once = int(min(IN_FLIGHT * self._n * self._engine.slots(self._n), self._programs + self._n))
        while True:
            live = sum(not responses for group in self._groups.values() for responses in group.responses)
            placed = (attempt for process in self._pool.processes for attempt in process.episodes.values())
            idle = sum(not attempt.asked for attempt in itertools.chain(self._pool.waiting, placed))
            in_engine = -(-(len(self._requests) + idle) // self._n)
            room = max(0, at_once - live) // self._n if live else max(1, at_once // self._n)
            prompts = take(in_engine, min(self._engine.slots(self._n), max(1, room // 2))) if room else []
            for prompt in prompts:
                group = Group(prompt, [[] for _ in range(self._n)])
                self._groups[id(group)] = group
                for number in range(self._n):
                    self._begin(group, number)
            if not prompts:
                return bool(self._groups)

    def _begin(self, group: Group, number: int, retries: int = 0, alone: bool = False) -> None:
        self._pool.waiting.append(Attempt(next(self._keys), group, number, retries, alone))

    def _start(self, episode: Attempt) -> dict[str, Any]:
        prompt = episode.group.prompt
        problem = prompt.problem
        names = ("id", "question", "answer", "source", "messages", "gold", "data_source", "row")
        return {
            "start": episode.key,
            "problem": {name: getattr(problem, name) for name in names},
            "prompt_ids": list(prompt.ids),
            "prompt": self._chat.shown(list(prompt.ids)),
            "messages": messages_to_render(with_question_asked(problem, self._template)),
            "sampling": sampling_settings(self._sampling),
        }

    # ------------------------------------------------------------ requests and answers

    def _handle(self, process: EpisodeProcess, message: dict[str, Any]) -> None:
        if "died" in message:
            self._stop(process, None, message["died"])
            return
        kind = next(kind for kind in ("ask", "drop", "done", "failed") if kind in message)
        key = message[kind]
        episode = process.episodes.get(key)
        if episode is None:  # the episode was cancelled meanwhile
            if kind in ("done", "failed"):
                process.cancelled.pop(key, None)
        elif kind == "drop":
            self._drop_requests(episode, message["request"])
        elif "failed" in message:
            process.episodes.pop(key)
            self._fail(episode, message["why"])
        else:
            if "done" in message:
                process.episodes.pop(key)
            with self._errors_of(process, episode, message):
                if "done" in message:
                    self._finish(episode, message)
                elif message["what"] == "encode":
                    self._send(process, message, value=self._chat.encode(message["text"]))
                elif message["what"] == "decode":
                    self._send(process, message, value=self._chat.text(message["ids"]))
                else:
                    self._request(process, episode, message)

    def _send(self, process: EpisodeProcess, message: Mapping[str, Any], **answer: Any) -> None:
        """Send an episode's process the answer to its request."""
        process.send({"answer": message["ask"], "request": message["request"], **answer})

    @contextmanager
    def _errors_of(self, process: EpisodeProcess, episode: Attempt, message: Mapping[str, Any]) -> Iterator[None]:
        """Fail the episode with any error of the block, which handles `message` of the episode's process.

        Chat templates, parsers and tokenizers may raise anything on an episode's texts. Where a program asked, it gets
        the error as the answer to its request instead, and may go on. A UserError is not caught: it ends the run.
        """
        try:
            yield
        except UserError:  # too many episodes have failed
            raise
        except Exception as error:
            why = str(error) if isinstance(error, Broken | ValueError) else exception_text(error)
            if message.get("what") == PROGRAM:
                self._send(process, message, error=why)
                return
            if episode.key in process.episodes:
                self._pool.cancel(process, episode)
            self._fail(episode, why)

    def _request(self, process: EpisodeProcess, episode: Attempt, message: dict[str, Any]) -> None:
        """Queue a request to the engine, or, if a limit is reached, end the episode with the turns that it has.

        Raises Broken if the request's tokens do not begin with those of the response that it continues, and ValueError
        if it is malformed, or if it is the episode's first and longer than `data.max_prompt_tokens`.
        """
        if not episode.in_engine:
            episode.waited_s += time.monotonic() - episode.answered_at
        room = 0
        if episode.asked < self._section.turns:
            try:
                self._check_size(message)
                trajectory, ids = self._continued(episode, message)
                room = trajectory.limit - (len(ids) - len(trajectory.prompt or ids))
            except TooLong:
                if not episode.trajectories:
                    most = self._recipe.data.max_prompt_tokens
                    raise ValueError(
                        f"the episode's first request is too long for data.max_prompt_tokens = {most}: raise that key, "
                        "or shorten the request"
                    ) from None
        if room < 1:
            self._end(process, episode, message)
            return
        key = next(self._keys)
        self._requests[key] = Asked(episode, trajectory, message, ids)
        stream = f"{episode.group.prompt.index}/{episode.number}/{episode.retries}/{episode.asked}"
        most = min(room, message.get("max_tokens") or room)
        self._work.append(Request(key, ids, 1, stream, most, tuple(message.get("stop") or ())))
        trajectory.busy = True
        episode.asked += 1
        episode.in_engine += 1

    def _check_size(self, message: Mapping[str, Any]) -> None:
        """Raise TooLong for a request with too many bytes, values or special tokens to fit into the context."""
        given = [message.get(name) for name in ("messages", "tools", "arguments", "text")]
        # Twice, because the endpoint adds fields to the messages that it has counted.
        size = size_of(given, most := 2 * MOST_VALUES)
        if (
            size.values > most
            or size.bytes > min(BYTES_A_TOKEN * self._longest, MOST_BYTES)
            or self._chat.count_special(texts_in(given)) > self._longest
        ):
            raise TooLong

    def _end(self, process: EpisodeProcess, episode: Attempt, message: Mapping[str, Any]) -> None:
        """End an episode at a limit. A program gets an error and may still write its result; a function is
        cancelled."""
        if message["what"] == PROGRAM:
            key = TURNS if episode.asked >= self._section.turns else TOKENS
            most = self._section.turns if key == TURNS else self._sampling.max_tokens
            episode.limit = key
            self._send(process, message, error=f"the session has ended: {key} = {most} is reached", limit=key)
            return
        self._pool.cancel(process, episode)
        self._finish(episode, CUT)

    def _continued(self, episode: Attempt, message: dict[str, Any]) -> tuple[Trajectory, list[int]]:
        """Find the response that a request continues, or begin a new one; return it with the request's token ids.

        Raises Broken if these do not begin with the response's tokens so far, TooLong for a chat that is longer than
        the longest context, and ValueError for a malformed request, or for an episode's first one if it is longer than
        `data.max_prompt_tokens`.
        """
        if (most := message.get("max_tokens")) is not None and most < 1:
            raise ValueError(f"max_tokens = {most}: ask for at least one token")
        before = episode.trajectories
        if message["what"] != "generate":
            row = row_arguments(episode.group.prompt.problem.row)
            row.pop(TOOLS, None)  # tools of the row are dropped: the function or the program brings those that it runs
            arguments = message.get("arguments", {})
            self._chat.check_arguments(arguments)
            trajectory, ids = continued(before, message["messages"], message["tools"], row, arguments, self._chat)
        else:
            trajectory = before[-1] if before else None
            context = trajectory.context if trajectory else None
            ids = self._chat.encode(message["text"], context) if "text" in message else message["ids"]
        vocabulary, longest = len(self._tokenizer), self._recipe.data.max_prompt_tokens
        if not ids or not all(0 <= token < vocabulary for token in ids):
            raise ValueError(f"a request needs at least one token, and token ids from 0 to {vocabulary - 1}")
        if not before and len(ids) > longest:
            raise ValueError(
                f"the episode's first request has {len(ids)} tokens, and data.max_prompt_tokens is {longest}: raise "
                "that key, or shorten the request"
            )
        if trajectory is None:
            room = min(self._sampling.max_tokens, self._longest - len(ids))
            trajectory = Trajectory(room, message.get("tools", ()), message.get("arguments", {}))
            before.insert(0, trajectory)
        trajectory.check(ids, self._chat.shown)
        return trajectory, list(ids)

    def _flush(self) -> None:
        if self._aborted:
            self._engine.abort(self._aborted)
            self._aborted = []
        if self._work:
            self._engine.submit(self._work)
            self._work = []

    def _answer(self, asked: Asked | None, response: Response) -> None:
        """Record the sampled tokens and send them to the episode's process."""
        if asked is None:
            return
        process = next((process for process in self._pool.processes if asked.attempt.key in process.episodes), None)
        if process is None:  # the episode's process has failed meanwhile
            return
        with self._errors_of(process, asked.attempt, asked.message):
            self._send(process, asked.message, value=self._turn(asked, response))

    def _turn(self, asked: Asked, response: Response) -> dict[str, Any]:
        """Record the sampled tokens; return the answer that the function or the program gets."""
        episode, trajectory, message, ids = asked
        trajectory.busy = False
        trajectory.extend(ids, response)
        episode.trajectories = [other for other in episode.trajectories if other is not trajectory] + [trajectory]
        episode.in_engine -= 1
        episode.answered_at = time.monotonic()
        sampled = response.ids.tolist()
        if message["what"] == "generate":
            return {
                "ids": sampled,
                "logprobs": response.logprobs.tolist(),
                "text": self._chat.text(sampled),
                "finish_reason": response.finish_reason,
            }
        said = json.loads(as_text(self._chat.message(sampled, message["tools"] if message.get("parse", True) else ())))
        if message["what"] == PROGRAM:
            # OpenAI's API returns a turn without the text that stopped it; the recorded tokens keep it.
            stops = [stop for stop in message["stop"] if said["content"].endswith(stop)]
            said["content"] = said["content"].removesuffix(max(stops, key=len, default=""))
            said = one_call_of(said) if message.get("one_call") else said
            episode.calls += len(said.get("tool_calls", ()))
        trajectory.answered(message["messages"], said)
        if message["what"] == "chat":
            return {"message": said, "ids": trajectory.context}
        return {
            "message": said,
            "finish_reason": response.finish_reason,
            "prompt_tokens": len(ids),
            "completion_tokens": len(sampled),
        }

    # ------------------------------------------------------------ how episodes end

    def _finish(self, episode: Attempt, result: Mapping[str, Any]) -> None:
        """Store the responses of an episode that has ended; `result` is its process's message, or CUT.

        Raises Broken if the function returned tokens that do not begin with the recorded ones.
        """
        self._drop_requests(episode)
        answered = [trajectory for trajectory in episode.trajectories[::-1] if trajectory.turns]
        if not answered:
            self._fail(episode, "it ended without asking the model")
            return
        last = answered[0]
        mask = np.array(last.mask, dtype=bool)
        if result.get("tokens"):
            last.check(result["tokens"], self._chat.shown)
            mask_of_function = (result["loss_mask"] or [1] * len(mask))[: len(mask)]
            mask &= np.pad(np.array(mask_of_function, dtype=bool), (0, len(mask) - len(mask_of_function)))
        if result.get("cut"):
            last.finish_reason = "length"
        turns = sum(trajectory.turns for trajectory in answered)
        calls = result.get("calls", 0) + episode.calls
        ours = {
            "turns": turns,
            "calls": calls,
            "called": float(turns > 1 or calls > 0),
            "failed_calls": result.get("failed_calls", 0),
            "tool_seconds": episode.waited_s,
            "retries": episode.retries,
            "responses": len(answered),
        }
        # A metric of the user whose name is one of the built-in metrics is kept under said_NAME.
        said = {f"said_{name}" if name in (*ours, LOST) else name: value for name, value in result["parts"].items()}
        parts = {name: float(value) for name, value in (said | ours).items()}
        prompt = np.array(last.prompt, dtype=np.int32)
        outcome = Outcome(prompt, mask, result["reward"], result["why"], parts=parts, answer=result.get("answer"))
        episode.group.responses[episode.number] = [each.response(outcome, each is not last) for each in answered]
        self._finished += 1

    def _fail(self, episode: Attempt, why: str) -> None:
        """Begin a failed episode again, or drop it after RETRIES; if a limit has ended it, store the turns that it has.

        In place of a dropped episode its group gets a response of one token, which is not trained on. Raises UserError
        if too large a share of the episodes was dropped.
        """
        if episode.limit and any(trajectory.turns for trajectory in episode.trajectories):
            self._finish(episode, CUT)
            return
        self._drop_requests(episode)
        if episode.retries < RETRIES:
            self._begin(episode.group, episode.number, episode.retries + 1, episode.alone)
            return
        self._dropped += 1
        episode.group.failed += 1
        prompt = np.array(episode.group.prompt.ids, dtype=np.int32)
        parts = {"retries": float(episode.retries)}
        outcome = Outcome(prompt, np.zeros(1, dtype=bool), None, f"the episode failed: {why}", failed=True, parts=parts)
        end = np.array([self._tokenizer.eos_token_id], dtype=np.int32)
        support_ids = np.full((1, self._sampling.top_k), -1, dtype=np.int32) if self._sampling.support_ids else None
        if support_ids is not None:
            support_ids[:, 0] = end
        nothing = np.zeros(1, dtype=np.float32)
        response = Response(end, nothing, "stop", self._engine.version, support_ids=support_ids, episode=outcome)
        episode.group.responses[episode.number] = [response]
        self._finished += 1
        share = self._section.max_failure_share
        if self._dropped > share * max(FIRST, self._finished):
            raise UserError(
                f"{self._key} {self._name!r}: {self._dropped} of {self._finished} episodes failed, the last one on "
                f"{episode.group.prompt.problem.id}: {why}; fix the {self._key.removeprefix('rollout.')}, or raise "
                f"episodes.max_failure_share (now {share:g})"
            )

    def _drop_requests(self, episode: Attempt, number: int | None = None) -> bool:
        """Abort all of an episode's requests in the engine, or the one with a given number; returns whether there were
        any."""
        keys = {
            key
            for key, asked in self._requests.items()
            if asked.attempt is episode and number in (None, asked.message["request"])
        }
        for key in keys:
            self._requests.pop(key).trajectory.busy = False
            episode.in_engine -= 1
        unsent = {request.key for request in self._work} & keys
        self._work = [request for request in self._work if request.key not in unsent]
        self._aborted += keys - unsent
        return bool(keys)

    def _stop(self, process: EpisodeProcess, episode: Attempt | None, why: str) -> None:
        """End an episode that took too long, or, if `episode` is None, the whole process.

        The episodes of an ended process are begun again. If it ran a single episode, that one is the cause and fails.
        An episode whose session a limit had ended fails too, so that its turns are stored (`_fail`).
        """
        if episode is not None:
            self._pool.cancel(process, episode)
            self._fail(episode, why)
            return
        if process not in self._pool.processes:
            return
        if not process.ready:
            raise UserError(f"a process of {self._key} {self._name!r} did not start: {why}")
        episodes = self._pool.discard(process)
        for attempt in episodes:
            innocent = self._drop_requests(attempt)
            if len(episodes) == 1 or attempt.limit:
                self._fail(attempt, why)
            else:
                self._begin(attempt.group, attempt.number, attempt.retries, attempt.alone or not innocent)


def _with_part(response: Response, lost: float) -> Response:
    """The response, with `lost`, the share of its group's episodes that have failed, among its parts."""
    assert response.episode
    return replace(response, episode=replace(response.episode, parts={**response.episode.parts, LOST: lost}))
