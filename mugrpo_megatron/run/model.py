"""The model of the hub that a recipe names: downloaded, and pinned to the commit that its run began with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hub import download_model, model_name
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.record import HubModel, Record, read_record
from mugrpo_megatron.weights.fingerprint import fingerprint


def with_model(recipe: Recipe, say: Callable[[str], None] = lambda line: None, run_dir: Path | None = None) -> Recipe:
    """The recipe with its model on this machine; one that names a directory is returned as it is.

    A run in `run_dir` gets the commit that it began with, also when its revision, a branch, has moved since. Raises
    UserError when the model cannot be downloaded.
    """
    name = model_name(recipe.model.path)
    if name is None or recipe.model.commit:
        return recipe
    say(f"model: {name} of the Hugging Face hub, downloaded unless it is in the cache")
    return _placed(recipe, name, run_dir, cached=False)


def with_cached_model(recipe: Recipe, run_dir: Path | None = None) -> Recipe:
    """The recipe with its model, when it is in the hub's cache; nothing is downloaded."""
    name = model_name(recipe.model.path)
    if name is None or recipe.model.commit:
        return recipe
    try:
        return _placed(recipe, name, run_dir, cached=True)
    except UserError:
        return recipe


def hub_model(recipe: Recipe) -> HubModel | None:
    """The name and the commit of a recipe's model of the hub, once it is on this machine."""
    commit = recipe.model.commit
    return HubModel(str(recipe.model.path), commit) if commit else None


def begun_weights(recipe: Recipe) -> str:
    """The fingerprint of the recipe's weights, if they are in a directory; empty for a model of the hub."""
    return "" if recipe.model.commit else fingerprint(recipe.model.directory)


def check_begun(record: Record, recipe: Recipe, what: str) -> None:
    """Raise UserError when `model.path` holds other weights than when the run began, from which `what` is."""
    if record.weights and record.weights != begun_weights(recipe):
        raise UserError(
            f"{what} used other weights than {recipe.model.path} holds now; restore the original weights, or choose "
            "another run.dir"
        )


def _placed(recipe: Recipe, name: str, run_dir: Path | None, cached: bool) -> Recipe:
    record = read_record(run_dir) if run_dir else None
    begun = record.model if record else None
    revision = begun.commit if begun and begun.name == name else recipe.model.revision
    snapshot = download_model(name, revision, cached)
    return recipe.model_copy(update={"model": recipe.model.at(snapshot)})
