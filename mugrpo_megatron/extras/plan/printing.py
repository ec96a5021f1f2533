"""Prints a plan: tables on a terminal, or JSON."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mugrpo_megatron.extras.plan.hardware import GIB, Cluster
from mugrpo_megatron.extras.plan.memory import RECOMPUTE
from mugrpo_megatron.extras.plan.plan import RunPlan, plan_as_dict
from mugrpo_megatron.extras.plan.printing_schedules import Pilot, pilot_as_dict
from mugrpo_megatron.files.json_text import to_json_value
from mugrpo_megatron.observe.environment import SHARED_MEMORY, SHARED_MEMORY_REMEDY
from mugrpo_megatron.observe.progress import new_table as _table
from mugrpo_megatron.pages import page_address

UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))


def two_digits(value: float) -> str:
    """The value with two significant digits: 150, 9.3, 0.0041."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, decimals)
    return f"{rounded:,.{max(0, 1 - math.floor(math.log10(abs(rounded))))}f}"


def about(seconds: float) -> str:
    """Seconds in the largest unit that fits once: 37 h, 9.3 min, 28 s."""
    size, unit = next(((size, unit) for size, unit in UNITS if seconds >= size), UNITS[-1])
    return f"{two_digits(seconds / size)} {unit}"


LISTED = 8
"""Most layouts that are listed of those that fit, and of those that do not."""


def print_plan(plan: RunPlan, launch: Mapping[str, str]) -> None:
    """Print all tables of a plan, and the commands that start the run."""
    console = Console()
    for line in (*_verdict(plan), *_head(plan)):
        console.print(line, highlight=False)
    tables = (_memory(plan), _phases(plan), _schedules(plan), _layouts(plan), _refused(plan))
    for table in tables:
        if table is not None:
            console.print(table)
    for where, command in launch.items():
        console.print(f"[bold]start it {where}:[/bold]", highlight=False)
        console.print(f"    {command}", highlight=False, soft_wrap=True, markup=False)
    console.print(
        "These figures come from a model. Its times depend on assumed rates and lengths; --assume name=value replaces "
        f"one. {page_address('plan')} has the model and compares the hours with the paper's.",
        highlight=False,
    )


def print_json(plan: RunPlan, launch: Mapping[str, str], pilot: Pilot | None = None) -> None:
    """Print the plan as JSON: bytes, seconds and shares; null for infinities and NaN."""
    values = plan_as_dict(plan, launch) | ({"pilot": pilot_as_dict(plan, pilot)} if pilot else {})
    print(json.dumps(to_json_value(values), indent=2))


def _verdict(plan: RunPlan) -> Iterable[str]:
    """Yield lines on the memory, whether it is tight, the hours, and the phases that take most time and most memory."""
    need, run = plan.memory, plan.schedules[0]
    fullest, peak = max(need.phases.items(), key=lambda phase: phase[1])
    longest, seconds = max(run.seconds.items(), key=lambda phase: phase[1])
    hours = two_digits(plan.gpu_hours(run.total))
    yield f"[bold]fits:[/bold] {peak / GIB:,.0f} of {need.device / GIB:,.0f} GiB on the fullest device"
    if plan.tight:
        way = (
            f"{plan.roomier.keys} needs {plan.roomier.peak / GIB:,.0f}"
            if plan.roomier
            else "no recomputation, length of packed rows or engine.memory_fraction needs less than 95 %"
        )
        yield f"[bold]tight:[/bold] {100 * peak / need.device:.0f} % of the device, and a plan is not so exact; {way}"
    yield f"[bold]takes:[/bold] {about(run.total)}, {hours} {_hours_name(plan)}"
    yield f"[bold]binds:[/bold] of the time {longest}, {100 * seconds / run.total:.0f} %; of the memory {fullest}\n"


