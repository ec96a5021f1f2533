"""Pictures: one file for light and dark pages, the same every time, of the kept results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from run_scripts.figure import write_figure
from run_scripts.study import law_plots, six_plots
from run_scripts.study.collect import CURVE_COLUMNS, KEY
from run_scripts.study.grid import load_grid
from run_scripts.study.page import text
from run_scripts.study.plots import PICTURES, write_plots
from run_scripts.study.results import DOCS, Results, read_results
from run_scripts.svg import COLORS, LIGHT, write_svg
from tests.report.synthetic import recipe_of, rows_of, write_run
from tests.study.test_page import finished

pytestmark = pytest.mark.night
PUBLISHED = [*DOCS.glob("*.svg"), DOCS.parent / "quickstart.svg"]


def rules_of(svg: str) -> tuple[dict[str, str], dict[str, str]]:
    """Class -> declarations, on light pages and on dark ones."""
    light, dark = svg.partition("<style>")[2].partition("</style>")[0].split("@media (prefers-color-scheme: dark)")
    return dict(re.findall(r"\.(\w+) { (.*) }", light)), dict(re.findall(r"\.(\w+) { (.*) }", dark))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_every_colour_of_a_published_picture_has_its_dark_twin(path: Path) -> None:
    svg = path.read_text(encoding="utf-8")
    light, dark = rules_of(svg)
    twins = dict(COLORS.values())
    for name, style in light.items():
        colours = re.findall(r"(fill|stroke): (#\w{6})", style)
        assert re.findall(r"(fill|stroke): (#\w{6})", dark.get(name, "")) == [(what, twins[c]) for what, c in colours]
    drawn = [element for element in ElementTree.fromstring(svg).iter() if "style" not in element.tag]
    assert {element.attrib["class"] for element in drawn if "class" in element.attrib} == light.keys()
    assert not any(element.get(what) for element in drawn for what in ("style", "fill", "stroke"))


def test_published_pictures_are_those_of_the_kept_results_and_on_the_page(tmp_path: Path) -> None:
    """After a change of either, run `python -m run_scripts.study.page`."""
    names = write_plots(read_results(load_grid()), tmp_path)
    assert {path.stem for path in DOCS.glob("*.svg")} - {law_plots.NAME, six_plots.NAME} == set(names)
    page = (DOCS.parent / "study.md").read_text(encoding="utf-8")
    for name in names:
        assert (tmp_path / f"{name}.svg").read_bytes() == (DOCS / f"{name}.svg").read_bytes(), name
        assert f'src="study/{name}.svg"' in page


def test_a_finished_study_has_every_picture(tmp_path: Path) -> None:
    whole = finished(veto=0.1)
    keys = [(one["seed"], one["repeat"], one["method"], one["rate"]) for one in whole.rows]
    points = [
        dict.fromkeys(CURVE_COLUMNS, 0.1) | dict(zip(KEY, key, strict=True)) | {"update": update}
        for key in keys
        for update in (0, 512)
    ]
    names = write_plots(replace(whole, curves=points), tmp_path)
    assert names == [*PICTURES]
    assert {path.stem for path in tmp_path.glob("*.svg")} == set(names)
    drawn = text(whole)
    assert all(drawn.count(f'src="study/{name}.svg"') == 1 for name in names)
    assert write_plots(Results(whole.grid, [], []), tmp_path) == []


def draw(path: Path, xs: Sequence[float], color: str) -> Path:
    figure = Figure(figsize=(4, 3), facecolor=LIGHT["paper"])
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_facecolor(LIGHT["paper"])
    axes.plot(xs, xs, color=color)
    axes.text(0, 0, "a < b & c", color=LIGHT["ink"])
    return write_svg(figure, path)


def test_a_colour_without_a_dark_twin_is_refused(tmp_path: Path) -> None:
    assert draw(tmp_path / "a.svg", [0, 1], LIGHT["red"]).exists()
    with pytest.raises(ValueError, match="#123456 has no dark twin: add it to COLORS"):
        draw(tmp_path / "b.svg", [0, 1], "#123456")


def test_the_same_run_gives_the_same_file(tmp_path: Path) -> None:
    run = write_run(tmp_path, rows_of(2, 4), recipe_of(2, 4))
    first = write_figure(run, tmp_path / "a.svg").read_bytes()
    assert first.count(b"<path") > 10
    assert first == write_figure(run, tmp_path / "b.svg").read_bytes()
