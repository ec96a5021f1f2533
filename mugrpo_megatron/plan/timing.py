"""Seconds of each phase of one stage, from stated rates: a roofline, not a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mugrpo_megatron.plan.cluster import Assumptions, Cluster, engines_of
from mugrpo_megatron.plan.layout import Layout, held, parameters
from mugrpo_megatron.plan.lengths import resident_mean, response_lengths, seconds_to_decode
from mugrpo_megatron.plan.memory import ITEMSIZE, Memory, batch_of, mean_prompt, mean_response, mean_sequence
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.rollout.launch import kv_bytes_per_token
from mugrpo_megatron.weights.architecture import Architecture

MISMATCH_RESPONSES = 64
"""Responses on which engine and learner are compared in every stage (optimization.py)."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one token costs in FLOP, forward: 2 for each weight that it meets."""

    layers: float
    attention: float
    """Scores and mixing against the mean of the tokens before it."""
    head: float
    """One product with the output weight; only trained tokens meet it in the learner."""


def work_of(architecture: Architecture, sequence: float) -> Work:
    """Per token of sequences of `sequence` tokens on average."""
    size, layers = architecture.letters, architecture.layers
    feed_forward = 3 * size["H"] * size["F"]
    if architecture.experts:
        chosen = architecture.transformer["moe_router_topk"]
        feed_forward = 3 * size["H"] * size["M"] * chosen + size["H"] * size["E"]
    attention = size["H"] * (size["Q"] + 2 * size["K"]) + size["Q"] * size["H"]
    return Work(
        layers=2.0 * layers * (attention + feed_forward),
        attention=2.0 * layers * 2 * size["Q"] * sequence / 2,
        head=2.0 * size["V"] * size["H"],
    )


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
    save: float

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in self.__slots__)


def phases(
    recipe: Recipe,
    architecture: Architecture,
    config: Mapping,
    layout: Layout,
    cluster: Cluster,
    guess: Assumptions,
    need: Memory,
) -> Phases:
    """One stage of the recipe's schedule."""
    rollout, schedule = recipe.rollout, recipe.schedule
    responses = rollout.prompts_per_update * rollout.responses_per_prompt
    generate = decoding_seconds(
        schedule.updates_per_stage * responses, recipe, architecture, config, cluster, guess, need
    )
    score = scoring_seconds(schedule.updates_per_stage * responses, recipe, cluster, guess)
    stages = 1 + (schedule.stages - 1) // recipe.eval.every_stages if recipe.eval.every_stages else 1
    held_out = recipe.data.eval_problems * (1 + recipe.data.eval.count(",")) * recipe.eval.samples
    evaluation = decoding_seconds(held_out, recipe, architecture, config, cluster, guess, need)
    state = need.learning.state
    copies = 2 * (state.weights + state.optimizer) / guess.host_link + guess.wake if cluster.device.cuda else 0.0
    whole = parameters(architecture) * ITEMSIZE[recipe.model.dtype]
    found = Phases(
        switch=copies,
        sync=whole / guess.bridge,
        generate=generate,
        score=max(0.0, score - generate),
        evaluate=evaluation * (stages + 1) / schedule.stages,
        logprobs=logprob_seconds(recipe, architecture, layout, cluster, guess),
        optimize=schedule.updates_per_stage * update_seconds(recipe, architecture, layout, cluster, guess),
        save=0.0,
    )
    return replace(found, save=saving_seconds(found.total, recipe, architecture, layout, cluster, guess))


def saving_seconds(
    others: float, recipe: Recipe, architecture: Architecture, layout: Layout, cluster: Cluster, guess: Assumptions
) -> float:
    """A stage's saves, one at its end and those inside it, beside `others` seconds of other work.

    Saved asynchronously, the run waits for the copy to host memory, and for the disk where one save is not done before
    the next begins (checkpoints.py).
    """
    every, updates = recipe.checkpoint.every_updates, recipe.schedule.updates_per_stage
    saves = 1 + (updates - 1) // every if every else 1
    written = saves * checkpoint_bytes(recipe, architecture) / guess.disk
    if not recipe.checkpoint.asynchronous:
        return written
    mine = max(held(architecture, layout, stage).total for stage in range(layout.pipeline))
    copied = saves * mine * (ITEMSIZE[recipe.model.dtype] + 12.0) / guess.host_link if cluster.device.cuda else 0.0
    return copied + max(0.0, written - others - copied)


