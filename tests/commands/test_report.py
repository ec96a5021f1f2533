"""`mugrpo report`: which page of which runs, and what it does not replace."""

from __future__ import annotations

from pathlib import Path

import pytest

from mugrpo_megatron.cli import main
from tests.report.synthetic import recipe_of, rows_of, write_run


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    return [str(write_run(tmp_path / name, rows_of(1, 3), recipe_of(1, 3))) for name in ("a", "b")]


def test_one_run_has_its_page_in_its_directory(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", runs[0]]) == 0
    assert capsys.readouterr().out == f"{runs[0]}/report.html\n"


def test_several_share_a_page_that_only_a_comparison_is_replaced_by(runs: list[str], tmp_path: Path) -> None:
    page = tmp_path / "both.html"
    assert main(["report", *runs, "--out", str(page)]) == 0
    assert main(["report", *runs, "--out", str(page)]) == 0
    page.write_text("mine")
    assert main(["report", *runs, "--out", str(page)]) == 2
    assert page.read_text() == "mine"
    assert main(["report", runs[0]]) == 0
    assert main(["report", *runs, "--out", f"{runs[0]}/report.html"]) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["a", "b"], "several runs need --out"),
        (["a", "--out", "page.html"], "--out is for a page of several runs"),
        (["a", "b", "--live"], "--live shows one run"),
        (["a", "--live", "--port", "99999"], "port"),
        (["a", "a", "--out", "page.html"], "named twice"),
    ],
)
def test_options_that_do_not_go_together_are_one_sentence(
    options: list[str],
    words: str,
    runs: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", *options]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (tmp_path / "page.html").exists()
