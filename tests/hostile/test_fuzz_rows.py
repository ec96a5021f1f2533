"""Rows of any JSON: each is used or named, by training, by supervised learning, by scores, and by tests of programs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.commands.score import _input
from mugrpo_megatron.data.demonstrations import demonstrations
from mugrpo_megatron.data.files import rows
from mugrpo_megatron.data.problems import load
from mugrpo_megatron.extras.sandbox.row_tests import read_tests
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.recipe.sections import DataSection
from mugrpo_megatron.rewards.math.extract import answer_of
from mugrpo_megatron.rewards.math.literal import match_literally
from tests.hostile.fuzz import TEXTS, changed
from tests.hostile.outcome import sentence

pytestmark = pytest.mark.night

PROBLEM = {"problem": "1+1=", "answer": "2", "data_source": "a", "level": 3, "options": ["1", "2"]}
CHAT = {
    "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1="}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": 1},
}
SCORED = {
    "response": "So \\boxed{2}",
    "answer": "2",
    "prompt": [{"role": "user", "content": "1+1="}],
    "data_source": "a",
}
SAID = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
ASSERTS = {"answer": "x", "test_list": ["assert f(1) == 2", "assert f(2) == 3"], "test_imports": ["import math"],
           "test_setup_code": "x = 1", "prompt": "def f(x):\n    pass\n"}  # fmt: skip
CHECKED = {"answer": "x", "test": "def check(candidate):\n    assert candidate(1) == 2\n", "entry_point": "f",
           "prompt": "import math\ndef g(x):\n    return x\ndef f(x):\n    '''doc'''\n"}  # fmt: skip
CASES = {"answer": {"inputs": ["1\n", ["2"]], "outputs": ["1", ["2"]], "fn_name": "f"}, "metadata": {"func_name": "f"},
         "tests": [{"input": "1", "output": "2", "testtype": "stdin"}],
         "public_tests": {"input": ["1"], "output": ["1"]}}  # fmt: skip


def written(folder: pytest.TempPathFactory, row: Any) -> str:
    path = folder.getbasetemp() / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (PROBLEM | SCORED | SAID, row)), encoding="utf-8")
    return str(path)


@given(st.sampled_from([PROBLEM, CHAT]).flatmap(changed))
def test_a_training_row(tmp_path_factory: pytest.TempPathFactory, row: Any) -> None:
    path = written(tmp_path_factory, row)

    def read() -> None:
        both = load(path, DataSection(strict=False))
        assert len(both.problems) + len(both.malformed) == 2
        for problem in both.problems:
            json.dumps([problem.question, problem.answer, problem.row], allow_nan=False).encode()

    sentence(read)


@given(changed(SAID))
def test_a_row_of_supervised_learning(tmp_path_factory: pytest.TempPathFactory, row: Any) -> None:
    path = written(tmp_path_factory, row)
    sentence(lambda: demonstrations(path, DataSection(strict=False)))


@given(changed(SCORED), st.booleans())
def test_a_row_to_score(tmp_path_factory: pytest.TempPathFactory, row: Any, own: bool) -> None:
    written(tmp_path_factory, row)
    section = RewardSection(function="a:b" if own else "math")
    for _, one in rows(tmp_path_factory.getbasetemp() / "rows.jsonl"):
        try:
            asked = _input(one, section)
        except ValueError as error:
            assert str(error)
        else:
            json.dumps([asked.row, asked.answer], allow_nan=False).encode()
            match_literally(asked.row["response"], asked.answer, RewardSection())


@given(st.sampled_from([ASSERTS, CHECKED, CASES]).flatmap(changed))
def test_a_row_with_tests(row: Any) -> None:
    if isinstance(row, dict):
        try:
            assert read_tests(row.get("answer"), row)
        except ValueError as error:
            assert str(error)


PIECES = st.sampled_from([
    "Answer:", "**Final Answer:**", "The answer is ", "$", "$$", "\\[", "\\]", "\\boxed{", "}", "{", "=", "120", "-3.5",
    "\\frac{1}{2}", "f(x)", " or ", " is ", "\n", ". ", "€", "\\text{cm}", "1,000", "(", ")", "[", ",", "<think>",
    "</think>",
])  # fmt: skip


@given(st.lists(PIECES | TEXTS, max_size=14).map("".join), st.sampled_from(["120", "1/2", "f(x)=2", "(1,2)", "12 cm"]))
def test_a_response(response: str, gold: str) -> None:
    for extract in ("auto", "boxed", "final", "last_number"):
        match_literally(response, gold, RewardSection(extract=extract))
    answer_of(response)
