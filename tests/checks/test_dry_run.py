"""`mugrpo train --dry-run` calls each reward function once, and finds what `train` would refuse later."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from mugrpo_megatron.checks.preflight import say_warmup
from mugrpo_megatron.cli import main
from mugrpo_megatron.recipe import Recipe
from tests.hostile.outcome import dry_run
from tests.tiny import save_model, write_recipe

FUNCTIONS = """
def exact(response, answer):
    return {"score": float(response == str(answer)), "why": "text equals gold"}

def half(completions, answer, **kwargs):
    return [0.5 for _ in completions]

def of_a_column(completions, level, **kwargs):
    return [float(one) for one in level]

def impossible(text, target):
    return 1.0

def fails(response):
    return {}["score"]
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """In the current directory, where `own_rewards` is found."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_rewards.py").write_text(FUNCTIONS, encoding="utf-8")
    rows = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(1, 9)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(
        write_recipe(tmp_path / "r.toml", save_model(tmp_path / "model"), tmp_path / "run", data={"train": str(data)})
    )


@pytest.mark.process
def test_each_function_scores_the_gold_of_the_first_problem(recipe: str) -> None:
    functions = {"a": "own_rewards:exact", "b": "own_rewards:half", "c": "math"}
    overrides = [f"reward.functions.{name}.function={one}" for name, one in functions.items()]
    lines = [line for line in dry_run(recipe, *overrides) if line.startswith("reward: ")]
    place = f"{Path(recipe).parent / 'rows.jsonl'}:1"
    assert lines == [
        f"reward: own_rewards:exact gives 1 to the gold of {place} as the response, '2' (text equals gold)",
        f"reward: own_rewards:half gives 0.5 to the gold of {place} as the response, '2'",
        f"reward: math gives 1 to the gold of {place} as the response, '\\\\boxed{{2}}' (equal)",
    ]


@pytest.mark.process
@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("impossible", "reward.function 'own_rewards:impossible' takes (text, target): name its parameters as in"),
        ("of_a_column", "it needs the column 'level', and the row has question, answer"),
        ("fails", "failed on 1 of the latest 1 responses, the last time with KeyError: 'score' (own_rewards.py:15)"),
    ],
)
def test_a_function_that_cannot_score_is_found(
    function: str, words: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in dry_run(recipe, f"reward.function=own_rewards:{function}", code=2)[-1]
    if function == "impossible":  # also without data on this machine
        lines = dry_run(recipe, f"reward.function=own_rewards:{function}", "data.train=gsm8k", code=2)
        assert words in lines[-1]
        # `train` says so before it looks for a data set that is not there.
        assert (
            main(["train", recipe, "--set", f"reward.function=own_rewards:{function}", "--set", "data.train=a/b"]) == 2
        )
        assert words in capsys.readouterr().err
        assert not (Path(recipe).parent / "run").exists()


def test_an_absent_wandb_is_found(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "mugrpo_megatron.checks.preflight.find_spec", lambda name: None if name == "wandb" else found(name)
    )
    assert "needs the wandb package: pip install" in dry_run(recipe, "track.wandb_project=p", code=2)[-1]


@pytest.mark.parametrize(("warmup", "stages", "lines"), [(5, 2, 0), (6, 2, 0), (7, 2, 1), (4, 1, 1)])
def test_a_warm_up_that_the_run_does_not_reach_the_end_of_is_noted(warmup: int, stages: int, lines: int) -> None:
    recipe = Recipe.model_validate(
        {"optimizer": {"warmup_updates": warmup, "lr": 1e-4}, "schedule": {"stages": stages, "updates_per_stage": 3}}
    )
    said: list[str] = []
    say_warmup(recipe.optimizer, recipe.schedule, said.append)
    assert len(said) == lines
    assert all("never reaches lr = 0.0001" in line for line in said)
