"""Reports of damaged runs, in places where something else is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mugrpo_megatron.report.details import read_details
from mugrpo_megatron.terminal import visible
from tests.hostile.outcome import command, listing, refused
from tests.hostile.rundir import make
from tests.report.synthetic import recipe_of, rows_of, write_run


@pytest.mark.parametrize(("content", "says"), [(b"[", "not valid TOML"), (b"[[run]]\n", "`run` is not a section")])
def test_a_report_of_a_damaged_recipe(content: bytes, says: str, tmp_path: Path) -> None:
    write_run(tmp_path, rows_of(1, 2), recipe_of(1, 2))
    (tmp_path / "recipe.toml").write_bytes(content)
    refused("report", tmp_path, says=says)


@pytest.mark.parametrize("recipe", [b"", b'[x]\ny = "<script>"\n[run]\nseed = []\n[objective]\nname = 2020-01-01\n'])
def test_a_report_of_an_odd_recipe(recipe: bytes, tmp_path: Path) -> None:
    write_run(tmp_path, rows_of(1, 2), recipe_of(1, 2))
    (tmp_path / "recipe.toml").write_bytes(recipe)
    assert command("report", tmp_path).code == 0
    assert "<script>" not in (tmp_path / "report.html").read_text().replace("<script>\n", "")


@pytest.mark.parametrize("content", [b"", b"[1]"])
def test_a_report_of_a_damaged_summary(content: bytes, tmp_path: Path) -> None:
    write_run(tmp_path, rows_of(1, 2), recipe_of(1, 2))
    (tmp_path / "summary.json").write_bytes(content)
    refused("report", tmp_path, says="delete it, the report does not need it")


@pytest.mark.parametrize("kind", ["somebody's page", "empty", "directory", "pipe", "device", "link", "loop"])
def test_a_report_replaces_only_a_report(kind: str, tmp_path: Path) -> None:
    run, page = write_run(tmp_path / "run", rows_of(1, 2), recipe_of(1, 2)), tmp_path / "run" / "report.html"
    (tmp_path / "precious.html").write_text("precious")
    makers: dict[str, Callable[[], object]] = {
        "somebody's page": lambda: page.write_text("<h1>mine</h1>"),
        "empty": page.touch,
        "directory": page.mkdir,
        "pipe": lambda: os.mkfifo(page),
        "device": lambda: page.symlink_to("/dev/null"),
        "link": lambda: page.symlink_to(tmp_path / "precious.html"),
        "loop": lambda: page.symlink_to("report.html"),
    }
    makers[kind]()
    before = listing(tmp_path)
    refused("report", run)
    assert listing(tmp_path) == before


def test_a_report_of_what_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "recipe.toml").mkdir()
    for run_dir in (tmp_path, tmp_path / "nowhere", tmp_path / "file", "/dev/null", tmp_path / ("x" * 300), "\x1b[2J"):
        refused("report", run_dir)


def test_a_report_shows_every_character(tmp_path: Path) -> None:
    """Of a directory whose name is not UTF-8, and of names that turn the text around or write to a terminal."""
    rows = [row | {"reward/a\x1b[2J\u202eb": 1.0} if row["kind"] == "update" else row for row in rows_of(1, 2)]
    run = write_run(tmp_path / os.fsdecode(b"r\xff"), rows, recipe_of(1, 2))
    assert [command("report", run).code for _ in range(2)] == [0, 0], "a report replaces a report"
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "r\\udcff" in text
    assert visible(text) == text


def test_a_report_names_stages_that_were_swapped(tmp_path: Path) -> None:
    made = make(tmp_path / "run")
    stages = [made.run.dir / "stages" / name for name in ("00000", "aside", "00001")]
    for source, target in ((0, 1), (2, 0), (1, 2)):
        stages[source].rename(stages[target])
    damaged = read_details(made.run.dir, {}).damaged
    assert [line.partition(" holds stage ")[2][0] for line in damaged if "give it its right name" in line] == ["1", "0"]
