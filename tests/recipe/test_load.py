"""Recipes: composition, overrides, and one clear sentence for every mistake."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import Recipe, dump_recipe, load_recipe
from mugrpo_megatron.recipe.objective import ObjectiveSection, Section


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_own_keys_win_over_the_bases_later_ones_over_earlier_ones_and_overrides_over_all(tmp_path: Path) -> None:
    write(tmp_path / "common.toml", "[schedule]\nstages = 8\nupdates_per_stage = 2\nepochs = 4\n[run]\nseed = 5\n")
    write(tmp_path / "method.toml", "[schedule]\nstages = 16\nupdates_per_stage = 7\n")
    top = write(tmp_path / "top.toml", 'base = ["common.toml", "method.toml"]\n[schedule]\nupdates_per_stage = 3\n')
    recipe = load_recipe(top, ["run.seed=7", "data.train=../some/file.jsonl", "eval.temperature=0.5"])
    schedule = recipe.schedule
    assert (schedule.stages, schedule.updates_per_stage, schedule.epochs, recipe.run.seed) == (16, 3, 4, 7)
    assert recipe.data.train == "../some/file.jsonl"
    assert recipe.eval.temperature == 0.5


def objective_of(name: str) -> ObjectiveSection:
    return load_recipe(None, [f"objective.name={name}"]).objective


@pytest.mark.parametrize("first", ["mu_grpo", "grpo", "m2po", "vespo"])
@pytest.mark.parametrize("second", ["mu_grpo", "grpo", "cispo", "off_policy_grpo"])
def test_the_name_of_another_objective_takes_its_preset_whole(tmp_path: Path, first: str, second: str) -> None:
    """A run's resolved recipe holds every key of its objective, and none of them is another's."""
    resolved = dump_recipe(load_recipe(None, [f"objective.name={first}", "objective.entropy_coef=0.25"]))
    base = write(tmp_path / "base.toml", resolved)
    above = write(tmp_path / "above.toml", f'base = "base.toml"\n[objective]\nname = "{second}"\n')
    wanted = objective_of(second) if first != second else load_recipe(base).objective
    assert load_recipe(base, [f"objective.name={second}"]).objective == wanted
    assert load_recipe(base, [f'objective.name = "{second}"']).objective == wanted
    assert load_recipe(above).objective == wanted
    assert load_recipe(above, [f"objective.name={first}"]).objective == (
        objective_of(first) if first != second else wanted
    )


def test_keys_beside_another_name_stay_whatever_their_order(tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", '[objective]\nname = "mu_grpo"\ndual_clip = 3.0\n')
    overrides = ["objective.clip_high=1.28", "objective.name=grpo", "objective.reduction=token_mean"]
    for order in permutations(overrides):
        found = load_recipe(path, order).objective
        assert (found.clip_high, found.reduction, found.veto, found.dual_clip) == (1.28, "token_mean", "none", None)


def test_keys_of_a_recipe_that_names_no_objective_are_every_objectives(tmp_path: Path) -> None:
    write(tmp_path / "common.toml", '[objective]\nreduction = "token_mean"\n')
    path = write(tmp_path / "r.toml", 'base = "common.toml"\n[objective]\nname = "grpo"\n')
    assert load_recipe(tmp_path / "common.toml", ["objective.name=grpo"]).objective.reduction == "token_mean"
    assert load_recipe(path).objective.reduction == "token_mean"


def test_dropped_keys_are_told_if_they_mattered(tmp_path: Path) -> None:
    text = '[objective]\nname = "mu_grpo"\nclip_low = 0.0\nzero_variance = "count"\ndual_clip = 3.0\n'
    path, told = write(tmp_path / "r.toml", text), list[str]()
    load_recipe(path, ["objective.name=grpo"], told.append)
    (line,) = told
    assert "no longer in force: clip_low = 0.0, dual_clip = 3.0;" in line
    for name in ("mu_grpo", "grpo"):
        quiet = write(tmp_path / "quiet.toml", f'[objective]\nname = "{name}"\n')
        load_recipe(quiet, ["objective.name=grpo"], told.append)
    load_recipe(path, ["objective.clip_low=0.5"], told.append)
    assert told == [line]


def test_resolved_recipe_reads_back_as_itself(tmp_path: Path) -> None:
    text = "[schedule]\nstages = 2\n[eval.sets.aime24]\nsamples = 32\n"
    recipe = load_recipe(write(tmp_path / "r.toml", text), ["objective.name=grpo", "eval.sets.amc23.temperature=0.6"])
    assert (recipe.eval.of("aime24").samples, recipe.eval.of("amc23").temperature) == (32, 0.6)
    assert load_recipe(write(tmp_path / "again.toml", dump_recipe(recipe))) == recipe


@pytest.mark.parametrize("text", ["2026-05-01", "2026-05-01T10:00:00", "10:00:00", "1.0", "7", "true", "nan"])
def test_a_text_or_a_path_may_look_like_another_value(text: str) -> None:
    keys = ["run.dir", "data.train", "model.path", "data.chat_template", "data.system_prompt"]
    recipe = load_recipe(None, [f"{key}={text}" for key in keys])
    data = recipe.data
    found = [
        recipe.run.dir,
        data.train,
        recipe.model.path,
        data.chat_template,
        data.system_prompt,
    ]
    assert [str(one) for one in found] == [text] * len(keys)
    assert load_recipe(None, ["model.path=owner/name", f"model.revision={text}"]).model.revision == text


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("[schedule]\nstagez = 4\n", [], r"`schedule.stagez` is not a recipe key; did you mean `schedule.stages`"),
        ("[schedual]\nstages = 4\n", [], r"`schedual` is not a recipe key; did you mean `schedule`"),
        ("[schedule\nstages = 4\n", [], r"not valid TOML"),
        ("", ["schedule.stages"], r"write it as section.key=value"),
        ("", ["objective.name=ppo2"], r"`objective.name` = 'ppo2'"),
        ('base = "r.toml"\n', [], r"leads back to itself"),
        ('base = "nowhere.toml"\n', [], r"nowhere.toml: no such recipe"),
        (
            "",
            ["eval.sets.aime24.sampels=3"],
            r"`eval.sets.aime24.sampels` is not a recipe key; did you mean `eval.sets.aime24.samples`",
        ),
        ("[eval.sets.aime24]\ntop_p = 2\n", [], r"`eval.sets.aime24.top_p` = 2"),
        ("", ["optimizer.lr=true"], r"`optimizer.lr` = True: .*true or false, but must be a number"),
        ("", ["track.profile_updates=[true]"], r"must be a number"),
        ("", ["schedule.stages=100000"], r"less than or equal to 99999"),
        (
            "",
            ["schedule.updates_per_stage=1024", "schedule.epochs=200"],
            r"a stage has 204,800 updates, and at most 99,999",
        ),
        ("", ["schedule.updates_per_stage=90000", "schedule.growth=10"], r"at most 99,999 can be numbered"),
        ("", ["engine.extra.mem_fraction_static=nan"], r"mem_fraction_static is nan, and must be a finite number"),
        (
            "",
            ["objective.name=mugrpo"],
            r"^--set objective.name=mugrpo: `objective.name` = .* did you mean `mu_grpo`\? Input should be",
        ),
        (
            "",
            ["schedule.stage=2"],
            r"^--set schedule.stage=2: `schedule.stage` is not a recipe key; .*`schedule.stages`",
        ),
        (
            "[schedule]\nstage = 2\n",
            ["optimizer.lr=-1"],
            r"r.toml: `schedule.stage`.*; --set optimizer.lr=-1: `optimizer.lr`",
        ),
        (
            "[schedule]\nupdates_per_stage = 90000\n",
            ["schedule.growth=10"],
            r"^--set schedule.growth=10: `schedule`: a",
        ),
        ("", ["objective.reject_range=[1,0]"], r"^--set objective.reject_range.*: `objective.reject_range.1`"),
        ("", ["schedule.stages=0"], r"^--set schedule.stages=0: `schedule.stages` = 0"),
        ("", [f"schedule.stages='{'x' * 500}'"], r"^--set schedule.stages='x{80}x*\.\.\.: "),
        ("", ["learning_rate=1e-6"], r"write it as section.key=value.*`learning_rate` of another.*`optimizer.lr` here"),
        ('base = ["r.toml"]\n', [], r"leads back to itself"),
        # A zero that means off elsewhere.
        ("", ["optimizer.clip_grad=0"], "turn clipping off, set a large value"),
        ("", ["optimizer.clip_grad=0.0"], "would clip every gradient to 0"),
        ("", ["lora.rank=0"], 'write lora.rank = "unset" to leave it out'),
        ("", ["objective.dual_clip=none"], 'write objective.dual_clip = "unset" to leave it out'),
        ("", ["rollout.top_k=-1"], "; 0 keeps all tokens"),
        ("", ["rollout.top_p=0"], "; 1 keeps all tokens"),
        ("", [f"run.seed={'8' * 4400}"], "an integer has more than 4,300 digits"),
        ("", ["rollout.temperature=0"], "a group has no advantage; write 1.0, and eval.temperature = 0"),
        ("", ["rollout.temperature=-0.0"], "a group has no advantage"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, overrides: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_recipe(write(tmp_path / "r.toml", text), overrides)


def test_the_file_that_brings_a_mistake_in_is_blamed(tmp_path: Path) -> None:
    write(tmp_path / "low.toml", "[schedule]\nstages = 0\nstagez = 3\n[optimizer]\nlr = -1.0\n")
    write(tmp_path / "middle.toml", 'base = "low.toml"\n[objective]\nreject_range = [2, 1]\n[schedule]\nepochs = 0\n')
    top = write(tmp_path / "top.toml", 'base = "middle.toml"\n[optimizer]\nlr = 1e-6\n[run]\nseed = -1\n')
    with pytest.raises(UserError) as raised:
        load_recipe(top, ["run.dir=/somewhere", "rollout.top_p=2", "schedule.epochs=0"])
    blamed = {one.split("`")[1]: one.split(": ")[0] for one in str(raised.value).split("; ") if ": `" in one}
    low, middle = (str(tmp_path / name) for name in ("low.toml", "middle.toml"))
    assert blamed == {
        "run.seed": str(top),
        "schedule.stages": low,
        "schedule.stagez": low,
        "schedule.epochs": middle,
        "rollout.top_p": "--set rollout.top_p=2",
        "objective.reject_range": middle,
    }


def undocumented(section: Any, prefix: str = "") -> Iterator[str]:
    """The keys of a section, and of those below it, that nothing explains."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from undocumented(kind, f"{prefix}{name}.")
        elif not field.description:
            yield f"{prefix}{name}"


def test_every_key_is_documented() -> None:
    assert list(undocumented(Recipe)) == []


@pytest.mark.parametrize(
    "key", ["objective.dual_clip", "lora.rank", "reward.timeout_s", "sft.lr", "data.system_prompt"]
)
def test_unset_takes_back_a_key_of_the_base(key: str, tmp_path: Path) -> None:
    section, name = key.split(".")
    value = {"system_prompt": '"be brief"', "lr": "0.5", "dual_clip": "3.0"}.get(name, "7")
    base = write(tmp_path / "base.toml", f"[{section}]\n{name} = {value}\n")
    default = getattr(getattr(Recipe(), section), name)
    child = write(tmp_path / "child.toml", f'base = "base.toml"\n[{section}]\n{name} = "unset"\n')
    for recipe in (load_recipe(base, [f"{key}=unset"]), load_recipe(child)):
        assert getattr(getattr(recipe, section), name) == default
    assert getattr(getattr(load_recipe(child, [f"{key}={value}"]), section), name) != default
