"""What the tests of several phases start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mugrpo_megatron.observe.log import MetricLog, open_log
from mugrpo_megatron.recipe.sections import TrackSection


@pytest.fixture
def log(tmp_path: Path) -> Iterator[MetricLog]:
    with open_log(tmp_path, TrackSection(tensorboard=False)) as log:
        yield log
