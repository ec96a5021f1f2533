"""A published stage: a directory with one stage of a run, laid out as a run's, from which another run starts.

README.md                        the card
published.json                   what the stage was made with, with a checksum; only `mugrpo publish` writes it
recipe.toml                      the run's recipe without places of its machine
stages/00003/                    the stage, byte for byte
checkpoints/stage00003-age00000/ the weights that the stage began with, where they were published too
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import digest, read_checksummed_json, write_checksummed_json
from mugrpo_megatron.files.hub import model_name
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.load import validate
from mugrpo_megatron.stages.store import StageStore

FILE_NAME = "published.json"
FORMAT = 1
DROPPED = ("run.dir", "track", "sft")
"""Keys and sections that say nothing of the stage and much of who made it."""
DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".jinja", ".py")


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


def hub_name(model: Path) -> tuple[str, str]:
    """Name and revision of a model: those of the hub where the path is in its cache, else the directory's name."""
    parts = model.resolve().parts
    for repository, snapshots, revision in zip(parts, parts[1:], parts[2:], strict=False):
        if repository.startswith("models--") and snapshots == "snapshots":
            return repository.removeprefix("models--").replace("--", "/"), revision
    return model.resolve().name, ""


def portable(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe without places of this machine, and the keys that were cut.

    Of a path the last part stays, of several sources that of each, and a name on the hub as it is. Settings that have
    nothing to do with the stage are left at their defaults.
    """
    hidden: list[str] = []
    table: dict[str, dict[str, Any]] = {}
    for section, values in recipe.model_dump(exclude_none=True).items():
        if section in DROPPED:
            continue
        table[section] = {}
        for key, value in values.items():
            name = f"{section}.{key}"
            if name in DROPPED:
                continue
            cut = (model_name(value) or hub_name(value)[0]) if name == "model.path" else _cut(value)
            if cut != value:
                hidden.append(name)
            table[section][key] = cut
    return validate(table, "the published recipe"), hidden


def _cut(value: Any) -> Any:
    """A recipe's value without the folders of the paths in it."""
    match value:
        case Path():
            return value.name
        case str():
            return ",".join(_cut_source(part) for part in value.split(",")) if _has_place(value.split(",")) else value
        case Mapping():
            return {key: _cut(inner) for key, inner in value.items()}
        case list() | tuple():
            return type(value)(_cut(inner) for inner in value)
        case _:
            return value


def _cut_source(text: str) -> str:
    name, at, file = text.rpartition("@")
    return f"{name}{at}{Path(file.strip()).name}" if _has_place([file]) else text


def _has_place(texts: Iterable[str]) -> bool:
    """Whether one of the texts is, or ends as `NAME@FILE` with, a path in a folder."""
    files = [text.rpartition("@")[2].strip() for text in texts]
    return any(
        "/" in file and (file[0] in "/~." or file.endswith(DATA_SUFFIXES) or _exists(file)) for file in files if file
    )


def _exists(file: str) -> bool:
    try:
        return Path(file).exists()
    except (OSError, ValueError):
        return False
