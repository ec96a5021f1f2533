"""Checks of a run before anything slow is imported: its model, layout, run directory and data.

Neither torch nor transformers, Megatron, SGLang or sympy is imported here, so that a mistake is told within seconds.
`mugrpo train` does this first; `--dry-run` does nothing else.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mugrpo_megatron.checks.engines import (
    check_engine_device,
    check_without_sync,
    depends_on_device,
    engine_problems,
)
from mugrpo_megatron.checks.layouts import bundled_configs, check_layers, check_layout, describe_layout
from mugrpo_megatron.checks.toolchain import tools_here
from mugrpo_megatron.cuda import driver_finds_gpu, finds_cuda, may_find_cuda
from mugrpo_megatron.data.arithmetic import TASKS
from mugrpo_megatron.data.prepare import Problems, read_problems
from mugrpo_megatron.data.problems import absent, check_files, check_sets, held_out_sets, named_sources
from mugrpo_megatron.data.prompts import check_style, prompt_text, quoted, template_of
from mugrpo_megatron.engine.launch import check_extra
from mugrpo_megatron.engine.placement import slot_of_environment
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import CONFIG, check_tokenizer, check_weights, read_config, read_model_config
from mugrpo_megatron.observe.environment import missing_wandb_error, rank_of_environment
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.functions import check_function, load_function
from mugrpo_megatron.recipe.scoring import CODE, MATH
from mugrpo_megatron.rewards.gold_check import scores_of_golds
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.run.data import check_data
from mugrpo_megatron.run.directory import check_directory
from mugrpo_megatron.run.record import with_cached_model, with_model
from mugrpo_megatron.samples import Problem
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.families import architecture

Say = Callable[[str], None]

ADMISSION = "mugrpo_megatron.extras.lora.admission:check"
AUXILIARY_CHECKS = "mugrpo_megatron.extras.auxiliary.checks:check_auxiliaries"

ANY_PROBLEM = Problem("a question", "1+1=", "2")
"""Stands for the data of another machine, when a chat template is tried."""


def check_run(recipe: Recipe, say: Say = lambda line: None, generates: bool = True) -> tuple[Recipe, Problems | None]:
    """Raise UserError for what cannot work; `say` gets a line for everything that can.

    Returns the recipe with its model on this machine (`run.model`), and the problems, which are read once, on rank 0
    of a run that generates.
    """
    if rank_of_environment() == 0:  # the others would see what rank 0 is writing
        check_directory(recipe)
        _check_tracking(recipe)
    _check_names(recipe)
    _check_user_loss(recipe)
    if generates and rank_of_environment() == 0:  # before a model is downloaded
        check_files(f"{recipe.data.train},{recipe.data.eval}")
        _try_rewards(recipe)
    recipe = with_model(recipe, say, recipe.run.dir)
    directory = recipe.model.directory
    config = read_model_config(directory)
    shape = architecture(config, str(directory / CONFIG))
    _check_ref(recipe, shape)
    say(_model(shape, str(directory)))
    _check_lora(recipe, shape, say)
    check_tokenizer(directory)
    _check_auxiliaries(recipe, say)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    check_layout(recipe, config, world)
    if generates:
        _check_toolkit()
        _check_engine_device(recipe)
        slot_of_environment(recipe.engine, cuda=True)  # whether the engines fit the node's ranks, whatever its cores
    _check_layers(recipe)
    say(_layout(recipe, world))
    if not generates or rank_of_environment() != 0:
        return recipe, None
    return recipe, _read(recipe, say)


def check_on_paper(recipe: Recipe, say: Say) -> None:
    """`check_run` as far as it goes without a download and on as many ranks as the layout needs; `--dry-run`."""
    check_directory(recipe)
    _check_names(recipe)
    _check_user_loss(recipe)
    _check_tracking(recipe)
    recipe = with_cached_model(recipe, recipe.run.dir)
    config, source = _config(recipe)
    if config is None:
        say(f"model: not on this machine, so neither it nor the layout is checked: {recipe.model.directory}")
    else:
        shape = architecture(config, source)
        say(_model(shape, source))
        _check_lora(recipe, shape, say)
        world = int(os.environ.get("WORLD_SIZE", "0")) or fewest_ranks(recipe)
        check_layout(recipe, config, world)
        say(_layout(recipe, world))
    _check_auxiliaries(recipe, say, on_paper=True)
    if missing := dict.fromkeys([*absent(recipe.data.train), *absent(recipe.data.eval)]):
        say(f"data: not on this machine, so not checked: {', '.join(missing)}")
        _check_prompts(recipe, [ANY_PROBLEM])
        _try_rewards(recipe)
        return
    problems = _read(recipe, say)
    for note in problems.notes:
        say(f"data: {note}")
    if line := _check_prompts(recipe, [*problems.train, *problems.held_out]):
        say(line)
    for line in scores_of_golds([*problems.train, *problems.held_out], recipe.reward):
        say(f"reward: {line}")


def _check_prompts(recipe: Recipe, problems: Sequence[Problem]) -> str:
    """UserError when the chat template cannot render the first problem of a set; else a line with the first prompt."""
    template, model = template_of(recipe.data), recipe.model.directory
    first_of_each: dict[str, Problem] = {}
    for problem in problems:
        first_of_each.setdefault(problem.source, problem)
    made = [
        prompt_text(problem, recipe.data.prompt_style, template, model if model.exists() else None)
        for problem in first_of_each.values()
    ]
    return f"prompt: {made[0][0]}, before it is tokenized: {quoted(made[0][1])}" if made and made[0] else ""


def check_engine_only(recipe: Recipe, say: Say) -> tuple[Recipe, Problems]:
    """`check_run` for a process without a learner, whose layout does not count then."""
    check_directory(recipe)
    _check_names(recipe)
    check_files(f"{recipe.data.train},{recipe.data.eval}")
    _try_rewards(recipe)
    recipe = with_model(recipe, say, recipe.run.dir)
    directory = recipe.model.directory
    config = read_model_config(directory)
    say(_model(architecture(config, str(directory / CONFIG)), str(directory)))
    check_tokenizer(directory)
    check_without_sync(recipe)
    check_engine(recipe, config)
    _check_auxiliaries(recipe, say)
    return recipe, _read(recipe, say)


def check_engine(recipe: Recipe, model: Mapping[str, Any]) -> None:
    """Raise UserError when an engine on this machine cannot be what the recipe says; `model` is the config."""
    if problems := list(engine_problems(recipe, model)):
        raise UserError("; ".join(problems))
    _check_engine_device(recipe)


def check_evaluation(recipe: Recipe, sources: Sequence[str]) -> None:
    """Raise UserError for what `mugrpo eval` on these sources cannot do, as far as that is known without the model."""
    for source in sources:
        check_files(source)
    known = held_out_sets(",".join(sources), "--data").keys() | named_sources(recipe.data.eval).keys()
    check_sets(recipe.eval, known, "--data and data.eval")
    check_style(recipe.data.prompt_style)
    template_of(recipe.data)
    _check_rewards(recipe)
    check_extra(recipe.engine.extra)
    _try_rewards(recipe)


def check_warm_start(recipe: Recipe, say: Say = lambda line: None) -> Recipe:
    """Raise UserError when `mugrpo sft` cannot work; the recipe with its model, where it learns `sft.train`.

    Of the tasks and sets of `data.train` only bundled tasks have answers to imitate.
    """
    if recipe.sft.train is None:
        if recipe.data.train not in TASKS:
            raise UserError(
                f'data.train = "{recipe.data.train}": a new model imitates the answers of a bundled task; take one of '
                f"{', '.join(TASKS)}, name rows of prompts and responses with sft.train, or start RL from a downloaded "
                "model"
            )
        return recipe
    if recipe.sft.train in TASKS:
        raise UserError(
            f'sft.train = "{recipe.sft.train}" is a bundled task, which a new model learns: name it with data.train, '
            "and leave sft.train out"
        )
    check_files(recipe.sft.train)
    check_style(recipe.data.prompt_style)
    template_of(recipe.data)
    recipe = with_model(recipe, say)
    directory = recipe.model.directory
    config = read_model_config(directory)
    say(_model(architecture(config, str(directory / CONFIG)), str(directory)))
    check_tokenizer(directory)
    check_layout(recipe, config, int(os.environ.get("WORLD_SIZE", "1")))
    _check_layers(recipe)
    return recipe


def fewest_ranks(recipe: Recipe) -> int:
    """The smallest world that a layout can be laid over: its block, often enough to spread the experts."""
    parallel = recipe.parallel
    block = parallel.tensor * parallel.pipeline * parallel.context
    return block * (parallel.expert // math.gcd(parallel.expert, parallel.context))


def _config(recipe: Recipe) -> tuple[Mapping[str, Any] | None, str]:
    """The model's config and where it is from: its directory, else the bundled shapes of public models."""
    directory = recipe.model.directory
    if directory.exists():
        config = read_model_config(directory)
        check_tokenizer(directory)
        return config, str(directory / CONFIG)
    return bundled_configs().get(directory.name), f"the bundled shape of {directory.name}"


