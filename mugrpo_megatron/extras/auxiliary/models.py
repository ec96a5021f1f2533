"""An auxiliary model's files on this machine, and the recipe that its engine is started with.

SGLang 0.5.15 gives log-probabilities of a prompt's tokens at temperature 1 alone. For another temperature, a forward
hook (SGLang's `ServerArgs.forward_hooks`) divides the output of the model's last norm: the logits are linear in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hub import MODEL_FILES, model_name, snapshot
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.policy import AuxiliariesSection, ModelSection
from mugrpo_megatron.recipe.scoring import EvalSection, FunctionSection
from mugrpo_megatron.recipe.systems import EngineSection

if TYPE_CHECKING:
    import torch

TEMPLATE_TOKENS = 4096
"""The most tokens that a judge's question is expected to have besides the quoted prompt and response."""
OTHER_TOKENIZER = 2
"""The most tokens that the judge's tokenizer is expected to make of a text that is one token of the policy's."""
LONGEST_QUESTION = 1 << 20
"""The context in tokens that is assumed of a judge whose config has no `max_position_embeddings`."""


def directory_of(auxiliaries: AuxiliariesSection, name: str, cached: bool = True) -> Path:
    """Directory of the auxiliary model's checkpoint. A model of the hub is looked for in the hub's cache; with `cached`
    false it may be downloaded, too.

    Raises UserError if a model of the hub cannot be had in this way.
    """
    path = auxiliaries.by_name[name].model
    repository = model_name(path)
    if repository is None:
        return path
    try:
        return snapshot(repository, "model", None, MODEL_FILES, cached)
    except ValueError as error:
        raise UserError(
            f"auxiliary.{name}.model = {repository}: there is no such directory, and no copy of a model of the Hugging "
            f"Face hub could be found or downloaded ({error}); check the name and the network, or give the directory "
            "of a downloaded model"
        ) from None


def teacher_recipe(recipe: Recipe, name: str, directory: Path) -> Recipe:
    """The recipe for an engine that scores the policy's tokens at the rollout's temperature and samples nothing."""
    engine = recipe.auxiliary.by_name[name].engine_section(recipe.engine)
    if recipe.rollout.temperature != 1.0:
        engine = engine.model_copy(
            update={"extra": {**engine.extra, "forward_hooks": temperature_hook(recipe.rollout.temperature)}}
        )
    return _recipe(recipe, directory, engine, {})


def question_room(quoted: int, judge: FunctionSection, config: Mapping[str, Any]) -> int:
    """The most tokens that a judge's question may have; it quotes up to `quoted` tokens of the policy's tokenizer.

    Below 1 if the judge's `max_tokens` fill its context.
    """
    positions = config.get("max_position_embeddings") or LONGEST_QUESTION
    return min(OTHER_TOKENIZER * quoted + TEMPLATE_TOKENS, positions - judge.max_tokens)


def judge_recipe(recipe: Recipe, name: str, directory: Path, judge: FunctionSection, room: int) -> Recipe:
    """The recipe for an engine that answers questions of at most `room` tokens."""
    engine = recipe.auxiliary.by_name[name].engine_section(recipe.engine)
    return _recipe(recipe, directory, engine, {"max_response_tokens": judge.max_tokens}, room)


def _recipe(
    recipe: Recipe, directory: Path, engine: EngineSection, rollout: Mapping[str, Any], room: int | None = None
) -> Recipe:
    """The recipe with an auxiliary model in place of the policy. `rollout` has new values for keys of `[rollout]`, and
    `room`, if given, is the longest prompt in tokens."""
    # No stop texts, because for them SGLang would have to load a tokenizer; neither function nor agent, because an
    # auxiliary model plays no episodes.
    plain: dict[str, Any] = {"stop": [], "function": None, "agent": None}
    return recipe.model_copy(
        update={
            "model": ModelSection(path=directory, dtype=recipe.model.dtype),
            "data": recipe.data.model_copy(update={} if room is None else {"max_prompt_tokens": room}),
            "engine": engine,
            "learner": recipe.learner.model_copy(update={"routing_replay": "off"}),
            "rollout": recipe.rollout.model_copy(update=plain | dict(rollout)),
            "eval": EvalSection(),
        }
    )


LAST_NORM = "model.norm"
"""Name of the last norm in SGLang's models, for every family in `weights.families`."""


def temperature_hook(temperature: float) -> list[dict[str, Any]]:
    """SGLang's argument `forward_hooks` that divides all logits by `temperature`."""
    factory = f"{__name__}:make_divider"
    return [
        {
            "name": "temperature",
            "target_modules": [LAST_NORM],
            "hook_factory": factory,
            "config": {"temperature": temperature},
        }
    ]


def make_divider(config: Mapping[str, float]) -> Callable[[torch.nn.Module, Any, Any], Any]:
    """Returns a forward hook that divides a norm's output; of a pair (output, residual) it divides the output alone.

    SGLang calls this factory.
    """
    temperature = config["temperature"]

    def divide(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] / temperature, *output[1:])
        return output / temperature

    return divide
