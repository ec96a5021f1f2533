"""What the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from mugrpo_megatron.learner.groups import shutdown


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No test leaves a world behind that the next one would find, whatever failed."""
    yield
    if dist.is_initialized():
        shutdown()
