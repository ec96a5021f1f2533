"""A run with a directory and a recipe, which shows nothing, logs nothing and has one rank."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.record import RunRecord
from mugrpo_megatron.run.stopping import StopRequest


def bare_run(recipe: Recipe, directory: RunDirectory) -> Any:
    return SimpleNamespace(
        recipe=recipe,
        directory=directory,
        record=RunRecord("r"),
        is_main=True,
        log=SimpleNamespace(phase=lambda *_: nullcontext()),
        display=SimpleNamespace(bar=lambda *_: nullcontext(SimpleNamespace(advance=lambda: None))),
        world=SimpleNamespace(barrier=lambda: None, any_rank=lambda *flags: flags),
        stop=StopRequest(),
    )
