"""A published stage: a directory with one stage, laid out as a run directory, from which another run starts.

README.md                        the card for the hub
published.json                   which run and model made the stage, with a checksum; only `mugrpo publish` writes it
recipe.toml                      the run's recipe, without paths of its machine
stages/00003/                    the stage, byte for byte
checkpoints/stage00003-age00000/ the weights at the start of the stage, if they were published
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import digest, read_checksummed_json, write_checksummed_json
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.recipe.policy import ModelSection, RolloutSection
from mugrpo_megatron.stages.store import StageStore

FILE_NAME = "published.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Published:
    """The content of `published.json`: the run and the model that made the stage, and what is not published of them."""

    run: str
    """Id of the run."""
    stage: int
    model: str
    """Name of the model that the run began with."""
    revision: str
    """The model's revision on the Hugging Face hub; empty for a directory."""
    weights: dict[str, str]
    """The model's weight files and their SHA-256."""
    hidden: list[str]
    """The recipe keys, `section.key`, whose paths were cut to their last part, to show nothing of the machine."""
    logprobs: bool = True
    """Whether the stage's responses have behaviour log-probabilities; imported responses may have none."""


def read_published(directory: Path) -> Published | None:
    """Read `published.json`; None for a directory without one, UserError when it is damaged."""
    path = directory / FILE_NAME
    if not path.is_file():
        return None
    try:
        return Published(**read_checksummed_json(path, "published", format=FORMAT))
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(
            f"{path}: damaged, unreadable or of another version; publish the stage again, or fetch it again"
        ) from None


def write_published(directory: Path, published: Published) -> None:
    """Write `published.json`, which makes a directory a published stage."""
    write_checksummed_json(directory / FILE_NAME, "published", asdict(published), format=FORMAT)


def check_start(published: Published, model: ModelSection) -> None:
    """Raise UserError when `model.path` has other weights than the model that sampled a published stage 0."""
    if published.stage:
        return  # a branch at a later stage starts from the published checkpoint and not from `model.path`
    sums = weight_sums(model.directory)
    if sums != published.weights:
        raise UserError(
            f"model.path = {model.path} has other weights than {published.model}"
            f"{f' at revision {published.revision}' if published.revision else ''}, which sampled the published stage; "
            "take that model"
        )


def have_logprobs(store: StageStore) -> bool:
    """Whether a stage's responses have the engine's log-probabilities; imported responses may have none."""
    # A stage has logprobs for all of its responses or for none, so its first update shows which.
    return not any(np.isnan(sample.engine_logprobs).any() for sample in store.read_update(0))


def check_logprobs(store: StageStore, rollout: RolloutSection, objective: ObjectiveSection) -> None:
    """Raise UserError when the recipe needs the engine's log-probabilities of a stage that has none."""
    needed = rollout.behaviour != "learner" or objective.mismatch != "none"
    if needed and not have_logprobs(store):
        raise UserError(
            f"{store.directory}: the responses have no log-probabilities of the engine that sampled them; set "
            'rollout.behaviour = "learner" and objective.mismatch = "none"'
        )


def weight_sums(model: Path) -> dict[str, str]:
    """The SHA-256 of each safetensors file of a model directory, by name; UserError if it has no such file."""
    if not model.is_dir():
        raise UserError(
            f"model.path = {model}, looked up from {Path.cwd()}, is not a directory; run this in the directory in "
            "which the run was started"
        )
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"model.path = {model} has no weights (*.safetensors) to compare; name the model that sampled the stage"
        )
    return {path.name: digest(path).sha256 for path in files}
