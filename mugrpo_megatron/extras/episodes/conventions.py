"""The forms that `rollout.function` may have: our own and slime's, recognised by parameter names, and TRL's classes.

A file that was written for slime works here once its three imports name this module:

    from mugrpo_megatron.extras.episodes.conventions import GenerateState, SlimeSample as Sample, post
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from importlib import import_module
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.episodes.turns import EpisodeModel, current
from mugrpo_megatron.recipe.functions import load_function
from mugrpo_megatron.rewards.callers import verdict_of
from mugrpo_megatron.samples import Problem

EpisodeFunction = Callable[[Problem, EpisodeModel], Awaitable[dict[str, Any]]]
"""Runs one episode. The result is a JSON object with `reward`, `why` and `parts`. A function in slime's form adds
`tokens`, `loss_mask` and `cut`; a program adds `answer`, and `cut` if a limit has ended its session."""
FORMS = "async (problem, model), slime's async (args, sample, sampling_params) or a class with reset, as TRL's"


def load_episode_function(name: str, options: Mapping[str, Any]) -> EpisodeFunction:
    """Load `module:function` and convert it to an `EpisodeFunction`; raises UserError for an unknown form."""
    function = load_function("rollout.function", name)
    if hasattr(function, "reset"):
        return _trl_form(function, name)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise UserError(
            f"rollout.function {name!r} has no signature that can be read ({error}); name a function in Python"
        ) from None
    for names, make in ((("problem", "model"), _own_form), (("args", "sample", "sampling_params"), _slime_form)):
        needed = [name for name, parameter in parameters.items() if _is_needed(parameter)]
        if set(names) <= parameters.keys() and set(needed) <= set(names):
            if not inspect.iscoroutinefunction(function):
                raise UserError(f"rollout.function {name!r} is a plain function: write async def, and await the model")
            return make(function, name, options)
    raise UserError(f"rollout.function {name!r} takes ({', '.join(parameters)}): name its parameters as in {FORMS}")


def _is_needed(parameter: inspect.Parameter) -> bool:
    """Whether the parameter may be given by position and has no default, so that a call must give it a value."""
    return parameter.default is parameter.empty and parameter.kind < parameter.VAR_POSITIONAL


def result_of(returned: Any, name: str) -> dict[str, Any]:
    """An episode's result, made of what its function or program returned. Raises TypeError or ValueError if invalid."""
    verdict = verdict_of(returned, name, may_skip=True)
    return {"reward": verdict.reward, "why": verdict.why, "parts": dict(verdict.parts)}


def _own_form(function: Callable[..., Any], name: str, options: Mapping[str, Any]) -> EpisodeFunction:
    async def run_episode(problem: Problem, model: EpisodeModel) -> dict[str, Any]:
        return result_of(await function(problem=problem, model=model), name)

    return run_episode


def _slime_form(function: Callable[..., Any], name: str, options: Mapping[str, Any]) -> EpisodeFunction:
    # Imported before episodes begin: `GenerateState` needs it, and the seconds of the import would look like an episode
    # that hangs.
    import_module("transformers.models.auto.tokenization_auto")

    async def run_episode(problem: Problem, model: EpisodeModel) -> dict[str, Any]:
        metadata = problem.row.get("metadata")
        sample = SlimeSample(
            prompt=model.prompt,
            label=problem.gold,
            metadata=dict(metadata if isinstance(metadata, dict) else problem.row),
        )
        args = SimpleNamespace(**options["args"])
        returned = await function(args=args, sample=sample, sampling_params=dict(model.sampling))
        if not isinstance(returned, SlimeSample):
            raise TypeError(f"{name} returned a {type(returned).__name__}: return the one Sample that it got")
        if returned.status in (SlimeSample.Status.ABORTED, SlimeSample.Status.FAILED):
            raise RuntimeError(f"{name} returned a sample of status {returned.status.value}, which is a failed episode")
        sampled = {
            "tokens": list(map(int, returned.tokens)),
            "loss_mask": None if returned.loss_mask is None else list(map(int, returned.loss_mask)),
            "cut": returned.status is SlimeSample.Status.TRUNCATED,
        }
        return {**result_of(returned.reward, name), **sampled}

    return run_episode


