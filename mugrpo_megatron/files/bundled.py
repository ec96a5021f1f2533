"""Models that the package brings along: each is small, made by this project, and has a recipe beside its weights."""

from __future__ import annotations

from pathlib import Path

MODELS = Path(__file__).parents[1] / "bundled_models"
"""A directory for each model, named as `model.path` names it. README.md there says how each was made."""


def bundled_model(path: Path) -> Path | None:
    """The directory of the bundled model that `path` names; None for another name, and where `path` exists."""
    directory = MODELS / path
    if len(path.parts) != 1 or path.exists() or not directory.is_dir():
        return None
    return directory
