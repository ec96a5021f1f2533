"""Checks that refuse auxiliary models before a run starts anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from mugrpo_megatron.checks.engines import EngineSetup, engine_problems
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.engine.launch import check_extra, engine_arguments
from mugrpo_megatron.engine.placement import slot_of_environment
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.auxiliary.jobs import read_template
from mugrpo_megatron.extras.auxiliary.models import directory_of, judge_recipe, question_room, teacher_recipe
from mugrpo_megatron.extras.auxiliary.score_reader import score_reader
from mugrpo_megatron.files.hf_config import (
    CONFIG,
    ModelConfig,
    check_tokenizer,
    check_weights,
    read_config,
    read_model_config,
)
from mugrpo_megatron.files.hub import model_name
from mugrpo_megatron.files.weight_file import open_weights
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.functions import check_function
from mugrpo_megatron.recipe.policy import AuxiliariesSection
from mugrpo_megatron.run.engine_spec import engine_spec
from mugrpo_megatron.weights.families import architecture

EMBEDDING = "model.embed_tokens.weight"
REMEDY = "give the directory of a checkpoint, or the name of a model on the hub"


def check_auxiliaries(recipe: Recipe, say: Callable[[str], None], on_paper: bool = False) -> None:
    """Raise UserError when an auxiliary model of the recipe could not do its jobs.

    Models of the hub are downloaded here, and tokenizers are compared token by token. With `on_paper` nothing is
    downloaded, and models that are not on this machine are left out.
    """
    for function, judge in recipe.reward.judges.items():
        key = f"reward.functions.{function}"
        assert judge.prompt
        assert judge.parse
        read_template(f"{key}.prompt", judge.prompt)
        check_function(f"{key}.parse", judge.parse)
        if not on_paper:
            with score_reader(recipe.reward.model_copy(update={"workers": 1}), judge, key):
                pass
    for name, auxiliary in recipe.auxiliary.by_name.items():
        key, section = f"auxiliary.{name}", auxiliary.engine_section(recipe.engine)
        check_extra(section.extra)
        if section.nodes > 1:
            raise UserError(
                f"{key}.engine.nodes = {section.nodes}: an auxiliary model's engine is on one node; set it to 1"
            )
        if not on_paper:
            slot_of_environment(section, cuda=True)
        elif not _on_this_machine(recipe.auxiliary, name):
            say(f"auxiliary model: {name}, not on this machine, so not checked: {auxiliary.model}")
            continue
        directory = directory_of(recipe.auxiliary, name, cached=on_paper)
        config = read_config(directory, key=f"{key}.model", remedy=REMEDY)
        check_weights(directory, f"{key}.model")
        _check_family(config, f"{key}.model = {directory}")
        _check_headers(directory, config, f"{key}.model = {directory}")
        for engine_recipe in _recipes(recipe, name, directory):
            if problems := list(engine_problems(EngineSetup(engine_recipe, config))):
                raise UserError(f"{key}: {'; '.join(problems)}")
            engine_arguments(engine_spec(engine_recipe), directory, cuda=True)
        say(f"auxiliary model: {name}, {config['model_type']} ({directory})")


def _on_this_machine(auxiliaries: AuxiliariesSection, name: str) -> bool:
    """Whether the auxiliary model's directory exists, or its model is in the hub's cache."""
    model = auxiliaries.by_name[name].model
    if model_name(model) is None:
        return Path(model).exists()
    try:
        return bool(directory_of(auxiliaries, name))
    except UserError:
        return False


def _recipes(recipe: Recipe, name: str, directory: Path) -> Iterator[Recipe]:
    """Check each job of an auxiliary model, and yield the recipe of the engine that does it."""
    if recipe.objective.teacher == name:
        _check_teacher(recipe.rollout.temperature, recipe.model.directory, name, directory)
        yield teacher_recipe(recipe, name, directory)
    for function, judge in recipe.reward.judges.items():
        if judge.model == name:
            check_tokenizer(directory)
            quoted = recipe.longest_training_sequence
            room = question_room(quoted, judge, read_model_config(directory))
            if room < 1:
                key = f"reward.functions.{function}.max_tokens"
                raise UserError(
                    f"{key} = {judge.max_tokens} leaves no room for a question in the judge's context of "
                    f"{room + judge.max_tokens} tokens; lower it"
                )
            yield judge_recipe(recipe, name, directory, judge, room)


def _check_family(config: ModelConfig, where: str) -> None:
    """Raise UserError for a `model_type` that neither transformers' nor SGLang's source files name; if neither package
    is installed, do nothing. The files are read as text, since both packages take long to import."""
    kind = config["model_type"]
    files = [
        *_sources("transformers", "models/auto/*.py"),
        *(path for folder in ("configs", "utils/hf_transformers") for path in _sources("sglang", f"srt/{folder}/*.py")),
    ]
    if files and not any(f'"{kind}"' in path.read_text("utf-8", "replace") for path in files):
        raise UserError(
            f"{where}: neither SGLang nor transformers has a model of model_type {kind!r}; correct config.json, or "
            "take another model"
        )


def _sources(package: str, pattern: str) -> Iterator[Path]:
    spec = find_spec(package)
    for folder in spec.submodule_search_locations or () if spec else ():
        yield from Path(folder).glob(pattern)


def _check_headers(directory: Path, config: ModelConfig, where: str) -> None:
    """Raise UserError for a truncated file of weights, and if the embedding has not the config's `vocab_size` rows."""
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with open_weights(path) as file:
                rows = file.get_slice(EMBEDDING).get_shape()[0] if EMBEDDING in file.keys() else None  # noqa: SIM118
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        if rows not in (None, config.get("vocab_size")):
            raise UserError(
                f"{where}: its config has vocab_size {config.get('vocab_size')}, and {path.name} has {rows:,} rows of "
                f"{EMBEDDING}; copy the config and the weights from the same checkpoint"
            )


def _check_teacher(temperature: float, policy: Path, name: str, directory: Path) -> None:
    """Raise UserError for a teacher whose vocabulary is not the policy's, and, at a temperature other than 1, for a
    family whose last norm, which applies the temperature, is not known (`models.LAST_NORM`)."""
    if temperature != 1.0:  # `architecture` refuses families whose last norm is not known
        architecture(read_config(directory, key=f"auxiliary.{name}.model", remedy=REMEDY), str(directory / CONFIG))
    if not policy.exists():  # this is a check on paper: the policy's files are not on this machine
        return
    expected, vocabulary = load_tokenizer(policy).get_vocab(), load_tokenizer(directory).get_vocab()
    if expected != vocabulary:
        differing = sorted(expected.items() ^ vocabulary.items(), key=lambda item: (item[1], item[0]))
        token, number = differing[0]
        raise UserError(
            f"auxiliary.{name}.model = {directory} has another vocabulary than {policy} "
            f"({len(differing)} entries differ, the first is {token!r} with the id {number}), so it cannot score the "
            "policy's tokens; take a teacher with the same vocabulary"
        )