def _check_names(recipe: Recipe) -> None:
    """Held-out sets, the users' functions and SGLang's arguments, by their names alone."""
    check_sets(recipe.eval, held_out_sets(recipe.data.eval).keys())
    _check_rewards(recipe)
    check_extra(recipe.engine.extra)


def _check_user_loss(recipe: Recipe) -> None:
    if ":" in recipe.objective.surrogate:
        load_function("objective.surrogate", recipe.objective.surrogate)
    if recipe.objective.diagnostics is not None:
        load_function("objective.diagnostics", recipe.objective.diagnostics)


def _check_tracking(recipe: Recipe) -> None:
    if recipe.track.wandb_project is not None and find_spec("wandb") is None:
        raise missing_wandb_error(recipe.track.wandb_project)


def _check_rewards(recipe: Recipe) -> None:
    """The users' functions of rewards and episodes are named right; they are loaded in workers alone."""
    section = recipe.reward
    for name, one in section.table.items():
        if one.function not in (MATH, CODE):
            check_function(f"reward.functions.{name}" if section.functions else "reward.function", one.function)
    if recipe.rollout.function:
        check_function("rollout.function", recipe.rollout.function)


def _try_rewards(recipe: Recipe) -> None:
    """UserError for a user's function that cannot be loaded or takes other parameters: a worker of each is started."""
    if any(one.function != MATH for one in recipe.reward.table.values()):
        with Verifier(recipe.reward.model_copy(update={"workers": 1})):
            pass


