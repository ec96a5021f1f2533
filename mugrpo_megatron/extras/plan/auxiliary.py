"""Cost of a recipe's auxiliary models in each stage: start, work and memory of their engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.auxiliary.models import judge_recipe, question_room, teacher_recipe
from mugrpo_megatron.extras.plan.case import ModelShape, PlanCase, parameters
from mugrpo_megatron.extras.plan.decoding import decoding_seconds, reading_seconds
from mugrpo_megatron.extras.plan.hardware import GIB
from mugrpo_megatron.extras.plan.memory import EngineMemory, engine_memory


@dataclass(frozen=True, slots=True)
class AuxiliaryCost:
    """What one job of an auxiliary model costs in one stage."""

    name: str
    job: str
    """Name of the job: `teacher`, or `judge NAME`."""
    parameters: int
    engine: EngineMemory
    start: float
    """Seconds until each node has read the weights from the disk and the engine has started."""
    work: float
    """Seconds in which a teacher reads the stage, or a judge reads its questions and decodes its answers."""

    @property
    def seconds(self) -> float:
        return self.start + self.work

    @property
    def title(self) -> str:
        return f"{self.name}, {self.job}"


def auxiliary_costs(case: PlanCase) -> list[AuxiliaryCost]:
    """The cost of every job of every auxiliary model, in the order of a run.

    Raises UserError when the ranks cannot be divided into the engines of one of the models.
    """
    return [cost for name in case.recipe.auxiliary.by_name for cost in _costs(case, name, case.auxiliaries[name])]


def _costs(case: PlanCase, name: str, model: ModelShape) -> Iterator[AuxiliaryCost]:
    recipe, path = case.recipe, case.recipe.auxiliary.by_name[name].model
    shaped = replace(case, architecture=model.architecture, config=model.config)
    if recipe.objective.teacher == name:
        yield _cost(replace(shaped, recipe=teacher_recipe(recipe, name, path)), name, "teacher")
    for function, judge in recipe.reward.judges.items():
        if judge.model == name:
            room = question_room(recipe.longest_training_sequence, judge, model.config)
            # The mean length of a question as a share of the longest; nearly all of a question is the response in it.
            quoted = min(1.0, case.mean_sequence / room)
            engine_recipe = judge_recipe(recipe, name, path, judge, room)
            judge_case = replace(
                shaped, recipe=engine_recipe, assumptions=replace(case.assumptions, mean_prompt=quoted)
            )
            yield _cost(judge_case, name, f"judge {function}")


def _cost(case: PlanCase, name: str, job: str) -> AuxiliaryCost:
    """Cost of one job; `case` has the auxiliary model in place of the policy."""
    responses, rates = case.recipe.schedule.updates_per_stage * case.responses, case.assumptions
    try:
        engine = engine_memory(case)
        reads = job == "teacher"
        work = reading_seconds(responses, case) if reads else decoding_seconds(responses, case, engine)
    except UserError as error:
        raise UserError(f"auxiliary.{name}: {error}") from None
    size = parameters(case.architecture)
    start = rates.engine_start + size * case.itemsize * case.cluster.nodes / rates.disk
    return AuxiliaryCost(name, job, size, engine, start, work)


def auxiliary_problems(costs: Sequence[AuxiliaryCost], resting: float, device: int) -> list[str]:
    """One sentence for each job whose engine needs more than `device - resting` bytes or has no room for a response.

    `device` is a device's memory, `resting` what the learner and the engine keep there while they sleep.
    """
    problems = []
    for cost in costs:
        need, key = cost.engine.total + resting, f"auxiliary.{cost.name}.engine"
        if need > device:
            problems.append(
                f"auxiliary.{cost.name} needs {need / GIB:.1f} GiB of {device / GIB:.1f}; raise {key}.tensor"
            )
        elif cost.engine.requests < 1:
            problems.append(
                f"auxiliary.{cost.name} has no room for one response's keys and values; raise {key}.memory_fraction or "
                f"{key}.tensor"
            )
    return problems
