"""The user's functions of the loss are bound by name and called once before a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mugrpo_megatron.algorithm.advantages import group_advantages
from mugrpo_megatron.algorithm.surrogates import SurrogateLoss
from mugrpo_megatron.algorithm.trial import try_user_functions
from mugrpo_megatron.errors import FunctionFailure, UserError
from mugrpo_megatron.recipe import ObjectiveSection

HERE = "tests.algorithm.test_trial"
chosen: Callable[..., Any]
"""Replaced by each test."""


def tried(key: str, function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, **other: Any) -> list[str]:
    monkeypatch.setattr(sys.modules[HERE], "chosen", function, raising=False)
    rows = [{"weight": 1.0}, {"weight": 2.0}]
    return try_user_functions(ObjectiveSection.model_validate({key: f"{HERE}:chosen", **other}), rows, ["right"])


def loss_of(tokens: Any) -> Tensor:
    return -tokens.ratio * tokens.advantage


def none_clipped(tokens: Any) -> Tensor:
    return torch.zeros_like(tokens.ratio, dtype=torch.bool)


RIGHT: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("advantage", lambda components, rows, groups, rewards: [r["weight"] for r in rows] * rewards),
    ("advantage", lambda rewards, scale=2.0, **others: rewards * scale),
    ("advantage", lambda components: [parts["right"] for parts in components]),
    ("surrogate", lambda config, tokens: SurrogateLoss(loss_of(tokens), none_clipped(tokens))),
    ("surrogate", lambda tokens: SurrogateLoss(loss_of(tokens), none_clipped(tokens))),
    ("diagnostics", lambda config, tokens: {"mean": tokens.ratio.mean()}),
)
WRONG: tuple[tuple[str, Callable[..., Any], type[Exception], str], ...] = (
    ("advantage", lambda r, g: r, UserError, r"takes \(r, g\): arguments go by name"),
    ("advantage", lambda rewards, baseline: rewards, UserError, "rewards, groups, lengths, rows, components"),
    ("advantage", lambda rewards, /: rewards, UserError, "go by name"),
    ("advantage", lambda *columns: columns[0], UserError, "go by name"),
    ("advantage", lambda rewards: rewards[1:], FunctionFailure, "finite numbers"),
    ("advantage", lambda rewards: rewards * np.nan, FunctionFailure, "finite numbers"),
    ("advantage", lambda rows: [row["missing"] for row in rows], FunctionFailure, "KeyError"),
    ("surrogate", lambda batch, config: None, UserError, "tokens, config"),
    ("surrogate", lambda tokens: loss_of(tokens), FunctionFailure, "not SurrogateLoss"),
    ("surrogate", lambda tokens: SurrogateLoss(loss_of(tokens)[1:], none_clipped(tokens)), FunctionFailure, "loss as"),
    (
        "surrogate",
        lambda tokens: SurrogateLoss(loss_of(tokens) * np.nan, none_clipped(tokens)),
        FunctionFailure,
        "finite",
    ),
    ("diagnostics", lambda tokens, rewards: {}, UserError, "tokens, config"),
    ("diagnostics", lambda tokens: [1.0], FunctionFailure, "not a mapping"),
)


@pytest.mark.parametrize("index", range(len(RIGHT)))
def test_arguments_go_by_name_in_any_order(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    key, function = RIGHT[index]
    [line] = tried(key, function, monkeypatch)
    assert line.startswith(f"objective.{key} = {HERE}:chosen")


@pytest.mark.parametrize("index", range(len(WRONG)))
def test_what_a_run_could_not_use_is_refused(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    key, function, kind, words = WRONG[index]
    with pytest.raises(kind, match=words):
        tried(key, function, monkeypatch)


@pytest.mark.parametrize("preset", ["mu_grpo", "gspo", "dr_grpo", "decoupled_ppo", "tis", "off_policy_grpo"])
def test_every_objective_can_be_tried(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried("surrogate", RIGHT[3][1], monkeypatch, name=preset)


def test_a_function_that_reads_rows_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[HERE], "chosen", RIGHT[0][1], raising=False)
    assert try_user_functions(ObjectiveSection(advantage=f"{HERE}:chosen")) == []


@pytest.mark.parametrize(
    "rewards", [[0.1 + 0.7, 0.8, 0.8], [0.3 * 3, 0.9], [np.float32(0.1) + np.float32(0.7), 0.8], [-0.1 - 0.2, -0.3]]
)
def test_rewards_that_differ_by_rounding_are_equal(rewards: list[float]) -> None:
    for name in ("group_std", "group_mean", "leave_one_out"):
        groups = np.zeros(len(rewards), dtype=int)
        assert not group_advantages(np.array(rewards), groups, ObjectiveSection(advantage=name)).any()


@pytest.mark.parametrize("rewards", [[1e300, -1e300], [3e38, -3e38, 3e38, -3e38], [1e-300, 0.0], [1.0, 1.0001]])
def test_advantages_are_finite_and_bounded(rewards: list[float]) -> None:
    groups = np.zeros(len(rewards), dtype=int)
    for name in ("group_std", "group_mean", "leave_one_out"):
        result = group_advantages(np.array(rewards), groups, ObjectiveSection(advantage=name))
        assert np.isfinite(result).all()
    scaled = group_advantages(np.array(rewards), groups, ObjectiveSection())
    assert (np.abs(scaled) <= np.sqrt(len(rewards))).all()
