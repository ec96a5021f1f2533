"""A run goes on with the files and problems that it began with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mugrpo_megatron.commands.eval import EvalRecord, settings_of
from mugrpo_megatron.data.prepare import Problems, read_problems
from mugrpo_megatron.errors import RewardFailure, UserError
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.load import validate
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.recipe.sections import DataSection
from mugrpo_megatron.run.directory import check_directory, open_directory
from mugrpo_megatron.run.inputs import USER_FILES as FILE_NAME
from mugrpo_megatron.run.inputs import check_data, problem_sums, record_data, user_files
from mugrpo_megatron.run.opening import open_files
from mugrpo_megatron.samples import Problem
from tests.refusals import refuses

CODE = "def right(response):\n    return 1.0\n"
NAMES = {
    "reward.functions.first": "user_files_rewards.py",
    "reward.functions.second": "user_files_others.py",
    "objective.advantage": "user_files_advantages.py",
    "objective.surrogate": "user_files_loss.py",
    "objective.diagnostics": "user_files_figures.py",
    "data.chat_template": "own.jinja",
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.chdir(tmp_path)
    for name in NAMES.values():
        (tmp_path / name).write_text(CODE, encoding="utf-8")
    return recipe_in(tmp_path / "run")


def recipe_in(run_dir: Path) -> Recipe:
    functions = {
        "first": {"function": "user_files_rewards:right"},
        "second": {"function": "user_files_others:right"},
        "third": {"function": "math"},
    }
    table = {
        "run": {"dir": str(run_dir)},
        "reward": {"functions": functions},
        "objective": {
            "advantage": "user_files_advantages:right",
            "surrogate": "user_files_loss:right",
            "diagnostics": "user_files_figures:right",
        },
        "data": {"chat_template": "own.jinja"},
    }
    return validate(table, "recipe")


def begin(recipe: Recipe) -> None:
    with open_directory(recipe):
        pass


def score(run_dir: Path, file: str = "stages/00000/shard-00000.parquet") -> None:
    """The run gets a group, or an evaluation."""
    (run_dir / file).parent.mkdir()
    (run_dir / file).touch()


@pytest.mark.parametrize("key", ["reward.functions.second", "data.chat_template"])
def test_an_edited_file_is_refused_with_the_way_out(key: str, recipe: Recipe, tmp_path: Path) -> None:
    begin(recipe)
    begin(recipe)
    assert user_files(recipe).keys() == NAMES.keys()
    score(tmp_path / "run")
    own = tmp_path / NAMES[key]
    own.write_text(CODE + "# edited\n", encoding="utf-8")
    said = rf"{key} names a file that was edited since .* began; restore it, begin a new run or a branch .*remove"
    for act in (check_directory, begin):
        refuses(said, act, recipe)
    begin(recipe_in(tmp_path / "another"))
    own.write_text(CODE, encoding="utf-8")
    begin(recipe)
    own.write_text(CODE + "# edited\n", encoding="utf-8")
    (tmp_path / "run" / FILE_NAME).unlink()
    begin(recipe)
    own.write_text(CODE, encoding="utf-8")
    refuses(key, begin, recipe)


@pytest.mark.parametrize("scored", ["stages/00000/shard-00000.parquet", "evaluations/update000000.jsonl"])
def test_an_edited_reward_is_accepted_until_it_has_scored(scored: str, recipe: Recipe, tmp_path: Path) -> None:
    begin(recipe)
    own = {key: tmp_path / name for key, name in NAMES.items()}
    own["objective.surrogate"].write_text(CODE + "# edited\n", encoding="utf-8")
    refuses(r"objective\.surrogate", begin, recipe)
    own["objective.surrogate"].write_text(CODE, encoding="utf-8")
    key = "reward.functions.first"
    own[key].write_text(CODE + "# edited\n", encoding="utf-8")
    check_directory(recipe)
    begin(recipe)
    score(tmp_path / "run", scored)
    begin(recipe)  # the edited file is the run's now
    (tmp_path / NAMES[key]).write_text(CODE, encoding="utf-8")
    refuses(f"{key} names a file that was edited", begin, recipe)


def test_a_reward_that_ended_the_run_may_be_edited(recipe: Recipe, tmp_path: Path) -> None:
    def fail() -> None:
        score(tmp_path / "run")
        raise RewardFailure("the function failed", "reward.functions.first")

    with pytest.raises(RewardFailure), open_files(recipe, None):
        fail()
    (tmp_path / NAMES["reward.functions.first"]).write_text(CODE + "# edited\n", encoding="utf-8")
    begin(recipe)
    (tmp_path / NAMES["reward.functions.second"]).write_text(CODE + "# edited\n", encoding="utf-8")
    refuses(r"^reward\.functions\.second names", begin, recipe)


def test_a_damaged_record_is_told(recipe: Recipe, tmp_path: Path) -> None:
    begin(recipe)
    (tmp_path / "run" / FILE_NAME).write_bytes(b"{}")
    refuses(rf"{FILE_NAME}: damaged or unreadable, .*remove .*{FILE_NAME} to continue", check_directory, recipe)


def test_an_edited_template_is_another_evaluation(recipe: Recipe, tmp_path: Path) -> None:
    settings = settings_of(recipe, {"a": "a"}, [])
    EvalRecord(
        tmp_path / "out", {key: value for key, value in settings.items() if key != "template file"}
    )  # an older one
    EvalRecord(tmp_path / "out", settings)
    (tmp_path / "own.jinja").write_text("edited", encoding="utf-8")
    with pytest.raises(UserError, match=r"holds an evaluation with other settings \(template file\)"):
        EvalRecord(tmp_path / "out", settings_of(recipe, {"a": "a"}, []))


ROW = {"problem": "6*7=", "answer": 42, "tests": ["assert a"]}
WITH_ROW = Problem("/here/set.jsonl:1", "6*7=", "42", "set", ({"role": "user", "content": "6*7="},), row=ROW)


def cached(cache: Path, monkeypatch: pytest.MonkeyPatch, last: int = 2) -> Problems:
    """The problems of a data set of the hub whose files lie in `cache`."""
    folder = cache / "datasets--openai--gsm8k" / "snapshots" / "abc"
    for split in ("train", "test"):
        place = folder / "main" / split / "0000.parquet"
        place.parent.mkdir(parents=True)
        texts = [f"{split}: what is 1+{n} apples?" for n in range(last)]
        pq.write_table(pa.table({"question": texts, "answer": [f"#### {n + 1}" for n in range(last)]}), place)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_args, **_options: str(folder))
    return read_problems(DataSection(train="gsm8k", eval="gsm8k"), RewardSection())


def test_a_set_of_the_hub_is_the_same_in_another_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = cached(tmp_path / "a", monkeypatch)
    record_data(tmp_path, here)
    moved = cached(tmp_path / "b", monkeypatch)
    assert {problem.id for problem in moved.train}.isdisjoint(problem.id for problem in here.train)
    check_data(tmp_path, moved)
    assert problem_sums(moved) == problem_sums(here)
    with pytest.raises(UserError, match=r"other problems of gsm8k \(train\), gsm8k \(held-out\)"):
        check_data(tmp_path, cached(tmp_path / "c", monkeypatch, last=3))


def test_a_file_may_move(tmp_path: Path) -> None:
    row = '{"problem": "6*7=", "answer": 42}\n'
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "set.jsonl").write_text(row)
    found = [
        problem_sums(read_problems(DataSection(train=str(tmp_path / folder / "set.jsonl")), RewardSection()))
        for folder in ("a", "b")
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("change", [{"question": "6*8="}, {"answer": "43"}, {"messages": ()}, {"row": {"tests": []}}])
def test_what_a_reward_depends_on_is_told(change: dict[str, Any], tmp_path: Path) -> None:
    record_data(tmp_path, Problems([WITH_ROW], [], []))
    refuses(r"other problems of set \(train\)", check_data, tmp_path, Problems([replace(WITH_ROW, **change)], [], []))
