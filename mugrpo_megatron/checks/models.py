"""Shapes of public models, for checks and plans before a model is on this machine."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any


def bundled() -> dict[str, dict[str, Any]]:
    """Folder name -> config of the bundled public models."""
    return tomllib.loads(files(__package__).joinpath("models.toml").read_text(encoding="utf-8"))
