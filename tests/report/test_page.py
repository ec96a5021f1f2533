"""The report's script in a real browser, if chromium is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.extras.comparison.comparison import write_comparison
from mugrpo_megatron.report.page import write_report
from tests.patience import PATIENCE_S
from tests.report.synthetic import recipe_of, rows_of, write_evaluation, write_probe, write_run, write_stage

BROWSER = shutil.which("chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--virtual-time-budget=2000",
    "--dump-dom",
)  # fmt: skip


def dom_of(address: str, tmp_path: Path, script: str = "") -> str:
    """The page after its scripts have run; `script` is put at the end of the page, which is a file then."""
    if script:
        page = tmp_path / "page.html"
        text = Path(address).read_text()
        page.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
        address = page.as_uri()
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={tmp_path / 'browser'}", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout


def noted(dom: str) -> Any:
    """What a script has left on the page."""
    return json.loads(unescape(dom.split('<pre id="notes">')[1].split("</pre>")[0]))


@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
@pytest.mark.parametrize(
    ("stages", "updates", "sets"), [(1, 1, ["one"]), (4, 16, ["math500", "amc23", "aime24"]), (400, 4, ["one"])]
)
def test_every_card_is_drawn_in_a_browser(stages: int, updates: int, sets: list[str], tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run", rows_of(stages, updates, sets=sets), recipe_of(stages, updates)))
    dom = dom_of(page.as_uri(), tmp_path)
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


@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_zoom_switches_and_values(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows_of(4, 16, sets=["math500", "amc23"]), recipe_of(4, 16))
    found = noted(dom_of(str(write_report(run)), tmp_path, ZOOM_ACTIONS))
    assert "error" not in found
    assert found["curves without one"] < found["curves"] == found["curves again"]
    assert found["box is shown"]
    assert "update 32" in found["box"]
    assert "math500" in found["box"]
    assert found["zoomed"] == pytest.approx([16, 32], abs=0.5)
    assert found["others zoomed"]
    assert found["by age is not"]
    assert found["all of it"] == [0, 64]
    assert found["another axis"]


WATCHED = """
const notes = { errors: [], violations: [] };
window.addEventListener("error", (event) => notes.errors.push(event.message));
document.addEventListener("securitypolicyviolation", (event) => notes.violations.push(event.blockedURI));
"""
"""What goes before the page's scripts, so that nothing escapes it."""
TOLD = """
const asked = performance.getEntriesByType("resource").map((entry) => entry.name);
notes.requests = asked.filter((name) => !name.startsWith("data:"));
document.body.insertAdjacentHTML("beforeend", "<pre id=notes></pre>");
document.getElementById("notes").textContent = JSON.stringify(notes);
"""
ZOOM_ACTIONS = (Path(__file__).parent / "actions" / "zoom.js").read_text()
HEAT_ACTIONS = (Path(__file__).parent / "actions" / "heat.js").read_text()
OVERLAY_ACTIONS = (Path(__file__).parent / "actions" / "overlay.js").read_text()


def notes_of(page: Path, tmp_path: Path, actions: str) -> dict[str, Any]:
    """What `actions` note in the browser; no error, nothing forbidden, and no request to anywhere."""
    watched = tmp_path / "watched.html"
    watched.write_text(page.read_text().replace("<script type=", f"<script>{WATCHED}</script><script type=", 1))
    found: dict[str, Any] = noted(dom_of(str(watched), tmp_path, f"{{{actions}}}{TOLD}"))
    assert found["errors"] == []
    assert found["violations"] == []
    assert found["requests"] == []
    return found


@pytest.mark.night
@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_the_heat_map_and_the_samples_in_a_browser(tmp_path: Path) -> None:
    hostile = "</script><img onerror=alert(1) src=https://example.org/x> \x1b[2J \u202e "
    run = write_run(tmp_path / "run", rows_of(1, 64), recipe_of(1, 64))
    write_stage(run, 0, text=hostile * 30, gold=hostile)
    write_probe(run, 0, 64, count=8, tokens=6, token=hostile, mask=[place != 3 for place in range(6)])
    write_evaluation(run, 16, text=hostile * 30, question=hostile)
    found = notes_of(write_report(run), tmp_path, HEAT_ACTIONS)
    assert found["grids"] == 3
    assert found["rings"] == found["lines"] == 7, "at ages 16 to 64 the third token is below 1e-4"
    assert found["last"] == 2, "the fourth token is a tool's"
    assert found["tipOfTool"].endswith("a tool's, not sampled")
    assert (found["turns"], found["borders"], found["tools"], found["legend"]) == (["turn 1", "turn 2"], 1, 1, True)
    assert found["first"] == 0
    assert found["read"] == "age 0"
    assert "ratio ≈ 1 at age 0" in found["tip"]
    assert found["tipAtEnd"].endswith("at age 64 · trigger")
    assert found["folded"]
    assert found["unfolded"]
    assert found["images"] == 0
    assert found["bars"] == 2


@pytest.mark.night
@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_an_overlay_of_three_runs_in_a_browser(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, rows_of(2, 32, seed=seed), recipe_of(2, 32)) for seed, name in enumerate("abc")]
    found = notes_of(write_comparison(runs, tmp_path / "compared.html"), tmp_path, OVERLAY_ACTIONS)
    assert found["fewer"] < found["curves"]
    assert found["tip"].startswith("update 32")
    assert "a" in found["tip"]
    assert found["zoomed"]
    assert found["whole"]
    assert found["seconds"]


LABELS = """
drawing.boundaries.splice(0, Infinity, ...[0, 2, 24, 44].map((u, stage) => ({ u, t: u, stage })));
const panel = panels[0];
panel.draw();
const boxes = [...panel.plot.querySelectorAll("text.stage")].map((node) => node.getBoundingClientRect());
document.body.insertAdjacentHTML("beforeend", "<pre id=notes></pre>");
document.getElementById("notes").textContent = JSON.stringify(boxes.map((box) => [box.left, box.right]));
"""


@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_names_of_short_stages_do_not_cover_each_other(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows_of(4, 16), recipe_of(4, 16))
    labels = noted(dom_of(str(write_report(run)), tmp_path, LABELS))
    assert len(labels) == 3
    assert all(end <= begin for (_, end), (begin, _) in pairwise(labels))
