"""Pages that are made from the code are up to date, and the site of all pages has no broken link."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mugrpo_megatron.cli import COMMANDS
from mugrpo_megatron.extras.episodes.turns import EpisodeModel
from run_scripts.dev.site import build, cli_page, python_page, recipes_page
from run_scripts.dev.site.check_links import broken_links
from tests.checkout import ROOT

MAKERS: dict[str, Callable[[], str]] = {
    "cli": cli_page.markdown,
    "python": python_page.markdown,
    "recipes": recipes_page.markdown,
}


@pytest.mark.parametrize("name", list(MAKERS))
def test_a_page_is_the_codes(name: str, in_checkout: None) -> None:
    assert MAKERS[name]() == Path(f"docs/{name}.md").read_text(encoding="utf-8"), "run: make docs"


def test_every_command_option_and_method_is_there() -> None:
    page = cli_page.markdown()
    for command in COMMANDS:
        assert f"### `mugrpo {command.name}`\n" in page
    assert '<a id="rollouts--skip-malformed"></a>' not in page
    for place in (
        "score--skip-malformed",
        "rollouts--advantage",
        "train--set",
    ):
        assert f'<a id="{place}"></a>' in page
    for name in ("chat", "generate", "encode"):
        assert callable(getattr(EpisodeModel, name))
        assert f"`await {name}(" in python_page.markdown()


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#here">1</a><a href="b.html#gone">2</a><img src="c.svg">')
    (tmp_path / "b.html").write_text('<p id="here"><a href="https://a.example/x#y">3</a><a href="#nowhere">4</a></p>')
    assert broken_links(tmp_path) == [
        "a.html: b.html#gone: no such anchor",
        "a.html: c.svg: no such file",
        "b.html: #nowhere: no such anchor",
    ]


@pytest.mark.process
def test_the_site_is_built_without_a_warning_or_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("furo", reason="the site's packages are not installed")
    assert build.build(tmp_path / "site") == []
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in ROOT.joinpath("docs").rglob("*.md")}
    made = {path.relative_to(tmp_path / "site") for path in tmp_path.joinpath("site").rglob("*.html")}
    assert {page for page in pages if page.name != "README.html"} < made
    assert (tmp_path / "site/searchindex.js").stat().st_size > 10_000
