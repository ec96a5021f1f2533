"""The report's script in a real browser, if chromium is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mugrpo_megatron.report.report import write_report
from tests.report.synthetic import recipe_of, rows_of, write_run

BROWSER = shutil.which("chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=2000",
    "--dump-dom",
)


@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
@pytest.mark.parametrize(
    ("stages", "updates", "sets"), [(1, 1, ["one"]), (4, 16, ["math500", "amc23", "aime24"]), (400, 4, ["one"])]
)
def test_every_card_is_drawn_in_a_browser(stages: int, updates: int, sets: list[str], tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run", rows_of(stages, updates, sets=sets), recipe_of(stages, updates)))
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={tmp_path / 'browser'}", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    cards = re.findall(r'id="chart-(\w+)">(.*?)</svg>', dom, re.DOTALL)
    assert {"accuracy", "dropped", "ratio_neg", "ess", "trigger_tokens", "paper_ratio", "grad_norm", "timeline"} <= {
        name for name, _ in cards
    }
    for name, drawn in cards:
        marks = len(re.findall(r"<(?:path|circle|rect) ", drawn))
        assert marks > 1, f"{name} is empty"
        assert "NaN" not in drawn, name
        assert "undefined" not in drawn, name
        if name.startswith(("trigger_", "dropped_by_scope")):
            assert "0 %</text>" in drawn, f"{name}: a share of 0 has no place on its log axis"
            assert all(float(y) <= 216 for y in re.findall(r"[ML][\d.]+,(-?[\d.]+)", drawn)), f"{name} leaves its card"
