"""Computes the heat map: the importance ratio of each token of negative responses, at several ages of their stage.

A *negative* response has a negative advantage. Triggers of the veto and the tokens that it drops are marked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from mugrpo_megatron.algorithm.veto import MARKED_WEIGHT, PREFIX_WEIGHTS
from mugrpo_megatron.recipe.objective import ObjectiveSection
from mugrpo_megatron.report.details import spaced
from mugrpo_megatron.report.probes import ProbedResponse, veto_masks
from mugrpo_megatron.samples import turns_in
from mugrpo_megatron.terminal import visible

LEVELS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Letters that stand for importance ratios: the letter at index n, from 0, for 10^(n / STEPS + LOWEST)."""
STEPS, LOWEST = 8, -6
OTHERS = "."
"""The letter of a token that the model did not sample, such as one in a tool's output, or whose ratio is not finite."""
MOST_STAGES, EACH = 4, 3
"""Most stages in the heat map, and most responses of one stage."""
WINDOW = 128
"""Most tokens of a response that are shown; of a longer response, the part around its first trigger."""
PIECE = 24
"""Most characters of a token's text that are shown."""


def heat_map(responses: Sequence[ProbedResponse], objective: ObjectiveSection) -> dict[str, Any] | None:
    """Compute the data that heat.js draws; None if no negative response was probed.

    Each stage has up to EACH responses: those with the lowest ratios at the last age. If a stage has more, the last
    place goes to an episode of several turns, if one is left.
    """
    by_stage: dict[int, list[ProbedResponse]] = {}
    for response in responses:
        if response.negative:
            by_stage.setdefault(response.stage, []).append(response)
    if not by_stage:
        return None
    stages = spaced(sorted(by_stage), MOST_STAGES)
    return {
        "levels": LEVELS,
        "steps": STEPS,
        "lowest": LOWEST,
        "threshold": objective.trigger_ratio,
        "responses": [_drawn(response, objective) for stage in stages for response in _lowest(by_stage[stage])],
    }


def _lowest(responses: Sequence[ProbedResponse]) -> list[ProbedResponse]:
    ordered = sorted(
        responses,
        key=lambda response: (float(response.log_ratio[-1][response.trained].min()), response.probe.update),
    )
    first, rest = ordered[: EACH - 1], ordered[EACH - 1 :]
    return first + ([response for response in rest if len(_begins(response.trained)) > 1] or rest)[:1]


def _drawn(response: ProbedResponse, objective: ObjectiveSection) -> dict[str, Any]:
    triggers, dropped = veto_masks(response, objective)
    start, end = _window(response, triggers)
    probe = response.probe
    return {
        "stage": response.stage,
        "update": probe.update,
        "problem": visible(probe.problem),
        "reward": round(probe.reward, 4),
        "length": len(probe.tokens),
        "start": start,
        "ages": list(response.ages),
        "turns": _turns(response.trained, start, end),
        "tokens": [visible(token.replace("\n", "⏎"))[:PIECE] for token in probe.tokens[start:end]],
        "cells": [_cells(row, response.trained)[start:end] for row in response.log_ratio],
        "triggers": [np.flatnonzero(row[start:end]).tolist() for row in triggers],
        "dropped": [_spans(row[start:end]) for row in dropped],
    }


def _window(response: ProbedResponse, triggers: np.ndarray) -> tuple[int, int]:
    length = len(response.probe.tokens)
    last = triggers[-1]
    centre = (
        int(last.argmax()) if last.any() else int(np.where(response.trained, response.log_ratio[-1], np.inf).argmin())
    )
    start = max(0, min(centre - WINDOW // 3, length - WINDOW))
    return start, min(length, start + WINDOW)


def _begins(trained: np.ndarray) -> list[int]:
    """The index of the first token of each turn."""
    return np.flatnonzero(trained)[np.unique(turns_in(trained), return_index=True)[1]].tolist()


def _turns(trained: np.ndarray, start: int, end: int) -> list[list[int]]:
    """[index of its first token in the window, its number from 1] for each turn in the window of tokens from `start` to
    `end`; empty if the response has a single turn."""
    begins = _begins(trained)
    if len(begins) < 2:
        return []
    spans = enumerate(zip(begins, [*begins[1:], len(trained)], strict=True), start=1)
    return [[max(0, first - start), number] for number, (first, after) in spans if first < end and after > start]


def _cells(log_ratio: np.ndarray, trained: np.ndarray) -> str:
    """The letters of one row: a token's ratio, or OTHERS if the token was not sampled or its ratio is not finite."""
    known = trained & np.isfinite(log_ratio)
    return "".join(_letter(ratio) if inside else OTHERS for ratio, inside in zip(log_ratio, known, strict=True))


def _letter(log_ratio: float) -> str:
    level = round((log_ratio / math.log(10) - LOWEST) * STEPS)
    return LEVELS[max(0, min(level, len(LEVELS) - 1))]


def _spans(marked: np.ndarray) -> list[list[int]]:
    """[first, last] index of each run of consecutive marked tokens."""
    spans = []
    for _, run in groupby(enumerate(np.flatnonzero(marked).tolist()), key=lambda pair: pair[1] - pair[0]):
        places = [place for _, place in run]
        spans.append([places[0], places[-1]])
    return spans


def heat_text(heat: Mapping[str, Any], objective: ObjectiveSection) -> str:
    updates = max(response["ages"][-1] for response in heat["responses"])
    turns = " Grey: what a tool wrote." if any(response["turns"] for response in heat["responses"]) else ""
    dropped = "are dropped"
    if objective.veto in PREFIX_WEIGHTS:
        dropped = f"have a weight below {MARKED_WEIGHT:g}"
    return (
        f"One column a token, one row an age of the stage, after 0 to {updates} updates. Red: less likely than when it "
        f"was sampled; blue: more likely. A ring marks a trigger (ratio below {objective.trigger_ratio:g}); tokens "
        f"under a line {dropped} by this run's veto, {objective.veto}.{turns} Point at a row to read the response "
        "then."
    )
