"""Runs that take the updates of another run's first stage, each in a directory of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.tiny import mugrpo


def optimize(source: Path, run_dir: Path, *changes: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """`mugrpo optimize` in `run_dir` with some keys changed: a branch of `source`, or that branch resumed."""
    of = [] if run_dir.exists() else ["--stage", "0", "--from", source]
    words = [word for change in (f"run.dir={run_dir}", *changes) for word in ("--set", change)]
    return mugrpo("optimize", source.parent / "recipe.toml", *of, *words, code=code)
