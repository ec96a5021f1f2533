"""A tiny checkpoint, and one engine on it for every test that leaves it alive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mugrpo_megatron.engine import client
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.engine_spec import engine_spec
from tests.engine.tiny import recipe, save_checkpoint
from tests.engine_server import forked_engines


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="session")
def tiny_recipe(checkpoint: Path) -> Recipe:
    return recipe(checkpoint)


@pytest.fixture(scope="session")
def engine(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Of two replicas, whatever the number of cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "replicas", lambda *_: 2)
        log = tmp_path_factory.mktemp("engine") / "engine.log"
        with forked_engines():
            engine = Engine.start(engine_spec(tiny_recipe), tiny_recipe.model.path, log)
    yield engine
    engine.stop()
