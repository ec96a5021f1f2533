"""Tiny checkpoints that the tests of the learner read."""

from __future__ import annotations

import pytest

from tests.learner.tiny import save_model, save_routed


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def routed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_routed(tmp_path_factory.mktemp("routed")))
