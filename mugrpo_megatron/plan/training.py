"""Seconds of the learner: computing, communication, optimizer step."""

from __future__ import annotations

from mugrpo_megatron.observe.metrics import MISMATCH_RESPONSES
from mugrpo_megatron.plan.case import Case
from mugrpo_megatron.plan.layout import Layout, rank_parameters
from mugrpo_megatron.plan.memory import batch_of
from mugrpo_megatron.weights.flops import work_of


def flops_of(case: Case) -> float:
    """FLOP/s that one device is assumed to reach on this model."""
    share = case.assumptions.mfu_experts if case.architecture.experts else case.assumptions.mfu
    return case.cluster.device.flops * share


def logprob_seconds(case: Case) -> float:
    """Seconds of a stage's forward passes: the mismatch with the engine, and those over whole stages.

    One is for what the recipe records of the policy at the stage's start, one for an anchor that is another policy, and
    one for the reference policy in each of the schedule's passes.
    """
    recipe, responses = case.recipe, min(MISMATCH_RESPONSES, case.responses)
    scored, anchor = recipe.rollout.behaviour == "learner", recipe.objective.kl_anchor
    whole = int(scored or recipe.learner.routing_replay == "learner")
    whole += anchor is not None and not (anchor == "stage" and scored)
    whole += (recipe.objective.reference_every > 1) * recipe.schedule.passes
    responses += whole * recipe.schedule.updates_per_stage * case.responses
    return responses * _sequence_flops(case, passes=1.0, head=1) / (case.cluster.world * flops_of(case))


def update_seconds(case: Case) -> float:
    """Seconds of one update: forward and backward, pipeline bubble, communication, optimizer step."""
    objective, layout = case.recipe.objective, case.layout
    passes = 4.0 if layout.recompute == "full" else 3.0
    head = 4 if objective.dependence == "response" else 3
    flops = _sequence_flops(case, passes, head)
    if objective.needs_statistics:
        flops += _sequence_flops(case, passes=1.0, head=1)
    computed = case.responses * flops / case.assumptions.packing / (case.cluster.world * flops_of(case))
    idle = bubble(layout, batch_of(case).micro_batches)
    return (computed + communication_seconds(case)) / (1 - idle) + step_seconds(case)


def bubble(layout: Layout, micro_batches: int) -> float:
    """Share of an update for which a pipeline stage idles: (p - 1) / (m v + p - 1) (arXiv 2104.04473, section 2.2)."""
    idle = layout.pipeline - 1
    return idle / (micro_batches * layout.virtual + idle)


def communication_seconds(case: Case) -> float:
    """Seconds of tensor, context and expert parallel communication in one update, over a rank's layers."""
    architecture, layout, b = case.architecture, case.layout, case.itemsize
    size = architecture.letters
    tokens = case.responses * case.mean_sequence / case.assumptions.packing / layout.shards
    # Each layer communicates two tensors of each kind in every forward pass and in the backward pass.
    times = 2 * (3 if layout.recompute == "full" else 2)
    # An all-reduce, or a reduce-scatter and an all-gather, moves a rank's share of the tensor twice.
    reduced = times * 2 * _others(layout.tensor) * tokens * size["H"] * b
    gathered = times * _others(layout.context) * tokens * layout.context * size["K"] / layout.tensor * b
    seconds = reduced / case.assumptions.inside + gathered / _link(layout.tensor * layout.context, case)
    if architecture.experts:
        chosen = architecture.transformer["moe_router_topk"]
        sent = times * _others(layout.expert) * tokens / layout.tensor * chosen * size["H"] * b
        seconds += sent / _link(layout.tensor * layout.expert, case)
    return architecture.layers / layout.pipeline * seconds


def step_seconds(case: Case) -> float:
    """Seconds to reduce gradients, update states and gather weights (not overlapped), on the largest pipeline stage."""
    layout, b = case.layout, case.itemsize
    stages = [rank_parameters(case.architecture, layout, pp_stage) for pp_stage in range(layout.pipeline)]
    mine = max(stages, key=lambda one: one.total)
    sharded = mine.dense / layout.shards + mine.experts / layout.expert_shards
    passed = (4 + b) * (mine.dense * _others(layout.shards) + mine.experts * _others(layout.expert_shards))
    touched = 3 * 4 * mine.total + 7 * 4 * sharded
    return passed / _link(layout.tensor * layout.shards, case) + touched / case.cluster.device.bandwidth


def _sequence_flops(case: Case, passes: float, head: int) -> float:
    """FLOP of one sequence: `passes` through the layers, `head` products with the output weight for trained tokens."""
    work = work_of(case.architecture, case.mean_sequence)
    return passes * case.mean_sequence * (work.layers + work.attention) + head * case.mean_response * work.head


def _others(ranks: int) -> float:
    """Share of a tensor that other ranks hold."""
    return (ranks - 1) / ranks


def _link(ranks: int, case: Case) -> float:
    """Bytes/s in a process group that spans `ranks` neighbouring ranks."""
    return case.assumptions.inside if ranks <= case.cluster.per_node else case.assumptions.between
