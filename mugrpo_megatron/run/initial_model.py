"""The model that a run starts from: a directory, or a download from the hub; a run gets the same model every time it
resumes."""

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
    """The recipe with its model on this machine; a recipe that names a directory is returned as it is.

    A run in `run_dir` gets the commit that it began with. Raises UserError when the model cannot be downloaded, or with
    `cached` when it is not in the hub's cache.
    """
    name = model_name(recipe.model.path)
    if name is None or recipe.model.commit:
        return recipe
    say(f"model: {name} of the Hugging Face hub, downloaded unless it is in the cache")
    # A branch or tag of the hub may have moved: the run goes on with its own commit, or its weights would mix.
    record = read_record(run_dir) if run_dir else None
    first = record.model if record else None
    revision = first.commit if first and first.name == name else recipe.model.revision
    snapshot = download_model(name, revision, cached)
    return recipe.model_copy(update={"model": recipe.model.at(snapshot)})


def with_cached_model(recipe: Recipe, run_dir: Path | None = None) -> Recipe:
    """The recipe with its model if that is in the hub's cache; downloads nothing."""
    try:
        return with_model(recipe, run_dir=run_dir, cached=True)
    except UserError:
        return recipe


def hub_model(model: ModelSection) -> HubModel | None:
    """Name and commit of a model of the hub, once it is on this machine; None if `model.path` is a directory."""
    return HubModel(str(model.path), model.commit) if model.commit else None


def weights_fingerprint(model: ModelSection) -> str:
    """Fingerprint of the weights in a model's directory; empty for a model of the hub, which its commit identifies."""
    return "" if model.commit else fingerprint(model.directory)


def check_initial_weights(record: RunRecord, model: ModelSection, source: str) -> None:
    """Raise UserError unless `model.path` holds the run's initial weights; the error begins with `source`."""
    if record.weights and record.weights != weights_fingerprint(model):
        raise UserError(
            f"{source} used other weights than {model.path} holds now; restore the original weights, or choose "
            "another run.dir"
        )
