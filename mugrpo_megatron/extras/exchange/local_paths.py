"""Makes a recipe fit to be published: without this machine's directories, and with the model's name on the hub."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mugrpo_megatron.files.hub import model_name
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.load import validate

DROPPED = ("run.dir", "track", "sft")
"""Keys and sections that do not concern the stage, and may name people or machines."""
DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".jinja", ".py")


def hub_name(model: Path) -> tuple[str, str]:
    """A model's name and revision on the hub if the path is in the hub's cache, else the directory's name and ""."""
    parts = model.resolve().parts
    for repository, snapshots, revision in zip(parts, parts[1:], parts[2:], strict=False):
        if repository.startswith("models--") and snapshots == "snapshots":
            return repository.removeprefix("models--").replace("--", "/"), revision
    return model.resolve().name, ""


def without_local_paths(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe without this machine's directories, and the keys (`section.key`) whose values were cut.

    A path is cut to its last component, also in a list of sources. The path of a model becomes the model's name on the
    hub if it is such a name or a folder of the hub's cache. Settings that do not concern the stage get their defaults.
    """
    cut_keys: list[str] = []
    table: dict[str, dict[str, Any]] = {}
    for section, values in recipe.model_dump(exclude_none=True).items():
        if section in DROPPED:
            continue
        table[section] = {}
        for key, value in values.items():
            name = f"{section}.{key}"
            if name in DROPPED:
                continue
            shortened = _model(value) if name == "model.path" else _cut(value)
            if shortened != value:
                cut_keys.append(name)
            table[section][key] = shortened
    return validate(table, "the published recipe"), cut_keys


def _model(path: Path) -> Path:
    """The name on the hub of the model that `model.path` or `auxiliary.NAME.model` names, else the directory's name."""
    return Path(model_name(path) or hub_name(path)[0])


def _cut(value: Any) -> Any:
    """A recipe's value with every path cut to its last component."""
    match value:
        case Path():
            return value.name
        case str():
            return (
                ",".join(_cut_source(source) for source in value.split(","))
                if _has_directory(value.split(","))
                else value
            )
        case Mapping():
            return {
                key: _model(inner) if key == "model" and isinstance(inner, Path) else _cut(inner)
                for key, inner in value.items()
            }
        case list() | tuple():
            return type(value)(_cut(inner) for inner in value)
        case _:
            return value


def _cut_source(text: str) -> str:
    name, at, file = text.rpartition("@")
    return f"{name}{at}{Path(file.strip()).name}" if _has_directory([file]) else text


def _has_directory(texts: Iterable[str]) -> bool:
    """Whether one of the texts is a path with a directory in it, alone or as `NAME@FILE`."""
    files = [text.rpartition("@")[2].strip() for text in texts]
    return any(
        "/" in file and (file[0] in "/~." or file.endswith(DATA_SUFFIXES) or _exists(file)) for file in files if file
    )


def _exists(file: str) -> bool:
    try:
        return Path(file).exists()
    except (OSError, ValueError):
        return False
