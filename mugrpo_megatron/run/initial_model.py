"""Finds the model that a run starts from, a directory or a download from the hub: the same one at every resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hub import download_model, model_name
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.policy import ModelSection
from mugrpo_megatron.run.record import HubModel, RunRecord, read_record
from mugrpo_megatron.weights.families import fingerprint


def with_model(
    recipe: Recipe,
    say: Callable[[str], None] = lambda line: None,
    run_dir: Path | None = None,
    cached: bool = False,
) -> Recipe:
    """Download the model that the recipe names on the hub, and return the recipe with its directory on this machine.

    A recipe that names a directory, or whose model was found before, is returned as it is. If the run in `run_dir`
    began with this model, the recipe gets the commit that it began with. With `cached` nothing is downloaded. Raises
    UserError when the model cannot be downloaded or, with `cached`, is not in the hub's cache.
    """
    name = model_name(recipe.model.path)
    if name is None or recipe.model.commit:
        return recipe
    say(f"model: {name} of the Hugging Face hub, downloaded unless it is in the cache")
    # A branch or tag of the hub may have moved since the run began, so the run takes the commit that it began with.
    record = read_record(run_dir) if run_dir else None
    first = record.model if record else None
    revision = first.commit if first and first.name == name else recipe.model.revision
    snapshot = download_model(name, revision, cached)
    return recipe.model_copy(update={"model": recipe.model.at(snapshot)})


def with_cached_model(recipe: Recipe, run_dir: Path | None = None) -> Recipe:
    """`with_model` without a download: returns the recipe unchanged where that raises UserError.

    It does so if the model is not in the hub's cache, or if the run's record is damaged.
    """
    try:
        return with_model(recipe, run_dir=run_dir, cached=True)
    except UserError:
        return recipe


def hub_model(model: ModelSection) -> HubModel | None:
    """The name and commit of a model of the hub that `with_model` has found; None if `model.path` is a directory."""
    return HubModel(str(model.path), model.commit) if model.commit else None


def weights_fingerprint(model: ModelSection) -> str:
    """The checksum by which the weights in a model's directory are recognised (`weights.families.fingerprint`).

    Empty for a model of the hub, which its commit identifies.
    """
    return "" if model.commit else fingerprint(model.directory)


def check_initial_weights(record: RunRecord, model: ModelSection, source: str) -> None:
    """Raise UserError if `model.path` has other weights than the run began with; the error begins with `source`.

    If the record has no fingerprint of weights, as for a model of the hub, nothing is compared.
    """
    if record.weights and record.weights != weights_fingerprint(model):
        raise UserError(
            f"{source} used other weights than {model.path} holds now; restore the original weights, or begin a new "
            "run with these in another run.dir"
        )
