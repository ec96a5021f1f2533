"""Seconds and bytes of a stage from assumed rates, and of the run under other schedules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from mugrpo_megatron.plan.case import Case
from mugrpo_megatron.plan.generation import decoding_seconds, evaluation_seconds, evaluations, scoring_seconds
from mugrpo_megatron.plan.layout import parameters, rank_parameters
from mugrpo_megatron.plan.memory import Memory
from mugrpo_megatron.plan.training import logprob_seconds, update_seconds


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of one stage."""

    switch: float
    """Learner offloaded and reloaded, engine woken and put to sleep."""
    sync: float
    generate: float
    score: float
    """What remains of verification after generation."""
    evaluate: float
    """All evaluations of the run divided by its stages, with the switches of those inside a stage."""
    logprobs: float
    optimize: float
    save: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in self.__slots__)


def phases(case: Case, need: Memory) -> Phases:
    """Seconds of one stage of the recipe's schedule."""
    schedule, state = case.recipe.schedule, need.learning.state
    responses = schedule.updates_per_stage * case.responses
    generate = decoding_seconds(responses, case, need.serving)
    moved = 2 * (state.weights + state.optimizer) / case.assumptions.host_link + case.assumptions.wake
    switch, sync = moved if case.cuda else 0.0, sync_bytes(case) / case.assumptions.bridge
    before, woken = evaluations(case.recipe)
    evaluate = (before + woken) * evaluation_seconds(case, need.serving) + woken * (switch + sync)
    found = Phases(
        switch=switch,
        sync=sync,
        generate=generate,
        score=max(0.0, scoring_seconds(responses, case) - generate),
        evaluate=evaluate / schedule.stages,
        logprobs=logprob_seconds(case),
        optimize=schedule.updates_on_stage * update_seconds(case),
    )
    return replace(found, save=saving_seconds(found.total, case))


def saving_seconds(others: float, case: Case) -> float:
    """Seconds of a stage's saves, at its end (or its share of one) and inside it, next to `others` of other work.

    With `checkpoint.asynchronous` the run waits for the copy to host memory, and for the disk only if a save has not
    ended when the next one begins (run/checkpoints.py).
    """
    section, updates = case.recipe.checkpoint, case.recipe.schedule.updates_on_stage
    saves = 1 / section.every_stages + ((updates - 1) // section.every_updates if section.every_updates else 0)
    written = saves * checkpoint_bytes(case) / case.assumptions.disk
    if not section.asynchronous:
        return written
    mine = max(
        rank_parameters(case.architecture, case.layout, pp_stage).shared(case.layout)
        for pp_stage in range(case.layout.pipeline)
    )
    copied = saves * mine * (case.itemsize + 12.0) / case.assumptions.host_link if case.cuda else 0.0
    return copied + max(0.0, written - others - copied)


def checkpoint_bytes(case: Case) -> float:
    """Bytes of weights, float32 master weights and both moments of the whole model (learner/checkpoint.py)."""
    return parameters(case.architecture) * (case.itemsize + 12.0)


def sync_bytes(case: Case) -> int:
    """Bytes of the weights: sent to each engine in every stage."""
    return parameters(case.architecture) * case.itemsize


def stage_bytes(case: Case) -> float:
    """Bytes of a stage's Parquet before compression: 8 a response token, 4 a prompt token, 40 a response."""
    responses = case.recipe.schedule.updates_per_stage * case.responses
    return responses * (8 * case.mean_response + 4 * case.mean_prompt + 40)


GRPO_UPDATES = 4
"""µ of GRPO in the paper."""
MU_GRPO_STAGES = 4
"""Stages of mu-GRPO in the paper."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The cost of the whole run under one schedule."""

    name: str
    stages: int
    updates_per_stage: int
    passes: int
    seconds: Mapping[str, float]
    """Phase -> seconds of the whole run."""
    tail: float
    """Seconds of `generate` that one single stage would save: each stage waits for its longest responses."""
    stage_bytes: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def schedules(case: Case, need: Memory) -> list[Schedule]:
    """The recipe's, GRPO's and mu-GRPO's schedules over the same updates, evaluated equally often."""
    own = case.recipe.schedule
    updates = own.stages * own.updates_per_stage
    shapes = {
        "this recipe": (own.stages, own.updates_per_stage),
        "GRPO's": (-(-updates // GRPO_UPDATES), min(GRPO_UPDATES, updates)),
        "mu-GRPO's": (min(MU_GRPO_STAGES, updates), -(-updates // MU_GRPO_STAGES)),
    }
    evaluate = own.stages * phases(case, need).evaluate
    in_one_stage = decoding_seconds(updates * case.responses, case, need.serving)
    found = []
    for name, (stages, per_stage) in shapes.items():
        other = _with_schedule(case, stages, per_stage)
        seconds = {phase: stages * value for phase, value in asdict(phases(other, need)).items()}
        seconds["evaluate"] = evaluate
        tail = max(0.0, seconds["generate"] - in_one_stage)
        found.append(Schedule(name, stages, per_stage, own.passes, seconds, tail, stage_bytes(other)))
    return found


def _with_schedule(case: Case, stages: int, updates_per_stage: int) -> Case:
    schedule = case.recipe.schedule.model_copy(update={"stages": stages, "updates_per_stage": updates_per_stage})
    return case.with_recipe(case.recipe.model_copy(update={"schedule": schedule}))
