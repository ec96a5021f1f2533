"""Rows as public data sets have them: chats of other formats, missing golds, copies, pictures, rendered prompts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mugrpo_megatron.data.demonstrations import demonstrations, sequences
from mugrpo_megatron.data.prepare import read_problems
from mugrpo_megatron.data.problems import load
from mugrpo_megatron.data.prompts import refuse_rendered
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.scoring import EvalSection, RewardSection
from mugrpo_megatron.recipe.sections import DataSection
from mugrpo_megatron.rewards.gold_check import says_there_is_none
from mugrpo_megatron.samples import Problem
from tests.data.test_demonstrations import CHAT_ML


def rows_file(*rows: Any, name: str = "rows.jsonl") -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return name


def only(row: Any) -> Problem:
    [problem] = load(rows_file(row), DataSection()).problems
    return problem


SHARE = {"conversations": [{"from": "human", "value": "7+8?"}, {"from": "gpt", "value": "It is \\boxed{15}"}]}
ORZ = [{"from": "human", "value": "7+8?"}, {"from": "assistant", "ground_truth": {"value": "15", "pass_at_n": 0.5}}]


@pytest.mark.parametrize(
    "row",
    [
        SHARE,
        ORZ,
        {"conversation": [{"role": "user", "content": "7+8?"}, {"role": "assistant", "content": "#### 15"}]},
        {"problem": "", "question": "7+8?", "answer": "", "solution": "\\boxed{15}"},
        {"problem": None, "prompt": "7+8?", "label": "15", "answer": []},
        {"question": ["7+8?"], "answer": ["15"]},
        {"question": "7+8?", "answer": "15", "image": None, "images": []},
        {"question": "7+8?", "answer": "15", "image": "registry/box:latest"},
        {"question": "7+8?", "solution": ["First add 8 and 2."], "final_answer": ["15"], "unit": None},
        {"question": "7+8?", "answer": None, "answer_number": 15, "equation_solution": None},
    ],
    ids=str,
)
def test_chats_of_other_formats_and_empty_columns(row: Any, tmp_path: Path) -> None:
    problem = only(row)
    assert (problem.question, problem.answer) == ("7+8?", "15")


def test_an_instruction_with_its_input() -> None:
    row = {"instruction": "Add the numbers.", "input": "7, 8", "output": "15"}
    section = DataSection(question_field="instruction", answer_field="output")
    [problem] = load(rows_file(row), section).problems
    assert (problem.question, problem.answer) == ("Add the numbers.\n\n7, 8", "15")
    with pytest.raises(UserError, match=r'data.question_field = "instruction" with data.answer_field = "output"'):
        load(rows_file(row), DataSection())
    [example] = demonstrations(rows_file(row), DataSection())
    assert (example.problem.question, example.response) == ("Add the numbers.\n\n7, 8", "15")


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        ({"ID": "2024-I-1", "Problem": "7+8?", "Solution": "By hand", "Answer": 15}, "Problem", "Answer"),
        ({"Question": "7+8?", "Numbers": "7 8", "Answer": 15.0}, "Question", "Answer"),
        ({"Question": "7+8?", "Correct Answer": "15", "Incorrect Answer 1": "16"}, "Question", "Correct Answer"),
        ({"question": "7+8?", "options": ["A)15", "B)16"], "rationale": "r", "correct": "A"}, "question", "correct"),
        ({"question": "7+8?", "choices": {"text": ["15", "16"]}, "answerKey": "A"}, "question", "answerKey"),
        ({"quiz": "Who lies?", "names": ["A"], "solution_text_format": "A"}, "quiz", "solution_text_format"),
        ({"query": "7+8?", "response": "The answer is: 15", "type": "x"}, "query", "response"),
        (
            {"0": {"from": "human", "value": "7+8?"}, "1": {"from": "assistant", "ground_truth": {"value": "15"}}},
            "0.value",
            "1.ground_truth.value",
        ),
    ],
    ids=str,
)
def test_columns_of_other_names_are_named_by_the_refusal(row: dict[str, Any], question: str, answer: str) -> None:
    said = f'data.question_field = "{question}" with data.answer_field = "{answer}" reads these columns'
    with pytest.raises(UserError, match=re.escape(said)):
        load(rows_file(row), DataSection())
    [problem] = load(rows_file(row), DataSection(question_field=question, answer_field=answer)).problems
    assert problem.question in ("7+8?", "Who lies?")
    assert problem.answer in ("15", "15.0", "A", "The answer is: 15")


@pytest.mark.parametrize("row", [{"nums": [1, 2], "target": 3}, {"text": "7+8?"}, {"prompt_id": 3, "gold": 15}])
def test_a_refusal_names_no_columns_where_there_are_none(row: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refusal:
        load(rows_file(row), DataSection())
    assert "reads these columns" not in str(refusal.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"question": "What is shown?", "answer": "15", "image": "figures/7.PNG"},
            "pictures or sound in column 'image'",
        ),
        ({"question": "What is shown?", "answer": "15", "images": [{"path": "a"}]}, "column 'images'"),
        ({"question": "<image>\nWhat is shown?", "answer": "15"}, "a place for pictures or sound, '<image>'"),
        ({"question": ["7+8?", "8+8?"], "answer": "15"}, "holds 2 texts"),
    ],
    ids=str,
)
def test_questions_that_no_text_asks(row: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load(rows_file(row), DataSection())


NONE = (
    "proof",
    "Proof.",
    "\\text{proof}",
    "notfound",
    "Not found",
    "N/A",
    "nan",
    "null",
    "[]",
    "?",
    "See solution",
    "证明略",
)
SOME = ("no solution", "none", "undefined", "0", "Proof theory", "A", "-1", "unknown", "\\emptyset")


def test_golds_that_say_that_there_is_none() -> None:
    assert [gold for gold in NONE if not says_there_is_none(gold)] == []
    assert [gold for gold in SOME if says_there_is_none(gold)] == []


def test_such_golds_are_refused_or_left_out() -> None:
    file = rows_file({"problem": "Show it.", "answer": "Proof omitted"}, {"problem": "7+8?", "answer": "15"})
    with pytest.raises(UserError, match=r"rows.jsonl:1: the gold 'Proof omitted' is no answer"):
        read_problems(DataSection(train=file, eval=file), RewardSection())
    held_out = rows_file({"problem": "1+1?", "answer": "2"}, name="held.jsonl")
    problems = read_problems(DataSection(train=file, eval=held_out, strict=False), RewardSection())
    assert [problem.answer for problem in problems.train] == ["15"]


def test_copies_in_a_held_out_set_count_once() -> None:
    rows = [{"problem": f"{n}+1?", "answer": str(n + 1)} for n in range(3)]
    one, two = rows_file(*rows * 4, name="one.jsonl"), rows_file(*rows[:2], name="two.jsonl")
    train = rows_file({"problem": "20+1?", "answer": "21"}, name="train.jsonl")
    problems = read_problems(DataSection(train=train, eval=f"{one},{two}"), RewardSection())
    assert [problem.source for problem in problems.held_out] == ["one"] * 3 + ["two"] * 2
    assert any("one: 9 of its 12 held-out problems repeat another one's question" in note for note in problems.notes)


def test_several_greedy_samples_are_refused() -> None:
    section = EvalSection.model_validate({"samples": 4, "temperature": 0.7, "sets": {"aime": {"temperature": 0.0}}})
    section.check_samples(["math"])
    with pytest.raises(UserError, match=r"eval.sets.aime.samples = 4 at temperature 0"):
        section.check_samples(["math", "aime"])
    EvalSection().check_samples(["aime"])


@pytest.mark.parametrize(
    "text",
    [
        "<s>[INST] 7+8? [/INST]",
        "<start_of_turn>user\n7+8?<end_of_turn>\n<start_of_turn>model\n",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n7+8?<|eot_id|>",
        "<｜User｜>7+8?<｜Assistant｜>",
        "A conversation.\nUser: 7+8?\nAssistant: <think>",
    ],
)
def test_rendered_prompts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r'rendered already.*data.prompt_style = "plain"'):
        refuse_rendered(Problem("rows.jsonl:1", text, "15"))


@pytest.mark.parametrize("text", ["7+8?", "User: hi\nWhat comes next?", "What does <|im_start|> mean?", "[1, 2]"])
def test_other_questions_are_not(text: str) -> None:
    refuse_rendered(Problem("rows.jsonl:1", text, "15"))


TRACE = [{"role": "user", "content": "7+8?"}, {"role": "assistant", "content": "hm, \\boxed{15}"}]


def test_a_models_trace_is_learnt_and_not_a_persons_solution() -> None:
    row = {"problem": "7+8?", "solution": "By hand 15", "answer": "15", "messages": TRACE, "generations": ["a", "b"]}
    [example] = demonstrations(rows_file(row), DataSection())
    assert (example.response, example.column) == ("hm, \\boxed{15}", "messages")


def test_a_trace_that_is_not_read_is_named() -> None:
    row = {"problem": "7+8?", "solution": "By hand 15", "generations": ["hm", "so"]}
    examples = demonstrations(rows_file(row), DataSection())
    read = sequences(examples, build_arithmetic_tokenizer(CHAT_ML), DataSection(), 100)
    assert any("from 'solution'; these rows also have 'generations', which is not read" in note for note in read.notes)


def test_turns_with_weight_0_are_not_learnt() -> None:
    first, second = {**TRACE[1], "weight": 0}, {"role": "assistant", "content": "15", "weight": 1}
    row = {"messages": [TRACE[0], first, {"role": "user", "content": "Only the number."}, second]}
    [example] = demonstrations(rows_file(row), DataSection())
    assert example.response == "15"
    assert [message["content"] for message in example.problem.messages] == [
        "7+8?",
        "hm, \\boxed{15}",
        "Only the number.",
    ]
    assert not any("weight" in message for message in example.problem.messages)
    for weight, words in ((0, "weight 0, so there is nothing"), (0.5, "the weight 0.5")):
        with pytest.raises(UserError, match=words):
            demonstrations(rows_file({"messages": [TRACE[0], {**TRACE[1], "weight": weight}]}), DataSection())


def test_columns_that_nothing_reads_stop_no_run() -> None:
    table = pa.table(
        {
            "question": ["7+8?", "8+8?"],
            "answer": ["15", "16"],
            "at": pa.array([1700000000123456789, 5], pa.timestamp("ns")),
            "took": pa.array([123456789, 5], pa.duration("ns")),
            "late": pa.array([9 * 10**15, 1], pa.timestamp("ms")),
            "raw": pa.array([b"\xff", b"a"], pa.binary()).view(pa.string()),
        }
    )
    pq.write_table(table, "rows.parquet")
    problems = load("rows.parquet", DataSection()).problems
    assert [problem.answer for problem in problems] == ["15", "16"]
    assert str(problems[0].row["at"]).endswith("123456789")
    assert "raw" not in problems[0].row
    with pytest.raises(UserError, match="field 'raw' holds a value that cannot be read"):
        load("rows.parquet", DataSection(question_field="raw", answer_field="answer"))
