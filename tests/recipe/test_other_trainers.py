"""Keys of other trainers: each leads to a key of the recipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mugrpo_megatron.cli import main
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.recipe.other_trainers import equivalent_of, equivalents, translate_key
from tests.checkout import ROOT


def is_a_key(name: str) -> bool:
    section, _, key = name.partition(".")
    fields = getattr(Recipe.model_fields.get(section), "annotation", None)
    return key in getattr(fields, "model_fields", {})


def test_all_names_lead_to_keys_of_the_recipe() -> None:
    assert [key for there in equivalents().values() for key in there.keys if not is_a_key(key)] == []
    assert [name for name in equivalents() if is_a_key(name) or name != name.lower() or "-" in name] == []


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("num_generations", "rollout.responses_per_prompt"),
        ("beta", "objective.kl_coef"),
        ("learning_rate", "optimizer.lr"),
        ("max_completion_length", "rollout.max_response_tokens"),
        ("per_device_train_batch_size", "learner.micro_batch_tokens"),
        ("algorithm.kl_ctrl.kl_coef", "objective.kl_coef"),
        ("actor_rollout_ref.actor.clip_ratio_low", "objective.clip_low"),
        ("actor_rollout_ref.actor.clip_ratio_high", "objective.clip_high"),
        ("actor_rollout_ref.rollout.n", "rollout.responses_per_prompt"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "eval.samples"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", "eval.temperature"),
        ("eval.n", "eval.samples"),
        ("actor_rollout_ref.actor.optim.lr", "optimizer.lr"),
        ("--lr", "optimizer.lr"),
        ("--n-samples-per-prompt", "rollout.responses_per_prompt"),
        ("tensor-model-parallel-size", "parallel.tensor"),
        ("micro_train_batch_size", "learner.micro_batch_tokens"),
    ],
)
def test_names_are_found_whatever_stands_before_them(name: str, key: str) -> None:
    there = equivalent_of(name)
    assert there is not None
    assert key in there.keys
    assert f"`{key}`" in translate_key(name)


def test_other_names_are_left_alone() -> None:
    assert equivalent_of("stagez") is None
    assert translate_key("schedule.stagez") == translate_key("optimizer.lr") == ""


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("num_generations = 8\n", [], "`num_generations` of another trainer is `rollout.responses_per_prompt` here"),
        ("", ["rollout.n=8"], "`rollout.n` of another trainer is `rollout.responses_per_prompt` here"),
        ("[optimizer]\nbeta = 0.1\n", [], "did you mean `optimizer.beta2`? `optimizer.beta` of another trainer is"),
        (
            "[actor_rollout_ref.actor]\nclip_ratio_low = 0.2\noptim.lr = 1e-6\n",
            [],
            "`actor_rollout_ref.actor.clip_ratio_low` of another trainer is `objective.clip_low` here (a bound of the "
            "ratio: 1 - epsilon); `actor_rollout_ref.actor.optim.lr` of another trainer is `optimizer.lr` here",
        ),
        ("temperature = 0.7\n", [], "a section: `rollout.temperature` or `eval.temperature`"),
        ("[runs]\nseedling = 1\n", [], "did you mean `run`?"),
        ("qwerty = 1\n", [], "known keys: auxiliary, checkpoint, data,"),
    ],
)
def test_an_unknown_key_is_translated(tmp_path: Path, text: str, overrides: list[str], said: str) -> None:
    (tmp_path / "r.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as raised:
        load_recipe(tmp_path / "r.toml", overrides)
    assert said in str(raised.value)


def test_a_flag_of_another_trainer_is_translated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "r.toml", "--lr", "1e-6", "--tensor-model-parallel-size=2"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "unrecognized arguments: --lr 1e-6 --tensor-model-parallel-size=2; " in said
    assert "`--lr` of another trainer is `optimizer.lr` here" in said
    assert "is `parallel.tensor` and `engine.tensor` here" in said


def test_the_pages_table_names_the_same_keys() -> None:
    page = Path(ROOT, "docs/coming-from.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| (`.*) \|$", page, re.MULTILINE):
        mine, *theirs = row.split("|")
        section = mine.strip("` ").partition(".")[0]
        keys = {key if is_a_key(key) else f"{section}.{key}" for key in re.findall(r"`([\w.]+)`", mine)}
        for cell in theirs:
            names = re.findall(r"`([\w.]+)`", cell)
            there = set(names).union(*(other.keys for other in map(equivalent_of, names) if other))
            assert not names or keys & there, (cell, keys)
