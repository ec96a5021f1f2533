"""Seconds of the engines and the verifier: a stage's responses, their scores, and evaluations."""

from __future__ import annotations

from collections import Counter

from mugrpo_megatron.data.sets import named_sources
from mugrpo_megatron.engine.launch import kv_bytes_per_token
from mugrpo_megatron.plan.case import Case
from mugrpo_megatron.plan.hardware import engines_of
from mugrpo_megatron.plan.lengths import resident_mean, response_lengths, seconds_to_decode
from mugrpo_megatron.plan.memory import EngineMemory
from mugrpo_megatron.plan.training import flops_of
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.weights.flops import work_of

PROBLEMS = {"aime24": 30, "aime25": 30, "amc23": 40, "amc24": 50, "gsm8k": 1319, "math500": 500}
"""Problems of public held-out sets (amc24: two tests of 25); of another set, as many as `data.eval_problems` allows."""


def decoding_seconds(responses: int, case: Case, engine: EngineMemory) -> float:
    """Seconds until all engines, which share one queue, have decoded `responses`, prefill included."""
    assumptions, device, share = case.assumptions, case.cluster.device, case.recipe.engine.tensor
    lengths = response_lengths(case.mean_response, case.recipe.rollout.max_response_tokens, assumptions.spread)
    resident = case.mean_prompt + resident_mean(lengths)
    sharing = min(share, case.architecture.transformer["num_query_groups"])  # above that ranks hold copies
    cached = kv_bytes_per_token(dict(case.config), case.recipe.model.dtype) / sharing * resident
    work = work_of(case.architecture, case.mean_sequence)
    of_token = (work.layers + work.head + 2 * work.attention) / share

    # An engine of several nodes reduces two tensors in each layer over the network.
    size, layers = case.architecture.letters["H"], case.architecture.layers
    reduced = 2 * layers * 2 * (share - 1) / share * size * case.itemsize if case.recipe.engine.nodes > 1 else 0.0

    def step(running: int) -> float:
        network = running * reduced / assumptions.between
        moved = (engine.weights + running * cached) / (device.bandwidth * assumptions.decode)
        return network + max(assumptions.step_floor, moved, running * of_token / flops_of(case))

    mine = -(-responses // engines_of(case.recipe, case.cluster))
    reading = mine * case.mean_prompt * (work.layers + work.attention) / share / flops_of(case)
    return reading + seconds_to_decode(mine, max(1, engine.requests), lengths, step)


def scoring_seconds(responses: int, case: Case) -> float:
    """Seconds of the verifiers, one on each engine leader: `reward.workers` processes, or one per two cores."""
    engines = engines_of(case.recipe, case.cluster)
    cores = case.assumptions.cores * case.cluster.world / engines
    workers = min(case.recipe.reward.workers, cores) or max(1, int(cores // 2))
    return responses / (case.assumptions.verifier * workers * engines)


def evaluations(recipe: Recipe) -> tuple[int, int]:
    """(before stages, others): evaluations of a run; before a stage the engines are awake anyway.

    Before: the first stage and every `eval.every_stages`-th one. Others: inside a stage after every
    `eval.every_updates`-th update except the last, and at the end of the run.
    """
    schedule, section = recipe.schedule, recipe.eval
    before = 1 + ((schedule.stages - 1) // section.every_stages if section.every_stages else 0)
    inside = (schedule.updates_on_stage - 1) // section.every_updates if section.every_updates else 0
    return before, schedule.stages * inside + 1


def evaluation_seconds(case: Case, engine: EngineMemory) -> float:
    """Seconds of one evaluation; sets with the same sampling settings are decoded together (phases/evaluate.py)."""
    recipe = case.recipe
    groups: Counter[tuple[int, float, float, int]] = Counter()
    for name in named_sources(recipe.data.eval):
        own = recipe.eval.of(name)
        longest = own.max_tokens or recipe.rollout.max_response_tokens
        problems = min(recipe.data.eval_problems, PROBLEMS.get(name, recipe.data.eval_problems))
        groups[own.samples, own.temperature, own.top_p, longest] += problems * own.samples
    return sum(decoding_seconds(count, _up_to(longest, case), engine) for (*_, longest), count in groups.items())


def _up_to(longest: int, case: Case) -> Case:
    """The case with responses of at most `longest` tokens; the mean scales with it."""
    rollout = case.recipe.rollout.model_copy(update={"max_response_tokens": longest})
    return case.with_recipe(case.recipe.model_copy(update={"rollout": rollout}))
