"""Checks a run before anything slow is imported: its model, layout, run directory and data.

`mugrpo train` runs these checks first; `--dry-run` runs nothing else. Torch, transformers, Megatron, SGLang and sympy
are not imported at the top, so that a mistake is reported within seconds.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mugrpo_megatron.algorithm.advantages import ARGUMENTS as ADVANTAGE_ARGUMENTS
from mugrpo_megatron.algorithm.trial import LOSS_ARGUMENTS, try_user_functions
from mugrpo_megatron.checks.engines import (
    EngineSetup,
    check_engine_device,
    check_without_sync,
    depends_on_device,
    engine_problems,
)
from mugrpo_megatron.checks.layouts import bundled_configs, check_layers, check_layout, describe_layout
from mugrpo_megatron.checks.toolchain import tools_here
from mugrpo_megatron.cuda import driver_finds_gpu, finds_cuda, may_find_cuda
from mugrpo_megatron.data.arithmetic import TASKS
from mugrpo_megatron.data.fields import unread_fields
from mugrpo_megatron.data.prepare import Problems, read_problems
from mugrpo_megatron.data.problems import absent, check_files, check_sets, held_out_sets, named_sources
from mugrpo_megatron.data.prompts import check_style, prompt_text, quoted, template_of
from mugrpo_megatron.engine.launch import check_extra
from mugrpo_megatron.engine.placement import slot_of_environment
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import (
    CONFIG,
    ModelConfig,
    check_tokenizer,
    check_weight_files,
    check_weights,
    read_config,
    read_model_config,
)
from mugrpo_megatron.files.vocabulary import check_vocabulary
from mugrpo_megatron.observe.environment import missing_wandb_error, rank_of_environment
from mugrpo_megatron.recipe import ObjectiveSection, Recipe
from mugrpo_megatron.recipe.functions import arguments_of, check_function, load_function
from mugrpo_megatron.recipe.objective import USER_FUNCTION
from mugrpo_megatron.recipe.policy import RolloutSection
from mugrpo_megatron.recipe.scoring import CODE, MATH, EvalSection, RewardSection
from mugrpo_megatron.recipe.sections import DataSection, OptimizerSection, ScheduleSection, TrackSection
from mugrpo_megatron.recipe.systems import EngineSection, LearnerSection, ParallelSection
from mugrpo_megatron.rewards.gold_check import scores_of_golds
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.run.directory import check_directory
from mugrpo_megatron.run.initial_model import with_cached_model, with_model
from mugrpo_megatron.run.inputs import check_data
from mugrpo_megatron.samples import Problem
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.families import architecture

Say = Callable[[str], None]

ANY_PROBLEM = Problem("a question", "1+1=", "2")
"""The problem on which a chat template is tried if the data set is not on this machine."""


def check_run(recipe: Recipe, say: Say = lambda line: None, generates: bool = True) -> tuple[Recipe, Problems | None]:
    """Raise UserError for a run that cannot work; call `say` with lines about its model, layout and data.

    Returns the recipe with `model.path` on this machine, and the problems of its data sets. The problems are None on
    ranks other than 0, and if `generates` is false.
    """
    # Rank 0 alone looks at run.dir and the data: it may write files there while a slower rank is still here.
    main = rank_of_environment() == 0
    if main:
        check_directory(recipe)
        _check_tracking(recipe.track)
    _check_names(recipe.data, recipe.eval, recipe.reward, recipe.rollout, recipe.engine)
    _check_user_loss(recipe.objective)
    if main and generates:  # these checks come before a model is downloaded
        check_files(f"{recipe.data.train},{recipe.data.eval}")
        _try_rewards(recipe.reward)
    recipe, config, shape = _with_model_config(recipe, say, recipe.run.dir)
    _check_ref(recipe.objective.kl_ref, recipe.model.path, shape)
    _check_extras(recipe, shape, say)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    check_layout(recipe, config, world)
    if generates:
        _check_toolkit()
        _check_engine_device(EngineSetup(recipe))
        slot_of_environment(recipe.engine, cuda=True)  # raises if the ranks cannot be divided into engines
    _check_layers(recipe.learner, recipe.model.dtype)
    say(_layout_line(recipe.parallel, world))
    say_warmup(recipe.optimizer, recipe.schedule, say)
    problems = _read(recipe.data, recipe.reward, recipe.run.dir, say) if main and generates else None
    if main:
        _try_user_loss(recipe.objective, recipe.reward, problems.train if problems else [], say)
    return recipe, problems


def say_warmup(optimizer: OptimizerSection, schedule: ScheduleSection, say: Say) -> None:
    """Tell the user if the run ends before the warm-up of its learning rate does."""
    if optimizer.warmup_updates > schedule.total_updates:
        reached = optimizer.lr * schedule.total_updates / optimizer.warmup_updates
        say(
            f"optimizer: warmup_updates = {optimizer.warmup_updates} is more than the run's {schedule.total_updates:,} "
            f"updates, so the rate ends at {reached:.3g} and never reaches lr = {optimizer.lr:.3g}"
        )


def check_on_paper(recipe: Recipe, say: Say) -> None:
    """Check a run for `--dry-run`: without a download, and without this machine's device.

    If the data are on this machine, it also prints the first prompt, tries `rollout.agent`, and gives a gold to each
    reward function as the response.

    The layout is checked on WORLD_SIZE ranks; without this environment variable, on the fewest ranks that the layout
    needs.
    """
    say_warmup(recipe.optimizer, recipe.schedule, say)
    check_directory(recipe)
    _check_names(recipe.data, recipe.eval, recipe.reward, recipe.rollout, recipe.engine)
    _check_user_loss(recipe.objective)
    _check_tracking(recipe.track)
    recipe = with_cached_model(recipe, recipe.run.dir)
    data, directory = recipe.data, recipe.model.directory
    config, source = _config(directory)
    if config is None:
        say(f"model: not on this machine, so neither it nor the layout is checked: {directory}")
        _check_extras(recipe, None, say, on_paper=True)
    else:
        shape = architecture(config, source)
        if directory.exists():
            check_vocabulary(directory, shape.vocab_size)
            check_weight_files(directory)
        _say_model(shape, source, say)
        world = int(os.environ.get("WORLD_SIZE", "0")) or fewest_ranks(recipe.parallel)
        check_layout(recipe, config, world)
        say(_layout_line(recipe.parallel, world))
        _check_extras(recipe, shape, say, on_paper=True)
    if missing := dict.fromkeys([*absent(data.train), *absent(data.eval)]):
        say(f"data: not on this machine, so not checked: {', '.join(missing)}")
        _check_prompts(data, directory, [ANY_PROBLEM])
        _try_rewards(recipe.reward)
        _try_user_loss(recipe.objective, recipe.reward, [], say)
        return
    problems = _read(data, recipe.reward, recipe.run.dir, say)
    for note in problems.notes:
        say(f"data: {note}")
    for line in _check_prompts(data, directory, [*problems.train, *problems.held_out]):
        say(line)
    if recipe.rollout.agent and problems.train:
        from mugrpo_megatron.extras.episodes.trial import try_agent

        say(try_agent(recipe, problems.train))
    for line in scores_of_golds([*problems.train, *problems.held_out], recipe.reward):
        say(f"reward: {line}")
    _try_user_loss(recipe.objective, recipe.reward, problems.train, say)


def _check_prompts(data: DataSection, model: Path, problems: Sequence[Problem]) -> list[str]:
    """Returns lines to print: the first prompt, and the fields of rows that no prompt shows.

    Empty without problems, or if the prompt depends on a tokenizer that is not on this machine. Raises UserError when
    the chat template cannot render a set's first problem.
    """
    template = template_of(data)
    first_of_each: dict[str, Problem] = {}
    for problem in problems:
        first_of_each.setdefault(problem.source, problem)
    prompts = [
        prompt_text(problem, data.prompt_style, template, model if model.exists() else None)
        for problem in first_of_each.values()
    ]
    if not prompts or prompts[0] is None:
        return []

    def shown(problem: Problem) -> str:
        return (prompt_text(problem, data.prompt_style, template, model if model.exists() else None) or ("", ""))[1]

    first = f"prompt: {prompts[0][0]}, before it is tokenized: {quoted(prompts[0][1])}"
    return [first, *(f"data: {note}" for note in unread_fields(problems, shown))]


def read_checked_problems(recipe: Recipe, say: Say) -> Problems | None:
    """Read and check the problems of a run that samples from servers; None on ranks other than 0. Call it after
    `check_run`."""
    if rank_of_environment() != 0:
        return None
    check_files(f"{recipe.data.train},{recipe.data.eval}")
    _try_rewards(recipe.reward)
    return _read(recipe.data, recipe.reward, recipe.run.dir, say)


def check_engine_only(recipe: Recipe, say: Say, engine: bool = True) -> tuple[Recipe, Problems]:
    """Check a run for a process without a learner: as `check_run` does, but without what only a learner needs, such as
    a layout.

    With `engine` false the process has no engine either, since it samples from servers. Returns the recipe with
    `model.path` on this machine, and the problems of its data sets.
    """
    check_directory(recipe)
    _check_names(recipe.data, recipe.eval, recipe.reward, recipe.rollout, recipe.engine)
    check_files(f"{recipe.data.train},{recipe.data.eval}")
    _try_rewards(recipe.reward)
    recipe, config, _ = _with_model_config(recipe, say, recipe.run.dir)
    if engine:
        check_without_sync(EngineSetup(recipe))
        check_engine(EngineSetup(recipe, config))
    _check_extras(recipe, None, say)
    return recipe, _read(recipe.data, recipe.reward, recipe.run.dir, say)


def check_engine(setup: EngineSetup) -> None:
    """Raise UserError when an engine on this machine cannot run the recipe's model."""
    if problems := list(engine_problems(setup)):
        raise UserError("; ".join(problems))
    _check_engine_device(setup)


