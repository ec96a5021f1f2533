"""What is recorded of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mugrpo_megatron.observe.environment import usable_cores


@pytest.mark.parametrize(
    ("quota", "cores"), [("100000 100000", 1), ("50000 100000", 1), ("900000000 100000", 9000), ("max 100000", 9000)]
)
def test_a_containers_quota_limits_the_cores(tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_cores(tmp_path / "cpu.max") == min(cores, len(os.sched_getaffinity(0)))
