"""Seconds of each phase of one stage, from stated rates: a roofline, not a simulation; and what a stage writes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mugrpo_megatron.plan.case import Case
from mugrpo_megatron.plan.cluster import engines_of
from mugrpo_megatron.plan.layout import held, parameters
from mugrpo_megatron.plan.lengths import resident_mean, response_lengths, seconds_to_decode
from mugrpo_megatron.plan.memory import Memory, Serving
from mugrpo_megatron.plan.updating import flops_of, logprob_seconds, update_seconds, work_of
from mugrpo_megatron.rollout.launch import kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of one stage."""

    switch: float
    """Learner's state to host memory and back, the engine asleep and awake."""
    sync: float
    generate: float
    score: float
    """Beyond what the verifier does while the engine generates."""
    evaluate: float
    """Held-out problems, shared out over the stages that evaluate."""
    logprobs: float
    optimize: float
    save: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in self.__slots__)


def phases(case: Case, need: Memory) -> Phases:
    """One stage of the recipe's schedule."""
    recipe, schedule, state = case.recipe, case.recipe.schedule, need.learning.state
    responses = schedule.updates_per_stage * case.responses
    generate = decoding_seconds(responses, case, need.serving)
    evaluations = 2 + (schedule.stages - 1) // recipe.eval.every_stages if recipe.eval.every_stages else 2
    held_out = recipe.data.eval_problems * (1 + recipe.data.eval.count(",")) * recipe.eval.samples
    parked = 2 * (state.weights + state.optimizer) / case.guess.host_link + case.guess.wake
    found = Phases(
        switch=parked if case.cuda else 0.0,
        sync=sync_bytes(case) / case.guess.bridge,
        generate=generate,
        score=max(0.0, scoring_seconds(responses, case) - generate),
        evaluate=decoding_seconds(held_out, case, need.serving) * evaluations / schedule.stages,
        logprobs=logprob_seconds(case),
        optimize=schedule.updates_per_stage * update_seconds(case),
    )
    return replace(found, save=saving_seconds(found.total, case))


def decoding_seconds(responses: int, case: Case, engine: Serving) -> float:
    """Until all engines, which share one queue, have decoded `responses`; prompts are read in passing."""
    guess, device, share = case.guess, case.cluster.device, case.recipe.engine.tensor
    lengths = response_lengths(case.mean_response, case.recipe.rollout.max_response_tokens, guess.spread)
    resident = case.mean_prompt + resident_mean(lengths)
    cached = kv_bytes_per_token(dict(case.config), case.recipe.model.dtype) / share * resident
    work = work_of(case.architecture, case.mean_sequence)
    of_token = (work.layers + work.head + 2 * work.attention) / share

    def step(running: int) -> float:
        moved = (engine.weights + running * cached) / (device.bandwidth * guess.decode)
        return max(guess.step_floor, moved, running * of_token / flops_of(case))

    mine = -(-responses // engines_of(case.recipe, case.cluster))
    reading = mine * case.mean_prompt * (work.layers + work.attention) / share / flops_of(case)
    return reading + seconds_to_decode(mine, max(1, engine.requests), lengths, step)


def scoring_seconds(responses: int, case: Case) -> float:
    """Of the verifier's processes on every rank that leads an engine: as many as asked for, or one per two cores."""
    engines = engines_of(case.recipe, case.cluster)
    cores = case.guess.cores * case.cluster.world / engines
    workers = min(case.recipe.reward.workers, cores) or max(1, int(cores // 2))
    return responses / (case.guess.verifier * workers * engines)


def saving_seconds(others: float, case: Case) -> float:
    """A stage's saves, one at its end and those inside it, during `others` seconds of other work.

    Saved asynchronously, the run waits for the copy to host memory, and for the disk where one save is not done before
    the next begins (checkpoints.py).
    """
    section, updates = case.recipe.checkpoint, case.recipe.schedule.updates_per_stage
    saves = 1 + (updates - 1) // section.every_updates if section.every_updates else 1
    written = saves * checkpoint_bytes(case) / case.guess.disk
    if not section.asynchronous:
        return written
    mine = max(held(case.architecture, case.layout, stage).total for stage in range(case.layout.pipeline))
    copied = saves * mine * (case.itemsize + 12.0) / case.guess.host_link if case.cuda else 0.0
    return copied + max(0.0, written - others - copied)


def checkpoint_bytes(case: Case) -> float:
    """Weights, float32 master weights and both moments of the whole model, each once (learner/checkpoint.py)."""
    return parameters(case.architecture) * (case.itemsize + 12.0)


def sync_bytes(case: Case) -> int:
    """The weights, to each engine and in every stage."""
    return parameters(case.architecture) * case.itemsize


def stage_bytes(case: Case) -> float:
    """A stage's Parquet before compression: 8 bytes a response token, 4 a prompt token, 40 a response."""
    responses = case.recipe.schedule.updates_per_stage * case.responses
    return responses * (8 * case.mean_response + 4 * case.mean_prompt + 40)