def _head(plan: RunPlan) -> Iterable[str]:
    cluster, device = plan.cluster, plan.cluster.device
    nodes = "1 node" if cluster.nodes == 1 else f"{cluster.nodes:,} nodes"
    yield (
        f"planned for [bold]{nodes} with {cluster.per_node} x {device.name}[/bold] of {device.memory / GIB:.0f} GiB "
        "(--nodes, --gpus-per-node, --gpu)"
    )
    yield f"[bold]{plan.parameters / 1e9:.2f} B parameters[/bold] ({plan.model.source})"
    if plan.model.architecture.note:
        yield plan.model.architecture.note
    yield f"a checkpoint is {_gib(plan.checkpoint_bytes)} GiB, a sync moves {_gib(plan.sync_bytes)} GiB to each engine"
    yield f"a conversion needs {_gib(plan.conversion_bytes)} GiB of host memory"
    yield (
        f"learner: [bold]{plan.layout}[/bold]; {plan.batch.micro_batches} micro-batches of {plan.batch.length:,} "
        f"tokens on each rank" + f"; pipeline bubble {100 * plan.bubble:.1f} %" * (plan.layout.pipeline > 1)
    )


def _memory(plan: RunPlan) -> Table:
    need, state = plan.memory, plan.memory.learning.state
    learn, serve = need.learning, need.serving
    table = _table(f"Memory of the fullest rank (pipeline stage {learn.pp_stage})", "Part", ">GiB", "Note")
    rows = [
        ("learner: weights", state.weights, ""),
        ("learner: gradients", state.gradients, "float32, not sharded"),
        ("learner: master weights", state.master, f"float32, over {plan.layout.shards} ranks"),
        ("learner: moments", state.moments, ""),
        *(
            (f"learner: update, {choice} recompute", learn.peak(choice), "chosen" * (choice == learn.recompute))
            for choice in RECOMPUTE
        ),
        ("  of it: activations kept", learn.kept[learn.recompute], f"{learn.in_flight:g} micro-batches in flight"),
        ("  of it: recomputed layer", learn.remade[learn.recompute], ""),
        ("  of it: loss path", learn.loss, "hidden states, one chunk of logits" if learn.loss else "on the last stage"),
        ("  of it: a layer's backward pass", learn.working, "after the loss path"),
        ("engine: weights", serve.weights, ""),
        (
            "engine: KV cache",
            serve.cache,
            f"{serve.tokens:,} tokens, {serve.requests:,} responses together; {plan.engines} engines",
        ),
        ("engine: working memory", serve.work, "activations, CUDA graphs; assumed"),
    ]
    for name, value, note in rows:
        table.add_row(name, _gib(value), note)
    table.add_section()
    for name, value, note in (
        ("phase: learner at work", need.learn, "engine asleep"),
        ("phase: sync", need.sync, "both weights, buckets"),
        ("phase: engine at work", need.generate, "learner offloaded"),
        *(
            (f"phase: {cost.title}", cost.engine.total + need.resting, f"{cost.parameters / 1e9:.2f} B parameters")
            for cost in plan.auxiliaries
        ),
    ):
        table.add_row(name, _gib(value), f"{note}; {100 * value / need.device:.0f} % of the device")
    table.add_row("host memory of a node", _gib(need.host), "offloaded state, a checkpoint")
    if need.shared:
        table.add_row(f"{SHARED_MEMORY} of a node", _gib(need.shared), f"sync; in a container {SHARED_MEMORY_REMEDY}")
    return table


def _phases(plan: RunPlan) -> Table:
    table = _table(_stage_title(plan), "Phase", ">Time", ">Share")
    total = plan.phases.total
    for name, seconds in asdict(plan.phases).items():
        table.add_row(name, about(seconds), f"{100 * seconds / total:.0f} %")
        if name == "auxiliary":
            for cost in plan.auxiliaries:
                table.add_row(f"  of it: {cost.title}", about(cost.seconds), f"{about(cost.start)} of it to start")
    table.add_section()
    table.add_row("stage", about(total), "")
    return table


def _stage_title(plan: RunPlan) -> str:
    """Title of the stage's table; with `schedule.growth` it says that the stage is of mean length."""
    first, last = plan.stage_lengths
    if first == last:
        return "One stage of this recipe"
    mean = plan.schedules[0].updates_per_stage
    return f"A stage of mean length, {mean:,} updates; this recipe's have {first:,} to {last:,}"