def decoding_seconds(
    responses: int,
    recipe: Recipe,
    architecture: Architecture,
    config: Mapping,
    cluster: Cluster,
    guess: Assumptions,
    need: Memory,
) -> float:
    """Until all engines, which share one queue, have decoded `responses`; prompts are read in passing."""
    engines = engines_of(recipe, cluster)
    lengths = response_lengths(mean_response(recipe, guess), recipe.rollout.max_response_tokens, guess.spread)
    prompt, mean = mean_prompt(recipe, guess), mean_response(recipe, guess)
    work = work_of(architecture, prompt + mean)
    share = recipe.engine.tensor
    token_bytes = kv_bytes_per_token(dict(config), recipe.model.dtype) / share * (prompt + resident_mean(lengths))
    per_token = work.layers + work.head + 2 * work.attention
    device = cluster.device

    def step(running: int) -> float:
        moved = (need.serving.weights + running * token_bytes) / (device.bandwidth * guess.decode)
        computed = running * per_token / share / (device.flops * _mfu(architecture, guess))
        return max(guess.step_floor, moved, computed)

    mine = -(-responses // engines)
    reading = mine * prompt * (work.layers + work.attention) / share / (device.flops * _mfu(architecture, guess))
    return reading + seconds_to_decode(mine, max(1, need.serving.requests), lengths, step)


def scoring_seconds(responses: int, recipe: Recipe, cluster: Cluster, guess: Assumptions) -> float:
    """Of the verifier's processes on every rank that leads an engine: as many as asked for, or one per two cores."""
    engines = engines_of(recipe, cluster)
    cores = guess.cores * cluster.world / engines
    workers = min(recipe.reward.workers, cores) or max(1, int(cores // 2))
    return responses / (guess.verifier * workers * engines)


def logprob_seconds(
    recipe: Recipe, architecture: Architecture, layout: Layout, cluster: Cluster, guess: Assumptions
) -> float:
    """Forward passes before a stage's first update: the engine's mismatch, and the learner's behaviour if asked for."""
    per_update = recipe.rollout.prompts_per_update * recipe.rollout.responses_per_prompt
    responses = min(MISMATCH_RESPONSES, per_update)
    if recipe.rollout.behaviour == "learner":
        responses += recipe.schedule.updates_per_stage * per_update
    return (
        responses
        * _sequence_flops(recipe, architecture, guess, passes=1.0, head=1)
        / _flops(architecture, layout, cluster, guess)
    )


def update_seconds(
    recipe: Recipe, architecture: Architecture, layout: Layout, cluster: Cluster, guess: Assumptions
) -> float:
    """One optimizer update: passes, the pipeline's bubble, messages, the optimizer's own step."""
    rollout = recipe.rollout
    batch = batch_of(recipe, layout, guess)
    responses = rollout.prompts_per_update * rollout.responses_per_prompt
    passes = 4.0 if layout.recompute == "full" else 3.0
    head = 4 if recipe.objective.dependence == "response" else 3
    flops = responses * _sequence_flops(recipe, architecture, guess, passes, head)
    if recipe.objective.needs_statistics:
        flops += responses * _sequence_flops(recipe, architecture, guess, 1.0, 1)
    computed = flops / guess.packing / _flops(architecture, layout, cluster, guess)
    passed = message_seconds(recipe, architecture, layout, cluster, guess)
    return (computed + passed) / (1 - bubble(layout, batch.micro_batches)) + step_seconds(
        recipe, architecture, layout, cluster, guess
    )


def bubble(layout: Layout, micro_batches: int) -> float:
    """Share of an update that a pipeline stage idles: (p - 1) / (m v + p - 1) (arXiv 2104.04473, section 2.2)."""
    idle = layout.pipeline - 1
    return idle / (micro_batches * layout.virtual + idle)


def message_seconds(
    recipe: Recipe, architecture: Architecture, layout: Layout, cluster: Cluster, guess: Assumptions
) -> float:
    """Messages inside the passes of one update: tensor, context and expert parallel ones of a rank's layers."""
    size, b = architecture.letters, ITEMSIZE[recipe.model.dtype]
    responses = recipe.rollout.prompts_per_update * recipe.rollout.responses_per_prompt
    sequence = mean_sequence(recipe, guess)
    tokens = responses * sequence / guess.packing / layout.shards
    layers = architecture.layers / layout.pipeline
    forwards = 2 if layout.recompute == "full" else 1
    # An all-reduce, or a reduce-scatter and an all-gather, passes twice a rank's share of the tensor.
    reduced = 2 * (forwards + 1) * 2 * _others(layout.tensor) * tokens * size["H"] * b
    gathered = 2 * (forwards + 1) * _others(layout.context) * tokens * layout.context * size["K"] / layout.tensor * b
    found = layers * (reduced / guess.inside + gathered / _link(layout.tensor * layout.context, cluster, guess))
    if architecture.experts:
        chosen = architecture.transformer["moe_router_topk"]
        sent = 2 * (forwards + 1) * _others(layout.expert) * tokens / layout.tensor * chosen * size["H"] * b
        found += layers * sent / _link(layout.tensor * layout.expert, cluster, guess)
    return found


def step_seconds(
    recipe: Recipe, architecture: Architecture, layout: Layout, cluster: Cluster, guess: Assumptions
) -> float:
    """Gradients reduced, states read and written, weights gathered (not overlapped here), on the fullest stage."""
    b = ITEMSIZE[recipe.model.dtype]
    mine = max((held(architecture, layout, stage) for stage in range(layout.pipeline)), key=lambda one: one.total)
    sharded = mine.dense / layout.shards + mine.experts / layout.expert_shards
    link = _link(layout.tensor * layout.shards, cluster, guess)
    passed = (4 + b) * (mine.dense * _others(layout.shards) + mine.experts * _others(layout.expert_shards))
    touched = 3 * 4 * mine.total + 7 * 4 * sharded
    return passed / link + touched / cluster.device.bandwidth


def checkpoint_bytes(recipe: Recipe, architecture: Architecture) -> float:
    """Weights, float32 master weights and both moments of the whole model, each once (learner/checkpoint.py)."""
    return parameters(architecture) * (ITEMSIZE[recipe.model.dtype] + 12.0)


def stage_bytes(recipe: Recipe, guess: Assumptions) -> float:
    """A stage's Parquet before compression: 8 bytes a response token, 4 a prompt token, 40 a response."""
    responses = (
        recipe.schedule.updates_per_stage * recipe.rollout.prompts_per_update * recipe.rollout.responses_per_prompt
    )
    return responses * (8 * mean_response(recipe, guess) + 4 * mean_prompt(recipe, guess) + 40)


def _sequence_flops(recipe: Recipe, architecture: Architecture, guess: Assumptions, passes: float, head: int) -> float:
    """FLOP of one sequence: `passes` through the layers and `head` products with the output weight where trained."""
    sequence = mean_sequence(recipe, guess)
    work = work_of(architecture, sequence)
    return passes * sequence * (work.layers + work.attention) + head * mean_response(recipe, guess) * work.head


def _flops(architecture: Architecture, layout: Layout, cluster: Cluster, guess: Assumptions) -> float:
    """Useful FLOP/s of all ranks together, bubble left out."""
    return cluster.world * cluster.device.flops * _mfu(architecture, guess)


def _mfu(architecture: Architecture, guess: Assumptions) -> float:
    return guess.mfu_experts if architecture.experts else guess.mfu


def _others(ranks: int) -> float:
    """Share of a tensor that comes from other ranks."""
    return (ranks - 1) / ranks


def _link(ranks: int, cluster: Cluster, guess: Assumptions) -> float:
    """Bytes/s inside a group that spans `ranks` neighbours."""
    return guess.inside if ranks <= cluster.per_node else guess.between
