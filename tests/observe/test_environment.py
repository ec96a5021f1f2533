"""What is recorded of the machine."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

import pytest

from mugrpo_megatron.observe.environment import commit, origin, usable_cores


@pytest.mark.parametrize(
    ("quota", "cores"), [("100000 100000", 1), ("50000 100000", 1), ("900000000 100000", 9000), ("max 100000", 9000)]
)
def test_a_containers_quota_limits_the_cores(tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_cores(tmp_path / "cpu.max") == min(cores, len(os.sched_getaffinity(0)))


def test_a_run_records_where_and_how_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/mugrpo_megatron/__main__.py", "train", "my recipe.toml"])
    places = origin()
    assert places["command"] == "mugrpo train 'my recipe.toml'"
    assert places["host"] == platform.node()
    assert re.fullmatch(r"[0-9a-f]{12}\+?", places.get("commit", "0" * 12))


def test_a_wheel_knows_the_commit_that_it_was_built_of(tmp_path: Path) -> None:
    package = tmp_path / "mugrpo_megatron"
    package.mkdir()
    assert commit(package) == ""
    (package / "commit.txt").write_text("0123456789ab\n")
    assert commit(package) == "0123456789ab"