def _trl_form(factory: Callable[[], Any], name: str) -> EpisodeFunction:
    async def run_episode(problem: Problem, model: EpisodeModel) -> dict[str, Any]:
        environment = await model.apart(factory)
        tools = [
            method
            for attribute, method in inspect.getmembers(environment, inspect.ismethod)
            if not attribute.startswith("_") and attribute != "reset"
        ]
        messages = [dict(message) for message in model.messages]
        row = problem.row or {"question": problem.question, "answer": problem.gold}
        observation = await model.apart(
            environment.reset, **_accepted_columns(environment.reset, {"prompt": messages, **row})
        )
        if observation is not None:
            messages[-1]["content"] += observation
        while True:
            message = await model.chat(messages, tools)
            messages.append(message)
            if not message.get("tool_calls"):
                break
            messages += await model.answer(message, tools)
        reward = getattr(environment, "reward", None)
        return result_of(reward if isinstance(reward, Real) else None, name)

    return run_episode


def _accepted_columns(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that a function accepts: all columns if it takes any keyword, else those that are its parameters."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(columns)
    return {name: value for name, value in columns.items() if name in parameters}


# ------------------------------------------------------------ what functions of slime's form import


@dataclass
class SlimeSample:
    """Stands in for the `Sample` of slime, with those of its fields that have a meaning in this project."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    prompt: Any = ""
    """The prompt's text, as the recipe renders it."""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    index: int | None = None
    tokens: list[int] = field(default_factory=list)
    """Token ids of prompt and response."""
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None
    """Loss mask of the response; a token that the model did not sample is never trained on, whatever the mask says."""
    rollout_log_probs: list[float] | None = None
    """Not read: training uses the log-probabilities that the engine gave."""
    reward: Any = None
    status: Status = Status.PENDING


class GenerateState:
    """Stands in for slime's class: it holds the tokenizer, for functions that make token ids themselves."""

    def __init__(self, args: Any) -> None:
        self.args = args

    @property
    def tokenizer(self) -> Any:
        return _tokenizer(self.args.hf_checkpoint)


@lru_cache(maxsize=1)
def _tokenizer(path: str) -> Any:
    from mugrpo_megatron.data.tokenizer import load_tokenizer

    return load_tokenizer(Path(path))


async def post(url: str, payload: Mapping[str, Any], **_: Any) -> dict[str, Any]:
    """Stands in for slime's `post`: sends a payload of SGLang's `/generate`, with `text` or `input_ids`, to the run's
    engine and returns the answer in SGLang's form. Raises ValueError for another address and for other sampling
    settings than the recipe's."""
    if not url.endswith("/generate"):
        raise ValueError(f"{url}: only addresses that end with /generate are answered here")
    model = current.get()
    settings = payload.get("sampling_params") or {}
    for name in ("temperature", "top_p", "top_k", "min_p"):
        if name in settings and settings[name] != model.sampling[name]:
            raise ValueError(
                f"{name} = {settings[name]} in the payload, and the recipe samples with {model.sampling[name]}: ratios "
                "compare policies at one setting; leave it out"
            )
    ids = payload.get("input_ids")
    answer = await model.ask(
        "generate",
        **({"text": payload["text"]} if ids is None else {"ids": list(map(int, ids))}),
        max_tokens=settings.get("max_new_tokens"),
        stop=[settings["stop"]] if isinstance(settings.get("stop"), str) else list(settings.get("stop") or ()),
    )
    pairs = [[logprob, token] for logprob, token in zip(answer["logprobs"], answer["ids"], strict=True)]
    meta = {
        "finish_reason": {"type": answer["finish_reason"]},
        "output_token_logprobs": pairs,
        "completion_tokens": len(pairs),
    }
    return {"text": answer["text"], "output_ids": answer["ids"], "meta_info": meta}
