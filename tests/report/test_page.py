"""The report's script in a real browser, if chromium is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from html import unescape
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from mugrpo_megatron.report.compare import write_comparison
from mugrpo_megatron.report.live import server_of
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


ACTIONS = """
window.addEventListener("error", (event) => note("error", event.message));
const notes = {};
function note(name, value) { notes[name] = value; }
function pointer(panel, kind, share) {
  const box = panel.root.getBoundingClientRect(), x = panel.left + share * (panel.right - panel.left);
  const place = { clientX: box.left + x, clientY: box.top + 40, button: 0, pointerType: "mouse", bubbles: true };
  panel.root.dispatchEvent(new PointerEvent(kind, place));
}
const first = panels[0], marks = (panel) => panel.plot.querySelectorAll("path").length;
const labels = (panel) => [...panel.root.querySelectorAll("text")].map((node) => node.textContent);
note("curves", marks(first));
first.legend.querySelector("button").click();
note("curves without one", marks(first));
first.legend.querySelector("button").click();
note("curves again", marks(first));
pointer(first, "pointermove", 0.5);
note("box", tip.textContent);
note("box is shown", !tip.hidden);
pointer(first, "pointerdown", 0.25);
pointer(first, "pointermove", 0.5);
pointer(first, "pointerup", 0.5);
note("zoomed", [first.from, first.to]);
const others = panels.filter((panel) => panel.axis === "u");
note("others zoomed", others.every((panel) => panel.from === first.from && panel.to === first.to));
note("by age is not", panels.filter((panel) => panel.axis === "age").every((panel) => panel.from === 0));
first.root.dispatchEvent(new MouseEvent("dblclick"));
note("all of it", [first.from, first.to]);
const linear = labels(panels[3]).join();
panels[3].card.querySelector(".tools button").click();
note("another axis", labels(panels[3]).join() !== linear);
note("csv", csvOf(first.chart).split("\\n").slice(0, 2).join("|"));
note("picture", standAlone(first).includes("var(") ? "unresolved colours" : "whole");
document.body.insertAdjacentHTML("beforeend", "<pre id=notes></pre>");
document.getElementById("notes").textContent = JSON.stringify(notes);
"""


@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_zoom_switches_values_and_exports(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows_of(4, 16, sets=["math500", "amc23"]), recipe_of(4, 16))
    page = tmp_path / "page.html"
    page.write_text(write_report(run).read_text().replace("</body>", f"<script>{ACTIONS}</script></body>"))
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={tmp_path / 'browser'}", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = json.loads(unescape(dom.split('<pre id="notes">')[1].split("</pre>")[0]))
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
    assert found["csv"].startswith('series,update,seconds,value,low,high|"math500",0,')
    assert found["picture"] == "whole"


@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_comparison_is_drawn_in_a_browser(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, rows_of(2, 8, seed=seed), recipe_of(2, 8)) for seed, name in enumerate("abc")]
    page = write_comparison(runs, tmp_path / "compared.html")
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={tmp_path / 'browser'}", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    cards = dict(re.findall(r'id="chart-(\w+)">(.*?)</svg>', dom, re.DOTALL))
    assert {"accuracy", "reward_mean", "ess", "ratio_neg_mean"} <= set(cards)
    for name, drawn in cards.items():
        assert len(re.findall(r"<path ", drawn)) >= 3, name
        assert "NaN" not in drawn, name


def test_a_live_page_is_served_on_loopback_and_follows_its_run(tmp_path: Path) -> None:
    rows = rows_of(2, 8)
    run = write_run(tmp_path / "run", rows[:12], recipe_of(2, 8))
    with server_of(run) as server:
        host, port = server.server_address[:2]
        assert host == "127.0.0.1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            before = urlopen(f"http://{host}:{port}/").read().decode()
            write_run(run, rows, recipe_of(2, 8))
            after = urlopen(f"http://{host}:{port}/").read().decode()
            with pytest.raises(HTTPError, match="404"):
                urlopen(f"http://{host}:{port}/../recipe.toml")
            with pytest.raises(HTTPError, match="404"):
                urlopen(Request(f"http://{host}:{port}/", headers={"Host": "elsewhere.example"}))
        finally:
            server.shutdown()
    assert "updates taken: 16 " in after
    assert "updates taken: 16 " not in before
    assert 'data-live="10"' in after
    assert "connect-src 'self'" in after
    assert 'data-live="0"' in write_report(run).read_text()
