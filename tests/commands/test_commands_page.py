"""The commands of docs/commands.md on rollouts and their exchange, in their order on a finished run; not the hub."""

from __future__ import annotations

import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.checkout import ROOT
from tests.test_commands_in_docs import commands_of
from tests.tiny import FINISHED, mugrpo

PAGE = Path(ROOT, "docs/commands.md")
SECTIONS = ("## Rollouts\n", "## Exchange stages\n")
PROMPTS, GROUP = 4, 4
"""Of the finished run's recipe."""


def log_of_trl(path: Path) -> Path:
    rows = [
        {"step": step, "prompt": f"{step}+{place}=", "completion": str(said), "accuracy_reward": said % 2.0}
        for step in range(FINISHED["updates_per_stage"])
        for place in range(PROMPTS)
        for said in range(GROUP)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.process
@pytest.mark.slow
def test_every_command_of_the_page_does_what_it_is_there_for(finished_run: Path, tmp_path: Path) -> None:
    places = {
        "RUN_DIR": str(finished_run),
        "RECIPE": str(finished_run.parent / "recipe.toml"),
        "IN": str(log_of_trl(tmp_path / "completions.parquet")),
    }
    ran = []
    page = PAGE.read_text(encoding="utf-8")
    sections = [page.partition(heading)[2].partition("\n## ")[0] for heading in SECTIONS]
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