def _schedules(plan: RunPlan) -> Table:
    title = "The whole run under three schedules, same objective"
    table = _table(title, "", *(f">{schedule.name}" for schedule in plan.schedules))
    table.add_row(
        "stages x updates", *(f"{schedule.stages:,} x {schedule.updates_per_stage:,}" for schedule in plan.schedules)
    )
    if any(schedule.epochs > 1 for schedule in plan.schedules):
        table.add_row("  epochs", *(f"{schedule.epochs:,}" for schedule in plan.schedules))
    for phase in plan.schedules[0].seconds:
        table.add_row(phase, *(about(schedule.seconds[phase]) for schedule in plan.schedules))
        if phase == "generate":
            table.add_row("  of it: tails", *(about(schedule.tail) for schedule in plan.schedules))
    table.add_section()
    table.add_row("total", *(about(schedule.total) for schedule in plan.schedules))
    table.add_row(_hours_name(plan), *(two_digits(plan.gpu_hours(schedule.total)) for schedule in plan.schedules))
    table.add_row("a stage on disk", *(f"{_gib(schedule.stage_bytes)} GiB" for schedule in plan.schedules))
    table.add_row("rates of a stage, summed", *(f"{schedule.rates:.1e}" for schedule in plan.schedules))
    _, grpo, mu = plan.schedules
    table.caption = (
        f"GRPO's schedule takes {grpo.total / mu.total:.2f} times as long as mu-GRPO's. --schedules has those between, "
        "most of which save nearly as much. The plan predicts no accuracy."
    )
    return table


def _hours_name(plan: RunPlan) -> str:
    return "GPU-hours" if plan.cluster.device.cuda else "rank-hours"


def _layouts(plan: RunPlan) -> Table:
    valid = [candidate for candidate in plan.layouts if not candidate.problems]
    table = _table(f"Fastest of {len(valid)} valid layouts", "Layout", ">Update", ">Learner GiB")
    for candidate in valid[:LISTED]:
        mark = " (this recipe)" if candidate.layout == plan.layout else ""
        table.add_row(f"{candidate.layout}{mark}", about(candidate.seconds), _gib(candidate.learn))
    return table


def _refused(plan: RunPlan) -> Table | None:
    refused = [candidate for candidate in plan.layouts if candidate.problems]
    if not refused:
        return None
    table = _table(f"{len(refused)} refused layouts, the nearest for each reason", "Layout", "Why")
    alike = Counter(candidate.problems for candidate in refused)
    nearest = {candidate.problems: candidate for candidate in reversed(refused)}
    for candidate in sorted(nearest.values(), key=lambda candidate: candidate.distance)[:LISTED]:
        more = f" and {alike[candidate.problems] - 1} more" if alike[candidate.problems] > 1 else ""
        table.add_row(f"{candidate.layout}{more}", "; ".join(candidate.problems))
    return table


def _gib(value: float) -> str:
    return f"{value / GIB:,.2f}"


SCRIPTS = "run_scripts"


def launch_commands(recipe: Path, overrides: Sequence[str], cluster: Cluster) -> dict[str, str]:
    """Where to start a run -> the command to give in the repository's root; the user replaces K and HOST in it."""
    words = ["train", str(recipe), *(word for setting in overrides for word in ("--set", setting))]
    train, ranks, nodes = shlex.join(words), cluster.per_node, cluster.nodes
    if nodes == 1 and ranks == 1:
        return {"here": f"mugrpo {train}"}
    if nodes == 1:
        commands = {"here": f"{SCRIPTS}/torchrun.sh {ranks} {train}"}
    else:
        where = f"--nodes {nodes} --node K --master HOST {ranks}"
        commands = {"on each node, with its K from 0": f"{SCRIPTS}/torchrun.sh {where} {train}"}
    if cluster.device.cuda:
        commands["under Slurm"] = f"sbatch --nodes {nodes} --gpus-per-node {ranks} {SCRIPTS}/slurm.sbatch {train}"
    return commands
