"""Starts one program of `rollout.agent` for `mugrpo train --dry-run`, and ends it at its first request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from mugrpo_megatron.data.prompts import messages_to_render, template_of, with_question_asked
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.episodes.agent import Agent
from mugrpo_megatron.extras.episodes.endpoint import Endpoint, Refused, Session
from mugrpo_megatron.extras.episodes.processes import worker_options
from mugrpo_megatron.extras.episodes.turns import EpisodeModel
from mugrpo_megatron.files.scratch import Scratch
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.functions import exception_text
from mugrpo_megatron.samples import Problem

TRIAL_S = 60.0
"""Longest seconds to wait for the first request."""


class _Listener(Endpoint):
    """An endpoint that keeps the outcome of the first request for a completion."""

    def __init__(self) -> None:
        super().__init__()
        self.first: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The outcome: empty for a good request, else the reason for which it was refused."""

    async def _completed(self, session: Session, receive: Any) -> dict[str, Any] | str:
        try:
            return await super()._completed(session, receive)
        except Refused as refusal:
            self.hear(str(refusal))
            raise

    def hear(self, refusal: str) -> None:
        if not self.first.done():
            self.first.set_result(refusal)


def try_agent(recipe: Recipe, problems: Sequence[Problem]) -> str:
    """Start the program on the first problem and end it at its first request; returns a line about it.

    Raises UserError for a program that cannot be loaded, or that fails before it asks the model.
    """
    problem = with_question_asked(problems[0], template_of(recipe.data))
    with Scratch("trial") as directory, ThreadPoolExecutor(1) as threads:
        return asyncio.run(_first_request(recipe, problem, str(directory), threads))


async def _first_request(recipe: Recipe, problem: Problem, directory: str, threads: ThreadPoolExecutor) -> str:
    listener = _Listener()

    async def ask(*_: Any, **__: Any) -> Any:
        listener.hear("")
        await asyncio.Event().wait()

    rollout = recipe.rollout
    sampling = {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k or -1}
    model = EpisodeModel(problem, [], "", messages_to_render(problem), sampling, ask, threads)
    agent = Agent({**worker_options(recipe, directory), "memory_mb": recipe.episodes.memory_mb}, listener)
    episode = asyncio.ensure_future(agent.episode(problem, model))
    name, begin = f"rollout.agent {rollout.agent!r}", f"on {problem.id}, before it has asked the model"
    seconds = min(TRIAL_S, recipe.episodes.seconds)
    try:
        await asyncio.wait((episode, listener.first), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if listener.first.done():
            refusal = listener.first.result()
            return (
                f"{name}: its first request is refused: {refusal}" if refusal else f"{name} starts and asks the model"
            )
        if not episode.done():
            return f"{name}: it has not asked the model within {seconds:g} s"
        if error := episode.exception():
            why = str(error) if type(error).__module__.startswith("mugrpo_megatron") else exception_text(error)
            raise UserError(f"{name}: {why} ({begin})")
        return f"{name}: it ends {begin}, and such an episode fails"
    finally:
        episode.cancel()
        with suppress(BaseException):
            await episode
        await agent.close()
