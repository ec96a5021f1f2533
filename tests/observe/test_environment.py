"""What is recorded of the machine, and its peaks."""

from __future__ import annotations

import os
import platform
import re
import sys
from mmap import mmap
from pathlib import Path

import numpy as np
import pytest

from mugrpo_megatron.observe.environment import (
    commit,
    group_memory,
    invocation,
    learner_memory_peak,
    peak_flops,
    usable_cores,
)


@pytest.mark.parametrize(
    ("quota", "cores"), [("100000 100000", 1), ("50000 100000", 1), ("900000000 100000", 9000), ("max 100000", 9000)]
)
def test_a_containers_quota_limits_the_cores(tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_cores(tmp_path / "cpu.max") == min(cores, len(os.sched_getaffinity(0)))


def test_a_run_records_where_and_how_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/mugrpo_megatron/__main__.py", "train", "my recipe.toml"])
    places = invocation()
    assert places["command"] == "mugrpo train 'my recipe.toml'"
    assert places["host"] == platform.node()
    assert re.fullmatch(r"[0-9a-f]{12}\+?", places.get("commit", "0" * 12))


def test_a_wheel_knows_the_commit_that_it_was_built_of(tmp_path: Path) -> None:
    package = tmp_path / "mugrpo_megatron"
    package.mkdir()
    assert commit(package) == ""
    (package / "commit.txt").write_text("0123456789ab\n")
    assert commit(package) == "0123456789ab"


def test_a_device_is_known_by_its_name() -> None:
    for name, peak in (
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA GeForce RTX 4090", None),
    ):
        assert peak_flops(name) == peak, name


def test_memory_that_is_touched_is_counted() -> None:
    size = 64 << 20
    held = np.frombuffer(mmap(-1, size), dtype=np.uint8)  # not from the heap, which may have kept as much
    before = group_memory(os.getpid())
    held[:] = 1
    assert group_memory(os.getpid()) - before > size / 2
    assert learner_memory_peak() >= held.nbytes
    assert group_memory(2**22 + 1) == 0.0, "no such process"
