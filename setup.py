"""Writes the commit into what is built, so that `mugrpo --version` of a wheel names it; pyproject.toml has the rest."""

import subprocess
from contextlib import suppress
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).parent
NAME = "mugrpo_megatron/commit.txt"


def write_commit(tree: Path) -> None:
    """Write the checkout's commit into a copy of the package; an unpacked sdist brings the file along."""
    describe = ("git", "-C", str(HERE), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*")
    with suppress(OSError, subprocess.CalledProcessError):
        if (HERE / ".git").exists():
            commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout
            (tree / NAME).write_text(commit, encoding="ascii")


class WithCommit(build_py):
    """A wheel; an editable installation asks the checkout itself."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_commit(Path(self.build_lib))


class SourceWithCommit(sdist):
    """A source archive."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir))


setup(cmdclass={"build_py": WithCommit, "sdist": SourceWithCommit})