def _check_ref(recipe: Recipe, model: Architecture) -> None:
    """UserError when `objective.kl_ref` names a directory whose weights the learner cannot hold."""
    name = recipe.objective.kl_ref
    if name in (None, "start", "stage"):
        return
    path, remedy = Path(name), 'name the directory of a checkpoint like the model\'s, or "start" or "stage"'
    config = read_config(path, key="objective.kl_ref", remedy=remedy)
    check_weights(path, "objective.kl_ref")
    if architecture(config, str(path / CONFIG)) != model:
        raise UserError(
            f"objective.kl_ref = {path} has another shape than {recipe.model.path}, so the learner cannot hold its "
            f"weights; {remedy}"
        )


def _check_lora(recipe: Recipe, model: Architecture, say: Say) -> None:
    if recipe.lora.rank is not None:
        say(load_function("lora", ADMISSION)(recipe, model))


def _check_auxiliaries(recipe: Recipe, say: Say, on_paper: bool = False) -> None:
    """UserError when an auxiliary model of the recipe could not take its turn; downloads models of the hub unless
    `on_paper`."""
    if recipe.auxiliary.by_name:
        load_function("auxiliary", AUXILIARY_CHECKS)(recipe, say, on_paper)


def _check_engine_device(recipe: Recipe) -> None:
    if depends_on_device(recipe):
        check_engine_device(recipe, may_find_cuda() and finds_cuda())


def _check_toolkit() -> None:
    """UserError when an engine on this node's GPUs could not compile its kernels; the first rank of a node looks."""
    if os.environ.get("LOCAL_RANK", "0") != "0" or not driver_finds_gpu():
        return
    for tool in tools_here():
        if not tool.fits and tool.detail.startswith("not "):
            raise UserError(f"an engine does not start on this machine's GPU: {tool.name} {tool.detail}; {tool.remedy}")


def _check_layers(recipe: Recipe) -> None:
    if recipe.learner.layers not in ("local", "auto"):
        import torch  # seconds, for recipes that ask for a device's features alone

        check_layers(recipe, torch.cuda.is_available())


def _read(recipe: Recipe, say: Say) -> Problems:
    check_style(recipe.data.prompt_style)
    template_of(recipe.data)
    problems = read_problems(recipe.data, recipe.reward)
    recipe.reward.check_sources(problem.data_source for problem in (*problems.train, *problems.held_out))
    check_data(recipe.run.dir, problems)
    say(f"data: {len(problems.train):,} training and {len(problems.held_out):,} held-out problems")
    return problems


def _model(model: Architecture, source: str) -> str:
    experts = f", {model.experts} experts" if model.experts else ""
    return f"model: {model.family}, {model.layers} layers, hidden size {model.letters['H']}{experts} ({source})"


def _layout(recipe: Recipe, world: int) -> str:
    return f"layout: {describe_layout(recipe.parallel)}, on {world} rank{'s' * (world > 1)}"
