"""A wheel brings the recipes and the report's files, names its commit, and installs beside any torch."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.checkout import ROOT

SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "mugrpo_megatron", "checkpoints_convert", "docs")
GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
BUILD = """
import os, sys, tarfile
from setuptools import build_meta
out = sys.argv[1]
source = build_meta.build_sdist(out)
tarfile.open(os.path.join(out, source)).extractall(out, filter="data")
os.chdir(os.path.join(out, source.removesuffix(".tar.gz")))
build_meta.build_wheel(out)
"""
"""As `python -m build` does it: the wheel is made of the source archive, which has no .git."""


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a committed copy of this checkout, unpacked."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    ignore = shutil.ignore_patterns("__pycache__", "commit.txt")
    for name in (*SOURCES, "run_scripts/recipes"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, source / name)
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "all")):
        run(*GIT, *words, cwd=source)
    run(sys.executable, "-c", BUILD, str(out), cwd=source)
    (built,) = out.glob("*.whl")
    zipfile.ZipFile(built).extractall(out / "installed")
    return out / "installed"


@pytest.mark.process
def test_it_has_every_file_that_the_package_reads(wheel: Path) -> None:
    for name in ("report/browser", "checks", "recipe", "weights"):
        for path in (ROOT / "mugrpo_megatron" / name).iterdir():
            if path.is_file():
                assert (wheel / "mugrpo_megatron" / name / path.name).read_bytes() == path.read_bytes()
    recipes = ROOT / "run_scripts/recipes"
    for path in recipes.rglob("*.toml"):
        assert (wheel / "mugrpo_megatron/recipes" / path.relative_to(recipes)).read_bytes() == path.read_bytes()
    for folder, kind in (("bundled_models", "*"), ("docs", "*.md")):
        for path in (ROOT / "mugrpo_megatron" / folder).resolve().rglob(kind):
            if path.is_file():
                inside = path.relative_to((ROOT / "mugrpo_megatron" / folder).resolve())
                assert (wheel / "mugrpo_megatron" / folder / inside).read_bytes() == path.read_bytes()
    (metadata,) = wheel.glob("*.dist-info/METADATA")
    needs = re.findall(r"^Requires-Dist: (torch\b[^;\n]*)$", metadata.read_text(encoding="utf-8"), re.MULTILINE)
    assert needs == ["torch"], "it pins no torch of its own"


@pytest.mark.process
def test_it_runs_anywhere_and_names_its_commit(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(wheel))
    mugrpo = (sys.executable, "-m", "mugrpo_megatron")
    assert re.fullmatch(r"mugrpo \S+ \(commit [0-9a-f]{12}\)\n", run(*mugrpo, "--version", cwd=tmp_path))
    overview = run(*mugrpo, "--help", cwd=tmp_path)
    assert "Examples:" in overview
    assert overview.endswith(f"Pages: {wheel}/mugrpo_megatron/docs/README.md\n")
    assert "364" in run(*mugrpo, "train", "quickstart.toml", "--dry-run", cwd=tmp_path), "the bundled start"
    assert 'dir = "runs/gsm8k-0.5b"' in run(*mugrpo, "train", "one_gpu/24gb.toml", "--dry-run", cwd=tmp_path)