def check_evaluation(recipe: Recipe, sources: Sequence[str]) -> None:
    """Raise UserError when `mugrpo eval` on these sources cannot work, as far as that is known before the model is
    read."""
    for source in sources:
        check_files(source)
    known = held_out_sets(",".join(sources), "--data").keys() | named_sources(recipe.data.eval).keys()
    check_sets(recipe.eval, known, "--data and data.eval")
    recipe.eval.check_samples(held_out_sets(",".join(sources), "--data"))
    check_style(recipe.data.prompt_style)
    template_of(recipe.data)
    _check_user_rewards(recipe.reward, recipe.rollout)
    check_extra(recipe.engine.extra)
    _try_rewards(recipe.reward)


def check_warm_start(recipe: Recipe, say: Say = lambda line: None) -> Recipe:
    """Raise UserError when `mugrpo sft` cannot work; returns the recipe.

    With `sft.train` the model of the returned recipe is on this machine.
    """
    if recipe.sft.train is None:
        if recipe.data.train not in TASKS:  # other problems have golds, but no responses to imitate
            raise UserError(
                f'data.train = "{recipe.data.train}": without sft.train, `mugrpo sft` trains a new model on a bundled '
                f"task; set data.train to one of {', '.join(TASKS)}, or name rows of prompts and responses with "
                "sft.train, or begin with `mugrpo train` on a downloaded model"
            )
        return recipe
    if recipe.sft.train in TASKS:
        raise UserError(
            f'sft.train = "{recipe.sft.train}" is a bundled task, and sft.train names rows for an existing model; to '
            "train a new model on the task, set data.train to it and leave sft.train out"
        )
    check_files(recipe.sft.train)
    check_style(recipe.data.prompt_style)
    template_of(recipe.data)
    recipe, config, _ = _with_model_config(recipe, say)
    check_layout(recipe, config, int(os.environ.get("WORLD_SIZE", "1")))
    _check_layers(recipe.learner, recipe.model.dtype)
    return recipe


