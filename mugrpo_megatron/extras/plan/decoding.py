"""Seconds that engines take to decode responses, and to compute log-probabilities of given ones."""

from __future__ import annotations

from mugrpo_megatron.engine.launch import kv_bytes_per_token
from mugrpo_megatron.extras.plan.case import PlanCase
from mugrpo_megatron.extras.plan.hardware import engines_of
from mugrpo_megatron.extras.plan.lengths import resident_mean, response_lengths, seconds_to_decode
from mugrpo_megatron.extras.plan.memory import EngineMemory, cache_shares, state_bytes
from mugrpo_megatron.weights.families import token_flops


def decoding_seconds(responses: int, case: PlanCase, engine: EngineMemory) -> float:
    """Seconds until all engines, which share one queue, have decoded `responses` responses, prefill included."""
    assumptions, device, share = case.assumptions, case.cluster.device, case.recipe.engine.tensor
    lengths = response_lengths(case.mean_response, case.recipe.rollout.max_response_tokens, assumptions.spread)
    resident = case.mean_prompt + resident_mean(lengths)
    sharing = cache_shares(case.architecture, share)
    cached = kv_bytes_per_token(dict(case.config), case.recipe.model.dtype) / sharing * resident
    cached += 2 * state_bytes(case.architecture, case.itemsize) / share  # twice, since a state is read and written
    work = token_flops(case.architecture, case.mean_sequence)
    of_token = (work.layers + work.head + 2 * work.attention) / share

    # Bytes that an engine of several nodes sends over the network for each token: each layer reduces two tensors.
    size, layers = case.architecture.letters["H"], case.architecture.layers
    reduced = 2 * layers * 2 * (share - 1) / share * size * case.itemsize if case.recipe.engine.nodes > 1 else 0.0

    def step(running: int) -> float:
        network = running * reduced / assumptions.between
        moved = (engine.weights + running * cached) / (device.bandwidth * assumptions.decode)
        return network + max(assumptions.step_floor, moved, running * of_token / flops_of(case))

    mine = -(-responses // engines_of(case.recipe.engine, case.cluster))
    reading = mine * case.mean_prompt * (work.layers + work.attention) / share / flops_of(case)
    return reading + seconds_to_decode(mine, max(1, engine.requests), lengths, step)


def reading_seconds(responses: int, case: PlanCase) -> float:
    """Seconds until all engines have read `responses` responses with their prompts, and computed their logprobs."""
    work = token_flops(case.architecture, case.mean_sequence)
    flops = case.mean_sequence * (work.layers + work.attention) + case.mean_response * work.head
    mine = -(-responses // engines_of(case.recipe.engine, case.cluster))
    return mine * flops / case.recipe.engine.tensor / flops_of(case)


def flops_of(case: PlanCase) -> float:
    """FLOP/s that one device is assumed to reach on this model."""
    share = case.assumptions.mfu_experts if case.architecture.experts else case.assumptions.mfu
    return case.cluster.device.flops * share
