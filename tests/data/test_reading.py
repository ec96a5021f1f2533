"""A problem keeps its whole row and its gold untouched, for functions that read more than an answer."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.data.arithmetic import problems
from mugrpo_megatron.data.prepare import read_problems
from mugrpo_megatron.data.problems import load
from mugrpo_megatron.data.reading import kept_row
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.recipe.sections import DataSection
from mugrpo_megatron.run.inputs import problem_sums

OWN = RewardSection(function="own:judge")
USER = {"role": "user", "content": "Add."}
CASES = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
ASSERTS = ["assert a", "assert b  # ####"]

STRUCTURED: dict[str, tuple[dict[str, Any], Any]] = {
    "verl, object": ({"prompt": [USER], "reward_model": {"ground_truth": CASES}}, CASES),
    "verl, text": ({"prompt": [USER], "reward_model": {"ground_truth": json.dumps(CASES)}}, json.dumps(CASES)),
    "list of asserts": ({"prompt": "Add.", "answer": ASSERTS}, ASSERTS),
    "tests": ({"prompt": "Add.", "tests": ["assert a"]}, ["assert a"]),
    "tests in a chat": ({"messages": [USER], "test_cases": [CASES]}, [CASES]),
    "APPS": ({"question": "Add.", "input_output": json.dumps(CASES)}, json.dumps(CASES)),
    "MBPP": ({"problem": "Add.", "test_list": ["assert a"]}, ["assert a"]),
    "truth": ({"problem": "Add.", "answer": True}, True),
    "nested list": ({"problem": "Add.", "answer": [[1], [2]]}, [[1], [2]]),
    "worked solution": ({"question": "Add.", "answer": "1 + 2 is\n#### 3"}, "1 + 2 is\n#### 3"),
    "no gold": ({"prompt": "Write a haiku.", "style": "short"}, ""),
    "null gold": ({"prompt": "Write a haiku.", "label": None}, ""),
}  # fmt: skip


def write(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "set.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", STRUCTURED)
def test_a_users_function_gets_the_gold_untouched_and_the_row(name: str, tmp_path: Path) -> None:
    row, gold = STRUCTURED[name]
    source = write(tmp_path, row)
    [problem] = read_problems(DataSection(train=source, eval="arithmetic", eval_problems=1), OWN).train
    assert (problem.gold, problem.row, problem.data_source) == (gold, row, "set")
    assert isinstance(problem.answer, str)
    if not isinstance(gold, str):
        assert json.loads(problem.answer) == gold


@pytest.mark.parametrize(
    "name", [name for name in STRUCTURED if name not in ("worked solution", "list of asserts", "verl, text")]
)
def test_math_needs_an_answer_that_it_can_verify(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"set.jsonl:1: field"):
        load(write(tmp_path, STRUCTURED[name][0]), DataSection())


def test_the_answer_for_math_is_extracted_and_its_gold_is_not(tmp_path: Path) -> None:
    rows = [STRUCTURED["worked solution"][0], {"problem": "Which?", "answer": [1, 2]}]
    worked, several = load(write(tmp_path, *rows), DataSection()).problems
    assert (worked.answer, worked.gold) == ("3", "1 + 2 is\n#### 3")
    assert (several.answer, several.gold) == ("1, 2", [1, 2])


def test_columns_that_the_recipe_names_have_to_be_there_for_any_function(tmp_path: Path) -> None:
    data = DataSection(
        train=write(tmp_path, {"problem": "Add.", "tests": [1]}), answer_field="right", eval="arithmetic"
    )
    with pytest.raises(UserError, match="field 'right' is missing"):
        read_problems(data, OWN)


def test_which_golds_may_be_structures_is_asked_by_data_source(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"problem": "Add.", "answer": CASES, "data_source": "code"},
        {"problem": "6*7=", "answer": "so \\boxed{42}", "data_source": "math"},
        {"problem": "7*7=", "answer": 49, "data_source": 3},
    ]
    found = load(write(tmp_path, *rows), DataSection(), any_gold="code".__eq__)
    assert [(p.answer, p.data_source) for p in found.problems] == [
        (json.dumps(CASES), "code"),
        ("42", "math"),
        ("49", "set"),
    ]


def test_a_bundled_task_has_no_row() -> None:
    [problem] = problems(0, "train", 1)
    assert (problem.row, problem.gold, problem.data_source) == ({}, problem.answer, "arithmetic")
    assert {problem: 1}[problem] == 1


def test_rows_of_a_table_become_json(tmp_path: Path) -> None:
    row = {
        "problem": "When?", "answer": Decimal("1.50"), "day": date(2024, 2, 29), "at": datetime(2024, 1, 1, tzinfo=UTC),
        "took": timedelta(seconds=90), "picture": b"\xff\x00", "share": float("nan"), "tags": [{"a": [1, None]}],
    }  # fmt: skip
    pq.write_table(pa.Table.from_pylist([row, row]), tmp_path / "set.parquet")
    first, second = load(str(tmp_path / "set.parquet"), DataSection()).problems
    assert first.row == {
        "problem": "When?", "answer": "1.50", "day": "2024-02-29", "at": "2024-01-01T00:00:00+00:00", "took": 90.0,
        "picture": "/wA=", "share": None, "tags": [{"a": [1, None]}],
    }  # fmt: skip
    assert (first.answer, first.gold) == ("1.50", "1.50")
    assert json.dumps(first.row, allow_nan=False) == json.dumps(second.row, allow_nan=False)
    assert [a is b for a, b in zip(first.row, second.row, strict=True)] == [True] * len(row)  # names are shared


@given(st.dictionaries(st.text(max_size=5), st.recursive(st.none() | st.text() | st.binary() | st.floats() | st.dates(),
       lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)))  # fmt: skip
def test_a_kept_row_is_json_and_stays_what_it_is(row: dict[str, Any]) -> None:
    kept = kept_row(row)
    assert json.loads(json.dumps(kept, allow_nan=False)) == kept
    assert (kept_row(kept), list(kept)) == (kept, list(row))


def test_a_runs_data_are_its_rows_too(tmp_path: Path) -> None:
    def told(row: dict[str, Any]) -> Any:
        return problem_sums(read_problems(DataSection(train=write(tmp_path, row), eval_problems=1), OWN))["train"]

    assert told({"problem": "q", "answer": 1, "x": 1}) == told({"problem": "q", "answer": 1, "x": 1})
    assert told({"problem": "q", "answer": 1, "x": 1}) != told({"problem": "q", "answer": 1, "x": 2})
