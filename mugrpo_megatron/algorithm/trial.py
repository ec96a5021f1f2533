"""Calls the user's functions of the loss once on two small groups, before a run begins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mugrpo_megatron.algorithm.advantages import ARGUMENTS, group_advantages
from mugrpo_megatron.recipe.functions import arguments_of, load_function
from mugrpo_megatron.recipe.objective import ObjectiveSection
from mugrpo_megatron.samples import Sample

LOSS_ARGUMENTS = ("tokens", "config")
"""Arguments that a user's surrogate or diagnostics may name."""
REWARDS = ((1.0, 0.0, 0.0, 1.0), (0.0, 0.0, 0.0, 0.0))
"""Rewards of the two groups that are tried: different rewards in one, equal ones in the other."""
LENGTHS = ((5, 3, 2, 4), (3, 1, 2, 6))
"""Numbers of tokens of their responses."""


def try_user_functions(
    objective: ObjectiveSection, rows: Sequence[Mapping[str, Any]] = (), components: Sequence[str] = ()
) -> list[str]:
    """Call each of the user's functions in the objective once; returns a sentence about each function that was called.

    `rows` are those of two problems, and `components` the names of the reward functions. An advantage function that
    reads rows is not called if there are none. Raises UserError for a function that cannot be loaded, takes no known
    argument or needs an unknown one, FunctionFailure for one that fails or returns a wrong value.
    """
    said: list[str] = []
    if objective.has_user_advantage and (rows or not _reads_rows(objective)):
        values = group_advantages(
            np.array(REWARDS).ravel(), np.repeat([0, 1], len(REWARDS[0])), objective, _samples(rows, components)
        )
        shown = ", ".join(f"{value:.3g}" for value in values)
        said.append(f"objective.advantage = {objective.advantage}: rewards of two groups, {REWARDS}, give {shown}")
    if ":" in objective.surrogate or objective.diagnostics is not None:
        said += _try_losses(objective)
    return said


def _reads_rows(objective: ObjectiveSection) -> bool:
    name = f"objective.advantage = {objective.advantage}"
    return "rows" in arguments_of(name, load_function("objective.advantage", objective.advantage), ARGUMENTS)


def _samples(rows: Sequence[Mapping[str, Any]], components: Sequence[str]) -> list[Sample]:
    return [
        Sample(
            group=group,
            problem=f"trial:{group}",
            prompt_ids=np.zeros(1, np.int32),
            response_ids=np.zeros(length, np.int32),
            engine_logprobs=np.full(length, -1.0, np.float32),
            reward=reward,
            weight_version=0,
            finish_reason="stop",
            components=dict.fromkeys(components, reward),
            row=json.dumps(rows[group % len(rows)]) if rows else "",
        )
        for group, (rewards, lengths) in enumerate(zip(REWARDS, LENGTHS, strict=True))
        for reward, length in zip(rewards, lengths, strict=True)
    ]


def _try_losses(objective: ObjectiveSection) -> list[str]:
    """Compute the loss of eight responses and its gradient with the user's surrogate and diagnostics."""
    import torch  # it takes seconds, so it is imported only for a recipe that has such a function

    from mugrpo_megatron.algorithm.policy_loss import policy_loss
    from mugrpo_megatron.algorithm.segments import LossInputs, Segments
    from mugrpo_megatron.errors import FunctionFailure

    lengths = torch.tensor(LENGTHS).flatten()
    responses = len(lengths)
    segments = Segments(
        ids=torch.repeat_interleave(torch.arange(responses), lengths),
        positions=torch.cat([torch.arange(int(length)) for length in lengths]),
        lengths=lengths,
        weights=torch.full((responses,), 1.0 / int(lengths.sum())),
    )
    moved = torch.linspace(-0.2, 0.2, int(lengths.sum()))
    behaviour = torch.full_like(moved, -1.0)
    logprobs = (behaviour + moved).requires_grad_()
    advantages = torch.tensor(REWARDS).flatten() - 0.5
    loss, metrics = policy_loss(logprobs, LossInputs(_without_columns(objective), behaviour, advantages, segments))
    loss.backward()  # type: ignore[no-untyped-call]
    if ":" in objective.surrogate and (logprobs.grad is None or not torch.isfinite(logprobs.grad).all()):
        raise FunctionFailure(
            f"objective.surrogate = {objective.surrogate}: on eight short responses the gradient is not finite; "
            "correct the function and run the command again"
        )
    said = []
    if ":" in objective.surrogate:
        said.append(
            f"objective.surrogate = {objective.surrogate}: the loss of eight short responses is {loss.item():.3g}"
        )
    if objective.diagnostics is not None:
        names = ", ".join(name for name in metrics if name.startswith("user/")) or "nothing"
        said.append(f"objective.diagnostics = {objective.diagnostics} logs {names}")
    return said


def _without_columns(objective: ObjectiveSection) -> ObjectiveSection:
    """The objective without the terms that need a stage's computed log-probabilities: those of a reference, a teacher,
    a proximal policy, or of engine and learner for the mismatch."""
    without = {"kl_ref": None, "kl_coef": 0.0, "teacher": None, "teacher_coef": 0.0, "clip_centre": "one"}
    return objective.model_copy(update=without | {"mismatch": "none"})
