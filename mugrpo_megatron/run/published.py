"""A published stage: a directory with one stage of a run, laid out as a run's, from which another run starts.

README.md                        the card
published.json                   what the stage was made with, with a checksum; only `mugrpo publish` writes it
recipe.toml                      the run's recipe without places of its machine
stages/00003/                    the stage, byte for byte
checkpoints/stage00003-age00000/ the weights that the stage began with, where they were published too
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import digest, read_checksummed_json, write_checksummed_json
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.stages.store import StageStore

FILE_NAME = "published.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Published:
    """What a published stage was made with."""

    run: str
    """Id of the run."""
    stage: int
    model: str
    """Name of the model that the run began with."""
    revision: str
    """Its revision on the Hugging Face hub; empty where it is not from there."""
    weights: dict[str, str]
    """Its weight files and their SHA-256."""
    hidden: list[str]
    """Recipe keys, `section.key`, whose values are places of the run's machine and are cut to their last part."""
    logprobs: bool = True
    """Whether its responses have behaviour log-probabilities; imported ones may not."""


def read_published(directory: Path) -> Published | None:
    """What `mugrpo publish` wrote in a directory; None for any other one, UserError when it is damaged."""
    path = directory / FILE_NAME
    if not path.is_file():
        return None
    try:
        return Published(**read_checksummed_json(path, "published", format=FORMAT))
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(f"{path}: damaged or of another version; publish the stage again, or fetch it again") from None


def write_published(directory: Path, published: Published) -> None:
    """Write the file that makes a directory a published stage."""
    write_checksummed_json(directory / FILE_NAME, "published", asdict(published), format=FORMAT)


def check_start(published: Published, recipe: Recipe) -> None:
    """Raise UserError when `model.path` has other weights than those that sampled the published stage 0."""
    if published.stage:
        return  # its weights are in its checkpoint
    sums = weight_sums(recipe.model.directory)
    if sums != published.weights:
        raise UserError(
            f"model.path = {recipe.model.path} has other weights than {published.model}"
            f"{f' at revision {published.revision}' if published.revision else ''}, which sampled the published stage; "
            "take that model"
        )


def have_logprobs(store: StageStore) -> bool:
    """Whether a stage's responses have the log-probabilities that they were sampled with; imported ones may not.

    All responses of a stage have them, or none has.
    """
    return not any(np.isnan(sample.engine_logprobs).any() for sample in store.read_update(0))


def check_logprobs(store: StageStore, recipe: Recipe) -> None:
    """Raise UserError when the recipe takes log-probabilities of a stage that has none."""
    takes = recipe.rollout.behaviour != "learner" or recipe.objective.mismatch != "none"
    if takes and not have_logprobs(store):
        raise UserError(
            'the responses have no log-probabilities of their own: set rollout.behaviour = "learner" and '
            'objective.mismatch = "none"'
        )


def weight_sums(model: Path) -> dict[str, str]:
    """SHA-256 of each safetensors file of a model directory; UserError without one."""
    if not model.is_dir():
        raise UserError(
            f"model.path = {model} is not a directory, looked up from {Path.cwd()}: run this where the run was started"
        )
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise UserError(f"model.path = {model} has no weights (*.safetensors), so they cannot be compared")
    return {path.name: digest(path).sha256 for path in files}