def fewest_ranks(parallel: ParallelSection) -> int:
    """Returns the smallest number of ranks that a layout runs on: tensor x pipeline x context, times expert /
    gcd(expert, context), since `expert` has to divide the data parallel ranks times `context`."""
    block = parallel.tensor * parallel.pipeline * parallel.context
    return block * (parallel.expert // math.gcd(parallel.expert, parallel.context))


def _with_model_config(
    recipe: Recipe, say: Say, run_dir: Path | None = None
) -> tuple[Recipe, ModelConfig, Architecture]:
    """Returns the recipe with its model on this machine, and the model's config and architecture; `say` gets a line
    about the model."""
    recipe = with_model(recipe, say, run_dir)
    directory = recipe.model.directory
    config = read_model_config(directory)
    shape = architecture(config, str(directory / CONFIG))
    _say_model(shape, str(directory), say)
    check_weight_files(directory)
    check_tokenizer(directory)
    check_vocabulary(directory, shape.vocab_size)
    return recipe, config, shape


def _config(directory: Path) -> tuple[Mapping[str, Any] | None, str]:
    """Returns a model's config and where it comes from: the model's directory, or the configs in models.toml.

    The config is None if neither has the model.
    """
    if directory.exists():
        config = read_model_config(directory)
        check_tokenizer(directory)
        return config, str(directory / CONFIG)
    return bundled_configs().get(directory.name), f"the bundled shape of {directory.name}"


def _check_names(
    data: DataSection, evaluation: EvalSection, reward: RewardSection, rollout: RolloutSection, engine: EngineSection
) -> None:
    """Raise UserError for names of held-out sets, of users' functions and of SGLang's arguments that do not exist."""
    check_sets(evaluation, held_out_sets(data.eval).keys())
    evaluation.check_samples(held_out_sets(data.eval))
    _check_user_rewards(reward, rollout)
    check_extra(engine.extra)


def _check_user_loss(objective: ObjectiveSection) -> None:
    """Raise UserError for a user's function of the loss that does not exist, takes no argument that the run passes, or
    needs another one."""
    if objective.has_user_advantage:
        function = load_function("objective.advantage", objective.advantage)
        arguments_of(f"objective.advantage = {objective.advantage}", function, ADVANTAGE_ARGUMENTS)
    if ":" in objective.surrogate:
        function = load_function("objective.surrogate", objective.surrogate)
        arguments_of(f"objective.surrogate = {objective.surrogate}", function, LOSS_ARGUMENTS)
    if objective.diagnostics is not None:
        function = load_function("objective.diagnostics", objective.diagnostics)
        arguments_of(f"objective.diagnostics = {objective.diagnostics}", function, LOSS_ARGUMENTS)


def _try_user_loss(objective: ObjectiveSection, reward: RewardSection, problems: Sequence[Problem], say: Say) -> None:
    """Call each of the user's functions of the loss once, on the rows of the first two problems; say which were called.
    Raises UserError or FunctionFailure for one that cannot work."""
    rows = [problem.row for problem in problems[:2]]
    for line in try_user_functions(objective, rows, list(reward.table)):
        say(f"objective: {line}")


def _check_tracking(section: TrackSection) -> None:
    if section.wandb_project is not None and find_spec("wandb") is None:
        raise missing_wandb_error(section.wandb_project)


def _check_user_rewards(section: RewardSection, rollout: RolloutSection) -> None:
    """Raise UserError for a user's reward, episode function or program that does not exist. Functions are looked up in
    the source of their module, since only workers import it."""
    for name, entry in section.table.items():
        if entry.function not in (MATH, CODE):
            check_function(f"reward.functions.{name}" if section.functions else "reward.function", entry.function)
    if rollout.function:
        check_function("rollout.function", rollout.function)
    if rollout.agent and USER_FUNCTION.fullmatch(rollout.agent):
        check_function("rollout.agent", rollout.agent)
    elif rollout.agent:
        _check_command(rollout.agent)


def _check_command(agent: str) -> None:
    """Raise UserError for a command of `rollout.agent` whose program is not found."""
    try:
        words = shlex.split(agent)
    except ValueError as error:
        raise UserError(
            f"rollout.agent {agent!r} cannot be split into words ({error}); close its quotes, or remove the backslash "
            "at its end"
        ) from None
    # The folder of this interpreter is searched too, since the agent's PATH will begin with it
    # (extras/episodes/environment.py).
    paths = (None, os.path.dirname(os.path.abspath(sys.executable)))
    if not words or all(shutil.which(words[0], path=path) is None for path in paths):
        named = f"there is no program {words[0]!r}" if words else "it is empty"
        raise UserError(f"rollout.agent {agent!r}: {named}; name a command, or a module:function")


def _try_rewards(section: RewardSection) -> None:
    """Start a worker for each reward function, unless `math` is the only one. UserError when a worker cannot load its
    function, or does not know how to call it."""
    if any(entry.function != MATH for entry in section.table.values()):
        with Verifier(section.model_copy(update={"workers": 1})):
            pass


def _check_ref(kl_ref: str | None, model_path: Path, shape: Architecture) -> None:
    """Raise UserError when `objective.kl_ref` names a directory without a usable checkpoint, or a checkpoint whose
    weights the learner cannot hold."""
    if kl_ref is None or kl_ref in ("start", "stage"):
        return
    path, remedy = Path(kl_ref), 'name the directory of a checkpoint like the model\'s, or "start" or "stage"'
    config = read_config(path, key="objective.kl_ref", remedy=remedy)
    check_weights(path, "objective.kl_ref")
    if architecture(config, str(path / CONFIG)) != shape:
        raise UserError(
            f"objective.kl_ref = {path} has another architecture than {model_path}, so the learner cannot hold its "
            f"weights; {remedy}"
        )


def _check_extras(recipe: Recipe, shape: Architecture | None, say: Say, on_paper: bool = False) -> None:
    """Raise UserError when LoRA or an auxiliary model (a teacher or a judge) cannot work.

    LoRA is not checked if `shape`, the model's architecture, is None. Auxiliary models of the hub are downloaded unless
    `on_paper`.
    """
    if shape is not None and recipe.lora.rank is not None:
        from mugrpo_megatron.extras.lora.lora_checks import check_lora

        say(check_lora(recipe, shape))
    if recipe.auxiliary.by_name:
        from mugrpo_megatron.extras.auxiliary.checks import check_auxiliaries

        check_auxiliaries(recipe, say, on_paper)


def _check_engine_device(setup: EngineSetup) -> None:
    if depends_on_device(setup):
        check_engine_device(setup._replace(cuda=may_find_cuda() and finds_cuda()))


def _check_toolkit() -> None:
    """Raise UserError when this node has GPUs but lacks a tool that engines need to compile kernels. One rank of each
    node checks."""
    if os.environ.get("LOCAL_RANK", "0") != "0" or not driver_finds_gpu():
        return
    for tool in tools_here():
        if not tool.fits and tool.detail.startswith("not "):
            raise UserError(f"an engine does not start on this machine's GPU: {tool.name} {tool.detail}; {tool.remedy}")


def _check_layers(learner: LearnerSection, dtype: str) -> None:
    if learner.layers not in ("local", "auto"):
        import torch  # takes seconds, so only for recipes that need a device's features

        check_layers(learner, dtype, torch.cuda.is_available())


def _read(data: DataSection, reward: RewardSection, run_dir: Path, say: Say) -> Problems:
    """Returns the problems of the data sets; UserError when they are unusable, or not those that the run began with."""
    check_style(data.prompt_style)
    template_of(data)
    problems = read_problems(data, reward)
    reward.check_sources(problem.data_source for problem in (*problems.train, *problems.held_out))
    check_data(run_dir, problems)
    say(f"data: {len(problems.train):,} training and {len(problems.held_out):,} held-out problems")
    return problems


def _say_model(model: Architecture, source: str, say: Say) -> None:
    say(f"{model.summary} ({source})")
    if model.note:
        say(model.note)


def _layout_line(parallel: ParallelSection, world: int) -> str:
    return f"layout: {describe_layout(parallel)}, on {world} rank{'s' * (world > 1)}"
