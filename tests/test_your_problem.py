"""docs/your-problem.md: the files of its walk are as the page has them, and its commands run, on a tiny model."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mugrpo_megatron.checks.preflight import check_on_paper
from mugrpo_megatron.data.demonstrations import demonstrations
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.recipe.sections import DataSection
from tests.checkout import ROOT
from tests.tiny import save_model

pytestmark = pytest.mark.usefixtures("in_checkout")

PAGE = Path(ROOT, "docs/your-problem.md")
NAMES = {"json": ["rows.jsonl", "held_out.jsonl"], "python": ["my_rewards.py"], "toml": ["mine.toml", "real.toml"]}
QUICKSTART = Path("run_scripts/recipes/quickstart.toml")
ONE_GPU = Path("run_scripts/recipes/one_gpu")
"""Relative to the checkout."""


def written(folder: Path) -> list[str]:
    """Write the files of the page's walk, in the order of its blocks, next to their base recipes; its commands."""
    walk = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", walk, re.MULTILINE | re.DOTALL)
    commands: list[str] = []
    for kind, names in NAMES.items():
        texts = [text for found, text in blocks if found == kind]
        assert len(texts) == len(names), kind
        for name, text in zip(names, texts, strict=True):
            (folder / name).write_text(text, encoding="utf-8")
    for kind, text in blocks:
        if kind == "sh":
            commands += text.splitlines()
    (folder / QUICKSTART.parent).mkdir(parents=True)
    shutil.copyfile(ROOT / QUICKSTART, folder / QUICKSTART)
    shutil.copytree(ROOT / ONE_GPU, folder / ONE_GPU)
    return commands


@pytest.mark.process
def test_the_pages_recipe_passes_a_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = written(tmp_path)
    assert [shlex.split(line)[1] for line in commands] == ["train", "train", "rollouts", "eval"]
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    check_on_paper(load_recipe(Path("mine.toml")), said.append)
    assert "data: 6 training and 2 held-out problems" in said
    assert "data: rows: 6 rows read as GSM8K's question, answer" in said
    real = load_recipe(Path("real.toml"))
    assert (str(real.model.path), real.data.prompt_style) == ("Qwen/Qwen2.5-0.5B-Instruct", "chat")
    assert (real.data.train, real.reward.function) == ("rows.jsonl", "my_rewards:near")
    directories = [load_recipe(Path("mine.toml")).run.dir, real.run.dir, load_recipe(QUICKSTART).sft.output]
    assert len({*directories, real.sft.output}) == 4
    (tmp_path / "demonstrations.jsonl").write_text('{"prompt": "6*7=", "response": "It is 42."}\n')
    [one] = demonstrations("demonstrations.jsonl", DataSection())
    assert one.response == "It is 42."


@pytest.mark.process
@pytest.mark.night
def test_the_pages_commands_run(tmp_path: Path) -> None:
    commands = written(tmp_path)
    save_model(tmp_path / "runs" / "warm-start" / "hf")
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    said = {}
    for line in commands:
        program, *words = shlex.split(line)
        assert program == "mugrpo"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "mugrpo_megatron", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said[line] = done.stdout
    dry, train, rollouts, evaluation = said.values()
    assert 'function = "my_rewards:near"' in dry
    assert "the first prompt as the model sees it (plain): '" in train
    assert "reward" in rollouts
    assert "held_out" in evaluation
    assert (tmp_path / "runs/mine/report.html").exists()
