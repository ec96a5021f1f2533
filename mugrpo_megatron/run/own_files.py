"""Checksums of the user's own files that decide a run's results: a resume refuses an edited one.

    own_files.json     the recipe's key that names the file -> SHA-256 of the file, with a checksum

The contents count and not the places, so a file may move with the directory that it is imported from. What a module
imports is not part of it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import read_sealed, write_sealed
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.functions import source_sum

FILE_NAME = "own_files.json"


def own_files(recipe: Recipe) -> dict[str, str]:
    """The recipe's keys that name a file of the user's -> SHA-256; without those that are not on this machine."""
    rewards = {
        f"reward.functions.{name}" if recipe.reward.functions else "reward.function": one.function
        for name, one in recipe.reward.table.items()
    }
    objective = recipe.objective
    named = {
        **rewards,
        "objective.surrogate": objective.surrogate,
        "objective.diagnostics": objective.diagnostics or "",
    }
    sums = {key: source_sum(name) for key, name in named.items()}
    sums["data.chat_template"] = file_sum(recipe.data.chat_template)
    return {key: found for key, found in sums.items() if found}


def file_sum(path: Path | None) -> str:
    """SHA-256 of a file; empty without one, and for one that cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path else ""
    except (OSError, ValueError):
        return ""


def check_own_files(recipe: Recipe) -> None:
    """Raise UserError when a file of the run in `run.dir`, if there is one, was edited since the run began."""
    path = recipe.run.dir / FILE_NAME
    if not path.exists():  # also of a run that began before there was such a record
        return
    accept = f"remove {path} to continue with the files as they are now"
    try:
        before: dict[str, str] = read_sealed(path, "files")
        now = own_files(recipe)
        edited = [key for key in sorted(before.keys() & now.keys()) if before[key] != now[key]]
    except (OSError, ValueError, AttributeError, TypeError):
        raise UserError(f"{path}: damaged, so your own files cannot be checked; {accept}") from None
    if edited:
        raise UserError(
            f"{' and '.join(edited)} names a file that was edited since {recipe.run.dir} began; restore it, "
            f"begin a new run or a branch with another run.dir, or {accept}"
        )


def record_own_files(recipe: Recipe) -> None:
    """`check_own_files`, and write the checksums of a run that has none; call it with the directory's lock."""
    check_own_files(recipe)
    if not (recipe.run.dir / FILE_NAME).exists():
        write_sealed(recipe.run.dir / FILE_NAME, "files", own_files(recipe))
