"""The dtype, the page of commands, and `report`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from mugrpo_megatron.cli import main
from mugrpo_megatron.commands import common
from mugrpo_megatron.observe.environment import bfloat16_products
from mugrpo_megatron.recipe import load_recipe
from tests.checkout import ROOT
from tests.extras.exchange.test_import_rollouts import trl_log
from tests.report.synthetic import recipe_of, rows_of, write_run
from tests.test_commands_in_docs import commands_of
from tests.tiny import FINISHED, mugrpo


@pytest.mark.parametrize(
    ("cpuinfo", "flag"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16\n", "avx512_bf16"),
        ("flags: avx512_bf16 amx_bf16\n", "amx_bf16"),
        ("Features\t: fp asimd bf16\n", "bf16"),
        ("flags: avx2 avx512f\nbugs: bf16\n", ""),
        (None, ""),
    ],
)
def test_the_dtype_follows_the_cores(
    cpuinfo: str | None, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, unless the recipe names one."""
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(cpuinfo)
    assert bfloat16_products(file) == flag
    monkeypatch.setattr(common, "bfloat16_products", lambda: flag)
    monkeypatch.setattr(common, "may_find_cuda", lambda: False)
    lines: list[str] = []
    dtype = common.with_dtype(load_recipe(None).model, lines.append).dtype
    assert dtype == ("bfloat16" if flag else "float32")
    assert lines == [f"model.dtype = {dtype}: these cores " + (f"have {flag}" if flag else "do not multiply bfloat16")]
    for named in ("float32", "bfloat16", "float16"):
        assert common.with_dtype(load_recipe(None, [f"model.dtype={named}"]).model, lines.append).dtype == named
    monkeypatch.setattr(common, "may_find_cuda", lambda: True)
    assert common.with_dtype(load_recipe(None).model, lines.append).dtype == "bfloat16"
    assert len(lines) == 1


SECTIONS = {"look": "## Rollouts\n", "stages": "## Exchange stages\n"}
"""Page -> the section whose commands run here."""


@pytest.mark.process
@pytest.mark.slow
def test_every_command_of_the_pages_does_what_it_is_there_for(finished_run: Path, tmp_path: Path) -> None:
    places = {
        "RUN_DIR": str(finished_run),
        "RECIPE": str(finished_run.parent / "recipe.toml"),
        "IN": str(trl_log(tmp_path / "completions.parquet", FINISHED["updates_per_stage"], "accuracy_reward")),
    }
    ran = []
    pages = {name: Path(ROOT, f"docs/{name}.md").read_text(encoding="utf-8") for name in SECTIONS}
    sections = [pages[name].partition(heading)[2].partition("\n## ")[0] for name, heading in SECTIONS.items()]
    for command in [command for section in sections for command in commands_of(section)]:
        program, *words = shlex.split(command)
        assert program == "mugrpo"
        if "--hub" in words:
            continue
        for place in ("rollouts-0", "imported"):
            words = [str(tmp_path / word) if word == place else word for word in words]
        words = [word.replace("run.dir=", f"run.dir={tmp_path}/") for word in words]
        words = [word.replace("model.path=MODEL", f"model.path={finished_run.parent / 'model'}") for word in words]
        said = mugrpo(*(places.get(word, word) for word in words))
        assert said.stdout
        ran.append(words[0])
    assert ran.count("rollouts") >= 5
    assert [name for name in ran if name != "rollouts"] == ["publish", "optimize", "import", "optimize"]
    for name in ("again", "imported"):
        assert (tmp_path / "runs" / name / "hf" / "model.safetensors").exists()


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
