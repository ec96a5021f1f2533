"""Engines on CPU are tested on the tiny checkpoint of the engine's tests."""

from tests.engine.conftest import checkpoint as checkpoint
