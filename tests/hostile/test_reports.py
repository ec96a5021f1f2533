"""Reports of damaged runs, in places where something else is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mugrpo_megatron.report.page import BRAND
from tests.hostile.outcome import command, listing, refused
from tests.report.synthetic import recipe_of, rows_of, write_run

RECIPES: dict[str, tuple[bytes, str]] = {
    "no TOML": (b"[", "not valid TOML"),
    "a value for a section": (b"run = 3\n", "`run` is not a section"),
    "an array for a section": (b"[[run]]\n", "`run` is not a section"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_report_of_a_damaged_recipe(name: str, tmp_path: Path) -> None:
    content, says = RECIPES[name]
    write_run(tmp_path, rows_of(1, 2), recipe_of(1, 2))
    (tmp_path / "recipe.toml").write_bytes(content)
    refused("report", tmp_path, says=says)


@pytest.mark.parametrize(
    "recipe", [b"", b"[run]\nseed = []\n", b'[x]\ny = "<script>"\n', b"[objective]\nname = 2020-01-01\n"]
)
def test_a_report_of_an_odd_recipe(recipe: bytes, tmp_path: Path) -> None:
    write_run(tmp_path, rows_of(1, 2), recipe_of(1, 2))
    (tmp_path / "recipe.toml").write_bytes(recipe)
    assert command("report", tmp_path).code == 0
    assert "<script>" not in (tmp_path / "report.html").read_text().replace("<script>\n", "")


@pytest.mark.parametrize("content", [b"", b"[1]", b"[" * 100_000])
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


def test_a_report_replaces_a_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows_of(1, 2), recipe_of(1, 2))
    assert [command("report", run).code for _ in range(2)] == [0, 0]
    assert BRAND in (run / "report.html").read_text()


def test_a_report_of_what_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "recipe.toml").mkdir()
    for run_dir in (tmp_path, tmp_path / "nowhere", tmp_path / "file", "/dev/null", tmp_path / ("x" * 300), "\x1b[2J"):
        refused("report", run_dir)
