"""run_scripts/dev/bench/ten_te.py: the torch extension beside the library, from a wheel or compiled, without a GPU."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from run_scripts.dev.bench import ten_te

NAME = ten_te.EXTENSION
SETUP = f"""
from os import environ
from setuptools import setup
assert environ["NVTE_FRAMEWORK"] == "pytorch" and environ["NVTE_PYTORCH_FORCE_BUILD"] == "TRUE"
setup(name="{NAME}", version="2.11.0", packages=["transformer_engine.wheel_lib"])
"""


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library as carried.sh unpacks it, and an extension whose sources say what it imports."""
    sources, site = tmp_path / ".gpu" / "te", tmp_path / "site"
    write(site / "transformer_engine" / "__init__.py")
    write(site / "transformer_engine" / "wheel_lib" / "__init__.py")
    write(site / "transformer_engine" / "wheel_lib" / "libtransformer_engine.so", "the library")
    folder = tmp_path / f"{NAME}-2.11.0"
    write(folder / "setup.py", SETUP)
    write(folder / "transformer_engine" / "wheel_lib" / f"{NAME}.py", "COMPILED = True")
    sources.mkdir(parents=True)
    with tarfile.open(sources / f"{NAME}-2.11.0.tar.gz", "w:gz") as archive:
        archive.add(folder, folder.name)
    monkeypatch.setattr(ten_te, "SOURCES", sources)
    monkeypatch.setattr(ten_te, "SITE", site)
    monkeypatch.setattr(ten_te, "IMPORT", f"from transformer_engine.wheel_lib.{NAME} import COMPILED")
    monkeypatch.setenv("PYTHONPATH", str(site))
    return site


@pytest.mark.process
def test_the_extension_is_put_among_the_librarys_files(site: Path) -> None:
    """Compiled there; then from the wheel that is there; then a wheel that does not load, and is replaced."""
    extension = site / "transformer_engine" / "wheel_lib" / f"{NAME}.py"
    assert ten_te.install() > 0
    assert extension.read_text() == "COMPILED = True"
    assert (extension.parent / "libtransformer_engine.so").read_text() == "the library"
    assert len(list(site.glob(f"{NAME}-*.dist-info"))) == 1, "its metadata, which Transformer Engine compares"
    [wheel] = ten_te.SOURCES.glob("*.whl")
    made = wheel.stat().st_mtime_ns
    extension.unlink()
    ten_te.install()
    assert extension.exists()
    assert wheel.stat().st_mtime_ns == made, "nothing was compiled"
    write(site / "other" / "transformer_engine" / "wheel_lib" / f"{NAME}.cpython-310.so", "of another Python")
    subprocess.run(
        [sys.executable, "-m", "zipfile", "-c", str(wheel), "transformer_engine"], cwd=site / "other", check=True
    )
    ten_te.install()
    assert wheel.stat().st_mtime_ns > made
    assert [path.name for path in extension.parent.glob(f"{NAME}*")] == [f"{NAME}.py"], "two would be one too many"


def test_the_step_waits_for_a_compilation_that_has_begun(site: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with ten_te._alone():
            waiting = pool.submit(ten_te.make_wheel)
            assert not waiting.done()
            write(ten_te.SOURCES / f"{NAME}-2.11.0-py3-none-any.whl", "of the other process")
        assert waiting.result().read_text() == "of the other process"


@pytest.mark.process
def test_an_extension_that_does_not_load_ends_the_step(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ten_te, "IMPORT", "import no_such_library")
    with pytest.raises(subprocess.CalledProcessError):
        ten_te.install()


def test_headers_are_those_of_every_package_of_nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("cu13", "cudnn"):
        write(tmp_path / "nvidia" / package / "include" / "a.h")
    write(tmp_path / "nvidia" / "nccl" / "lib" / "a.so")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    found = [folder for folder in ten_te.headers() if folder.startswith(str(tmp_path))]
    assert found == [f"{tmp_path}/nvidia/{package}/include" for package in ("cu13", "cudnn")]
