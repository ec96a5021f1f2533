"""Seconds and bytes of a stage from assumed rates."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from mugrpo_megatron.data.problems import named_sources
from mugrpo_megatron.extras.plan.auxiliary import auxiliary_costs
from mugrpo_megatron.extras.plan.case import Layout, PlanCase, parameters
from mugrpo_megatron.extras.plan.decoding import decoding_seconds, flops_of
from mugrpo_megatron.extras.plan.hardware import engines_of
from mugrpo_megatron.extras.plan.memory import EngineMemory, Memory, batch_of
from mugrpo_megatron.observe.metrics import MISMATCH_RESPONSES
from mugrpo_megatron.recipe.scoring import EvalSection
from mugrpo_megatron.recipe.sections import ScheduleSection
from mugrpo_megatron.weights.families import token_flops

PROBLEMS = {"aime24": 30, "aime25": 30, "amc23": 40, "amc24": 50, "gsm8k": 1319, "math500": 500}
"""Problems of public held-out sets (amc24: two tests of 25); of another set, as many as `data.eval_problems` allows."""


def scoring_seconds(responses: int, case: PlanCase) -> float:
    """Seconds in which the verifiers score `responses` responses in all.

    Each engine leader has a verifier of `reward.workers` processes, but of no more than it has cores. If the key is 0,
    the verifier has one process for every two cores.
    """
    engines = engines_of(case.recipe.engine, case.cluster)
    cores = case.assumptions.cores * case.cluster.world / engines
    workers = min(case.recipe.reward.workers, cores) or max(1, int(cores // 2))
    return responses / (case.assumptions.verifier * workers * engines)


def evaluations(schedule: ScheduleSection, section: EvalSection) -> tuple[int, int]:
    """The number of evaluations in a run: (before stages, others). Before a stage the engines are awake anyway.

    Before: the first stage and every `eval.every_stages`-th one. Others: inside a stage after every
    `eval.every_updates`-th update except the last, and at the end of the run.
    """
    before = 1 + ((schedule.stages - 1) // section.every_stages if section.every_stages else 0)
    inside = (schedule.updates_on_stage - 1) // section.every_updates if section.every_updates else 0
    return before, schedule.stages * inside + 1


def evaluation_seconds(case: PlanCase, engine: EngineMemory) -> float:
    """Seconds of one evaluation; sets with the same sampling settings are decoded together (phases/evaluate.py)."""
    recipe = case.recipe
    groups: Counter[tuple[int, float, float, int]] = Counter()
    for name in named_sources(recipe.data.eval):
        sampling = recipe.eval.of(name)
        longest = sampling.max_tokens or recipe.rollout.max_response_tokens
        problems = min(recipe.data.eval_problems, PROBLEMS.get(name, recipe.data.eval_problems))
        groups[sampling.samples, sampling.temperature, sampling.top_p, longest] += problems * sampling.samples
    return sum(  # with each set's limit `longest`, which scales the mean length too
        decoding_seconds(count, case.with_keys("rollout", max_response_tokens=longest), engine)
        for (*_, longest), count in groups.items()
    )


def logprob_seconds(case: PlanCase) -> float:
    """Seconds of a stage's forward passes without a backward pass.

    One measures the mismatch with the engine on a few responses. The others are over the whole stage: one if the recipe
    records logprobs or routes of the learner at the stage's start, one for a reference policy unless it is the policy
    whose logprobs are recorded there, and one for the proximal policy in each epoch.
    """
    recipe, responses = case.recipe, min(MISMATCH_RESPONSES, case.responses)
    scored, ref = recipe.rollout.behaviour == "learner", recipe.objective.kl_ref
    stage_passes = int(scored or recipe.learner.routing_replay == "learner")
    stage_passes += ref is not None and not (ref == "stage" and scored)
    stage_passes += (recipe.objective.proximal_every > 1) * recipe.schedule.epochs
    responses += stage_passes * recipe.schedule.updates_per_stage * case.responses
    return responses * _sequence_flops(case, passes=1.0, head=1) / (case.cluster.world * flops_of(case))


def update_seconds(case: PlanCase) -> float:
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


def communication_seconds(case: PlanCase) -> float:
    """Seconds of tensor, context and expert parallel communication in one update, over a rank's layers."""
    architecture, layout, b = case.architecture, case.layout, case.itemsize
    size = architecture.letters
    tokens = case.responses * case.mean_sequence / case.assumptions.packing / layout.shards
    # For each kind of parallelism, a layer communicates two tensors in every forward pass, a recomputed one included,
    # and two in the backward pass.
    times = 2 * (3 if layout.recompute == "full" else 2)
    # An all-reduce over n ranks, or a reduce-scatter with an all-gather, moves (n - 1) / n of the tensor twice.
    reduced = times * 2 * _others(layout.tensor) * tokens * size["H"] * b
    width = size["Q"] if architecture.latent else size["K"]
    gathered = times * _others(layout.context) * tokens * layout.context * width / layout.tensor * b
    seconds = reduced / case.assumptions.inside + gathered / _link(layout.tensor * layout.context, case)
    if architecture.experts:
        chosen = architecture.transformer["moe_router_topk"]
        sent = times * _others(layout.expert) * tokens / layout.tensor * chosen * size["H"] * b
        seconds += sent / _link(layout.tensor * layout.expert, case)
    return architecture.layers / layout.pipeline * seconds


