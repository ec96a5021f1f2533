"""The shape of a recipe's model: from its directory, a config.json alone, or the bundled table of public models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mugrpo_megatron.checks.models import bundled
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import read_config_file
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.families import architecture


@dataclass(frozen=True)
class Model:
    """A model's shape, and where it was found."""

    config: dict[str, Any]
    """As in config.json."""
    architecture: Architecture
    source: str


def find_model(recipe: Recipe, config: Path | None = None) -> Model:
    """The model to plan for: `config` if given, else `model.path`'s config.json, else the bundled entry of its name.

    No weights are needed. Raises UserError, naming all three ways, when none of them gives a shape.
    """
    path = config or recipe.model.path / "config.json"
    if path.is_file():
        return _from_file(path)
    if config:
        raise UserError(f"--model-config {config}: no such file; it is the config.json of a Hugging Face model")
    table, name = bundled(), recipe.model.path.name
    if name not in table:
        raise UserError(
            f"model.path = {recipe.model.path} holds no config.json and {name!r} is not one of the bundled shapes "
            f"({', '.join(sorted(table))}); pass --model-config FILE"
        )
    return Model(table[name], architecture(table[name], f"models.toml, {name}"), f"bundled shape of {name}")


def _from_file(path: Path) -> Model:
    config = read_config_file(path)
    return Model(dict(config), architecture(config, str(path)), str(path))
