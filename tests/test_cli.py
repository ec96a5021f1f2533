"""The command line as a careless user meets it: one clear sentence, exit code 2, nothing started, nothing written."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from mugrpo_megatron.cli import main
from tests.tiny import save_model, write_recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], run_dir: Path) -> str:
    """What the command says on stderr when it refuses: one line, code 2, no new process, no run directory."""
    before = set(psutil.Process().children(recursive=True))
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("mugrpo: ")
    assert said.count("\n") == 1
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not run_dir.exists()
    return said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("schedule.stagez=3", "`schedule.stagez` is not a recipe key; did you mean `stages`?"),
        ("parallel.tensor=3", "needs a multiple of 3 ranks but 1 run"),
        ("engine.tensor=3", "engine.tensor = 3 does not divide the model's 4 attention heads"),
        ("model.path=/nowhere", "not a Hugging Face checkpoint (no config.json there)"),
        ("data.train=/nowhere.jsonl", "/nowhere.jsonl"),
        ("rollout.max_response_tokens=100000", "exceeds the model's 1024 positions"),
        ("data.max_prompt_tokens=2", "prompts of arithmetic are longer than data.max_prompt_tokens"),
        ("eval.sets.math500.samples=4", "[eval.sets.math500] names no held-out set: those in data.eval are arithmetic"),
        ("eval.sets.arithmetic.max_tokens=100000", "eval's max_tokens = 100032 exceeds the model's 1024 positions"),
        ("data.eval=arithmetic,arithmetic", "data.eval names arithmetic 2 times"),
        ("rollout.responses_per_prompt=1", "greater than or equal to 2"),
        ("optimizer.lr=nan", "optimizer.lr"),
    ],
)
def test_mistakes_in_the_recipe(
    override: str, said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path / "recipe.toml", model, tmp_path / "run")
    assert said in refused(["train", str(recipe), "--set", override], capsys, tmp_path / "run")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"problem": "1+1=", "answer": "2"}\n{"problem": "1+2=", "ans', "bad.jsonl:2: not JSON"),
        ('{"problem": "1+1=", "answer": "2"}\n{"problem": "1+2="}\n', "bad.jsonl:2: field 'answer' is missing"),
        ('{"problem": "1+1=", "answer": ""}\n', "bad.jsonl:1: field 'answer' is empty"),
        ("", "bad.jsonl"),
    ],
)
def test_mistakes_in_the_data(
    content: str, said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text(content, encoding="utf-8")
    recipe = write_recipe(tmp_path / "recipe.toml", model, tmp_path / "run", data={"train": str(data)})
    assert said in refused(["train", str(recipe)], capsys, tmp_path / "run")


def test_a_directory_that_holds_no_weights(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_bytes((model / "config.json").read_bytes())
    recipe = write_recipe(tmp_path / "recipe.toml", half, tmp_path / "run")
    assert "holds no *.safetensors weights" in refused(["train", str(recipe)], capsys, tmp_path / "run")


def test_dry_run_prints_the_resolved_recipe_and_starts_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path / "recipe.toml", model, tmp_path / "run")
    assert main(["train", str(recipe), "--set", "objective.name=grpo", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "resolved.toml").write_text(printed, encoding="utf-8")
    assert main(["train", str(tmp_path / "resolved.toml"), "--dry-run"]) == 0
    assert capsys.readouterr().out == printed
    assert "clip_high = 1.2" in printed
    assert not (tmp_path / "run").exists()


def test_report_of_a_directory_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