def step_seconds(case: PlanCase) -> float:
    """Seconds to reduce gradients, update states and gather weights (not overlapped), on the largest pipeline stage."""
    layout, b = case.layout, case.itemsize
    mine = max((case.trained(pp_stage) for pp_stage in range(layout.pipeline)), key=lambda rank: rank.total)
    sharded = mine.dense / layout.shards + mine.experts / layout.expert_shards
    passed = (4 + b) * (mine.dense * _others(layout.shards) + mine.experts * _others(layout.expert_shards))
    touched = 3 * 4 * mine.total + 7 * 4 * sharded
    return passed / _link(layout.tensor * layout.shards, case) + touched / case.cluster.device.bandwidth


def _sequence_flops(case: PlanCase, passes: float, head: int) -> float:
    """FLOP of one sequence: `passes` through the layers, `head` products with the output weight for trained tokens."""
    work = token_flops(case.architecture, case.mean_sequence)
    return passes * case.mean_sequence * (work.layers + work.attention) + head * case.mean_response * work.head


def _others(ranks: int) -> float:
    """Fraction of a tensor that the other ranks of a group of `ranks` hold."""
    return (ranks - 1) / ranks


def _link(ranks: int, case: PlanCase) -> float:
    """Bytes/s of a rank's connection in a process group of `ranks` neighbouring ranks."""
    return case.assumptions.inside if ranks <= case.cluster.per_node else case.assumptions.between


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of one stage."""

    switch: float
    """Seconds to offload and reload the learner, and to wake the engine and put it to sleep."""
    sync: float
    generate: float
    score: float
    """Seconds of verification that remain after generation."""
    evaluate: float
    """Seconds of the run's evaluations divided by its stages, with a switch and a sync for each that is not before a
    stage."""
    logprobs: float
    auxiliary: float
    """Seconds of the auxiliary models: the starts of their engines and their work."""
    optimize: float
    save: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in self.__slots__)


def phases(case: PlanCase, need: Memory) -> Phases:
    """Seconds of one stage of the recipe's schedule."""
    schedule, state = case.recipe.schedule, need.learning.state
    responses = schedule.updates_per_stage * case.responses
    generate = decoding_seconds(responses, case, need.serving)
    moved = 2 * (state.weights + state.optimizer) / case.assumptions.host_link + case.assumptions.wake
    switch, sync = moved if case.cuda else 0.0, sync_bytes(case) / case.assumptions.bridge
    before, woken = evaluations(schedule, case.recipe.eval)
    evaluate = (before + woken) * evaluation_seconds(case, need.serving) + woken * (switch + sync)
    phases = Phases(
        switch=switch,
        sync=sync,
        generate=generate,
        score=max(0.0, scoring_seconds(responses, case) - generate),
        evaluate=evaluate / schedule.stages,
        logprobs=logprob_seconds(case),
        auxiliary=sum(cost.seconds for cost in auxiliary_costs(case)),
        optimize=schedule.updates_on_stage * update_seconds(case),
    )
    return replace(phases, save=saving_seconds(phases.total, case))


def saving_seconds(others: float, case: PlanCase) -> float:
    """Seconds that a stage waits for checkpoints: for those inside the stage, and its share of the wait for the
    checkpoint that is saved once in `checkpoint.every_stages` stages.

    `others` are the seconds of the stage's other work. With `checkpoint.asynchronous` the run waits for the copy to
    host memory, and for the disk only if a save has not ended when the next one begins (run/checkpoints.py).
    """
    section, updates = case.recipe.checkpoint, case.recipe.schedule.updates_on_stage
    saves = 1 / section.every_stages + ((updates - 1) // section.every_updates if section.every_updates else 0)
    written = saves * checkpoint_bytes(case) / case.assumptions.disk
    if not section.asynchronous:
        return written
    mine = max(case.trained(pp_stage).shared(case.layout) for pp_stage in range(case.layout.pipeline))
    copied = saves * mine * (case.itemsize + 12.0) / case.assumptions.host_link if case.cuda else 0.0
    return copied + max(0.0, written - others - copied)


def checkpoint_bytes(case: PlanCase) -> float:
    """Bytes of a checkpoint: trained weights, their float32 master weights and both moments (learner/checkpoint.py)."""
    adapter = case.adapter(Layout())
    return (adapter.total if adapter else parameters(case.architecture)) * (case.itemsize + 12.0)


def sync_bytes(case: PlanCase) -> int:
    """Bytes of the weights: sent to each engine in every stage."""
    return parameters(case.architecture) * case.itemsize


def stage_bytes(case: PlanCase) -> float:
    """Bytes of a stage's Parquet before compression: 8 a response token, 4 a prompt token, 40 a response."""
    responses = case.recipe.schedule.updates_per_stage * case.responses
    return responses * (8 * case.mean_response + 4 * case.mean_prompt + 40)
