"""The models in the package: small ones that this project trained, each with its recipe beside its weights."""

from __future__ import annotations

from pathlib import Path

MODELS = Path(__file__).parents[1] / "bundled_models"
"""A directory for each model, named as `model.path` names it. README.md there says how each was made."""


def bundled_model(path: Path) -> Path | None:
    """The directory of the bundled model that `path` names; None if `path` exists or names no bundled model."""
    directory = MODELS / path
    if len(path.parts) != 1 or path.exists() or not directory.is_dir():
        return None
    return directory
