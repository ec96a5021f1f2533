"""`reasoning_gym:TASK` as a source: deterministic, disjoint splits, scored by the task; with a stand-in too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mugrpo_megatron.data.prepare import read_problems
from mugrpo_megatron.data.problems import check_files, load, named_sources
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.reasoning_gym import tasks
from mugrpo_megatron.recipe.load import dump_recipe, parse_toml, validate
from mugrpo_megatron.recipe.scoring import GYM_REWARD, RewardSection
from mugrpo_megatron.recipe.sections import DataSection
from mugrpo_megatron.rewards.pool import Verifier

STAND_IN = """
from dataclasses import dataclass
from random import Random
from . import factory, utils


@dataclass
class Config:
    largest: int = 1000
    seed: int = 0
    size: int = 500


class Sums:
    def __init__(self, config):
        assert config.largest > 1, "largest must be above 1"
        self.config = config

    def __getitem__(self, index):
        if self.config.largest == 13:
            raise ZeroDivisionError("no entry")
        if self.config.largest == 14:
            bytearray(1 << 36)
        random = Random(self.config.seed + index)
        terms = tuple(random.randrange(self.config.largest) for _ in range(2))
        return {"question": "{} + {} =".format(*terms), "answer": str(sum(terms)), "metadata": {"terms": terms}}

    def score_answer(self, answer, entry):
        assert isinstance(entry["metadata"]["terms"], tuple)
        return 1.0 if answer == entry["answer"] else 0.25


factory.DATASETS["sums"] = (Sums, Config)


def create_dataset(name, **parameters):
    return Sums(Config(**parameters))
"""
SOURCE = "reasoning_gym:sums?largest=100&size=200"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = tmp_path / "reasoning_gym"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN)
    (package / "factory.py").write_text("DATASETS = {}\n")
    (package / "utils.py").write_text(
        "def extract_answer(text):\n"
        "    return text.rpartition('<answer>')[2].partition('</answer>')[0] if '<answer>' in text else None\n"
    )
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "reasoning_gym"}
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.mark.usefixtures("stand_in")
def test_problems_are_the_same_again_and_no_seed_trains_on_a_held_out_one() -> None:
    data = DataSection(train=SOURCE, eval=SOURCE, eval_problems=50)
    held_out = load(SOURCE, data, "eval").problems
    assert held_out == load(SOURCE, data, "eval").problems
    assert len({problem.question for problem in held_out}) == len(held_out) == 200
    trained = {seed: load(f"{SOURCE}&seed={seed}", data).problems for seed in range(3)}
    for problems in trained.values():
        assert len(problems) == 200
        assert {problem.question for problem in problems}.isdisjoint(problem.question for problem in held_out)
    assert len({problem.question for problems in trained.values() for problem in problems}) > 500
    read = read_problems(data, RewardSection(function="a:b"))
    assert (len(read.train), len(read.held_out)) == (200, 50)
    assert [note for note in read.notes if "training" in note] == []


@pytest.mark.usefixtures("stand_in")
def test_parameters_that_explode_are_one_sentence() -> None:
    for source, said in (("largest=14", "MemoryError"), ("size=99999999999", "size is at most 10,000,000")):
        with pytest.raises(UserError, match=said):
            load(f"reasoning_gym:sums?{source}", DataSection())


@pytest.mark.usefixtures("stand_in")
def test_a_task_that_fails_on_an_entry_is_one_sentence() -> None:
    with pytest.raises(
        UserError, match=r"'reasoning_gym:sums\?largest=13': reasoning-gym fails with its parameters: no entry"
    ):
        load("reasoning_gym:sums?largest=13", DataSection())


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("reasoning_gym:summs", "no such task; did you mean sums?"),
        ("reasoning_gym:sums?most=3", "has no parameter most: its parameters are largest, seed, size"),
        ("reasoning_gym:sums?largest=1", "reasoning-gym fails with its parameters: largest must be above 1"),
        ("reasoning_gym:sums?largest", "key=value, joined by &"),
        ("reasoning_gym:sums?size=0", "size is a whole number from 1"),
    ],
)
def test_a_source_that_cannot_be_is_told_before_anything_starts(source: str, message: str) -> None:
    with pytest.raises(UserError, match="data source") as caught:
        check_files(source)
    assert message in str(caught.value)


def test_a_missing_package_is_one_sentence_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs a package that is not installed: pip install reasoning-gym"):
        check_files(SOURCE)


def test_the_task_scores_its_problems_unless_the_recipe_says_what_does() -> None:
    recipe = validate({"data": {"train": SOURCE}}, "r")
    assert (recipe.reward.function, recipe.data.eval) == (GYM_REWARD, SOURCE)
    assert validate(parse_toml(dump_recipe(recipe)), "r") == recipe
    assert validate({"data": {"train": SOURCE}, "reward": {"function": "math"}}, "r").reward.function == "math"
    assert validate({"data": {"train": "chain"}}, "r").reward.function == "math"
    for data in ({"train": SOURCE, "eval": "arithmetic"}, {"eval": SOURCE}):
        with pytest.raises(UserError, match=r"sums.* is scored by its task, and arithmetic is not"):
            validate({"data": data}, "r")
    assert [*named_sources(f"{SOURCE},reasoning_gym:other")] == ["sums", "other"]


@pytest.mark.process
@pytest.mark.usefixtures("stand_in")
def test_the_verifier_reads_tags_a_box_or_the_whole_response() -> None:
    recipe = validate({"data": {"train": SOURCE}, "reward": {"workers": 1}}, "r")
    problem = load(SOURCE, recipe.data).problems[7]
    texts = ["so <answer>{}</answer>.", "\\boxed{{{}}}", " {}\n", "it is {}"]
    with Verifier(recipe.reward) as verifier:
        responses = [text.format(problem.answer) for text in texts]
        scores = verifier.score(responses, [problem.gold] * 4, [problem.row] * 4)
    assert [score.reward for score in scores] == [1.0, 1.0, 1.0, 0.25]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("task", ["chain_sum?max_terms=3&max_digits=2", "gcd", "zebra_puzzles", "countdown"])
def test_golds_of_the_real_package_score_1(task: str) -> None:
    pytest.importorskip("reasoning_gym", reason="needs pip install reasoning-gym")
    source = f"reasoning_gym:{task}{'&' if '?' in task else '?'}size=5"
    recipe = validate({"data": {"train": source}, "reward": {"workers": 1}}, "r")
    problems = load(source, recipe.data).problems
    with Verifier(recipe.reward) as verifier:
        scores = verifier.score([p.gold for p in problems], [p.gold for p in problems], [p.row for p in problems])
    assert [score.reward for score in scores] == [1.0] * 5
