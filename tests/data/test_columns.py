"""Rows as other projects write them are read by their columns, and what was recognised is said."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mugrpo_megatron.data import arithmetic
from mugrpo_megatron.data.prepare import read_problems
from mugrpo_megatron.data.problems import load
from mugrpo_megatron.data.prompts import EXCERPT_CHARS, decoded_line, render, template_of
from mugrpo_megatron.data.tokenizer import CHAT_ML, build_arithmetic_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.load import validate
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.recipe.sections import DataSection
from mugrpo_megatron.samples import Problem

USER = {"role": "user", "content": "6*7="}
SYSTEM = {"role": "system", "content": "Be brief."}
SAID = {"role": "assistant", "content": "so #### 42"}
TEXT = {"type": "text"}
CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*7="})

ROWS: dict[str, tuple[dict[str, Any], str, tuple[dict[str, str], ...]]] = {
    "ours": ({"problem": "6*7=", "answer": 42}, "", ()),
    "GSM8K": ({"question": "6*7=", "answer": "6 times 7\n#### 42"}, "GSM8K's question, answer", ()),
    "MATH": ({"problem": "6*7=", "solution": "is \\boxed{42}.", "level": "1"}, "MATH's problem, solution", ()),
    "DeepScaleR": ({"problem": "6*7=", "answer": "42", "solution": "is \\boxed{43}"}, "", ()),
    "slime, text": ({"prompt": "6*7=", "label": "42", "metadata": {"a": 1}}, "slime's prompt, label", ()),
    "slime, chat": ({"prompt": [USER], "label": 42}, "slime's prompt, label", (CHAT[1],)),
    "verl": (
        {
            "data_source": "openai/gsm8k",
            "prompt": [SYSTEM, USER],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "42"},
            "extra_info": {"answer": "#### 41", "index": 0},
        },
        "verl's prompt, reward_model.ground_truth",
        CHAT,
    ),
    "TRL, text": ({"prompt": "6*7=", "solution": "$\\boxed{42}$"}, "TRL's prompt, solution", ()),
    "TRL, chat": ({"prompt": [SYSTEM, USER], "ground_truth": "42"}, "TRL's prompt, ground_truth", CHAT),
    "messages": ({"messages": [SYSTEM, USER, SAID]}, "messages, the last message", CHAT),
    "messages and gold": ({"messages": [SYSTEM, USER, SAID], "answer": "42"}, "messages, answer", CHAT),
    "parts": (
        {"prompt": [{"role": "user", "content": [TEXT | {"text": "6*"}, TEXT | {"text": "7="}]}], "label": 42},
        "slime's prompt, label",
        (CHAT[1],),
    ),
}  # fmt: skip


def write(path: Path, row: dict[str, Any]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        path.write_text(
            json.dumps([row] if path.suffix == ".json" else row, indent=1 if path.suffix == ".json" else None)
        )
    return str(path)


@pytest.mark.parametrize(
    ("name", "suffix"), [*((name, ".jsonl") for name in ROWS), ("verl", ".json"), ("verl", ".parquet")]
)
def test_rows_are_read_by_their_columns(name: str, suffix: str, tmp_path: Path) -> None:
    row, said, messages = ROWS[name]
    read = load(write(tmp_path / f"set{suffix}", row), DataSection())
    [problem] = read.problems
    text = "6*7=" if len(messages) < 2 else "Be brief.\n6*7="
    assert (problem.question, problem.answer, problem.source, problem.messages) == (text, "42", "set", messages)
    assert read.notes == ([f"set: 1 rows read as {said}"] if said else [])


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_tables_of_text_are_read_by_their_first_line(delimiter: str, tmp_path: Path) -> None:
    path = tmp_path / ("set.csv" if delimiter == "," else "set.tsv")
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        table = csv.writer(file, delimiter=delimiter)
        table.writerows([["id", "question", "answer"], [1, "6*7=\n(exactly)", 42], [2, 'a "quoted", b', "#### 3"]])
    read = load(str(path), DataSection())
    assert [(p.question, p.answer) for p in read.problems] == [("6*7=\n(exactly)", "42"), ('a "quoted", b', "3")]
    assert [p.id for p in read.problems] == [f"{path}:3", f"{path}:4"]  # the line where the row ends


def test_a_cell_of_a_table_may_be_long(tmp_path: Path) -> None:
    """Longer than the 128 KiB that Python's reader takes by default."""
    path, long = tmp_path / "set.csv", "6*7, " + "x" * 200_000
    path.write_text(f'problem,answer\n"{long}",42\n')
    [problem] = load(str(path), DataSection()).problems
    assert (problem.question, problem.answer) == (long, "42")


def test_columns_that_the_recipe_names_are_read_and_no_others(tmp_path: Path) -> None:
    path = write(tmp_path / "set.jsonl", {"question": "6*7=", "answer": "41", "right": 42})
    [problem] = load(path, DataSection(question_field="question", answer_field="right")).problems
    assert problem.answer == "42"
    with pytest.raises(UserError, match="field 'problem' is missing"):
        load(write(tmp_path / "set.jsonl", {"question": "6*7=", "answer": "41"}), DataSection(answer_field="right"))


def test_what_was_recognised_is_noted_once_for_each_kind(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    rows = [ROWS[name][0] for name in ("GSM8K", "slime, text", "GSM8K", "ours")]
    for number, row in enumerate(rows):
        rows[number] = {
            key: f"{value} {number}" if key in ("question", "prompt", "problem") else value
            for key, value in row.items()
        }
    path.write_text("".join(json.dumps({**row, "n": n}) + "\n" for n, row in enumerate(rows)))
    data = DataSection(train=str(path), contamination="off")
    notes = read_problems(data, RewardSection()).notes
    assert notes == ["set: 2 rows read as GSM8K's question, answer", "set: 1 rows read as slime's prompt, label"]


NOT_READ: dict[str, tuple[dict[str, Any], str]] = {
    "nothing to verify": ({"prompt": "6*7=", "x": 1}, "field 'problem' is missing (found prompt, x)"),
    "null gold": ({"prompt": "6*7=", "label": None}, "field 'label' is null"),
    "null question": ({"question": None, "answer": "4"}, "field 'question' is null"),
    "null inside": ({"prompt": "6*7=", "reward_model": {"ground_truth": None}}, "'reward_model.ground_truth' is null"),
    "object": ({"prompt": {"text": "6*7="}, "label": 1}, "field 'prompt' holds an object"),
    "list of text": ({"prompt": ["6*7=", "7*7="], "label": 1}, "field 'prompt' holds 2 texts"),
    "empty list": ({"prompt": [], "label": 1}, "field 'prompt' is empty"),
    "no role": ({"prompt": [{"content": "x"}], "label": 1}, "field 'prompt': message 1 has no role"),
    "number as role": ({"prompt": [{"role": 1, "content": "x"}], "label": 1}, "message 1 has no role"),
    "no content": ({"prompt": [USER, {"role": "user"}], "label": 1}, "message 2 has no text"),
    "object as content": ({"prompt": [{"role": "user", "content": {}}], "label": 1}, "message 1 has no text"),
    "image": (
        {"prompt": [{"role": "user", "content": [{"type": "image", "url": "x"}]}], "label": 1},
        "message 1 has a part of type 'image', and only text can be read",
    ),
    "blank": ({"prompt": [{"role": "user", "content": " "}], "label": 1}, "field 'prompt' is empty"),
    "ends with an answer": ({"prompt": [USER, SAID], "label": 42}, "ends with the assistant's turn"),
    "only an answer": ({"messages": [SAID], "answer": 42}, "field 'messages' is empty"),
    "list of objects as gold": ({"prompt": "6*7=", "label": [{"a": 1}]}, "field 'label' holds an object"),
    "object as gold": ({"prompt": "6*7=", "label": {"a": 1}}, "field 'label' holds an object"),
    "list in a list as gold": ({"prompt": "6*7=", "label": [[1]]}, "field 'label' holds a list"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_READ)
def test_a_row_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    row, reason = NOT_READ[name]
    path = write(tmp_path / "set.jsonl", row)
    with pytest.raises(UserError) as caught:
        load(path, DataSection())
    assert str(caught.value).startswith(f"{path}:1: ")
    assert reason in str(caught.value)


TOKENIZER = build_arithmetic_tokenizer(CHAT_ML)


def rendered(problem: Problem, style: str = "chat") -> str:
    return str(TOKENIZER.decode(render(problem, TOKENIZER, style)))


def test_messages_go_through_the_template_whole(tmp_path: Path) -> None:
    [verl] = load(write(tmp_path / "set.jsonl", ROWS["verl"][0]), DataSection()).problems
    assert rendered(verl) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n6*7=<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(UserError, match=r"set.jsonl:1 is a chat of 2 messages.*prompt_style = \"chat\""):
        rendered(verl, "plain")
    [slime] = load(write(tmp_path / "set.jsonl", ROWS["slime, chat"][0]), DataSection()).problems
    assert rendered(slime, "plain") == "6*7="


def test_a_system_prompt_goes_before_chats_that_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "GENERATED", 1)
    section = DataSection(prompt_style="chat", system_prompt="Think first.")
    for name, system in (("ours", "Think first."), ("slime, chat", "Think first."), ("verl", "Be brief.")):
        [problem] = load(write(tmp_path / "set.jsonl", ROWS[name][0]), section).problems
        assert rendered(problem).startswith(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n6*7=")
    [task] = load("arithmetic", section).problems
    assert task.messages == ({"role": "system", "content": "Think first."}, {"role": "user", "content": task.question})
    with pytest.raises(UserError, match="needs prompt_style"):
        validate({"data": {"prompt_style": "plain", "system_prompt": "Think first."}}, "recipe")


def test_a_template_that_refuses_the_messages_is_a_sentence() -> None:
    tokenizer = build_arithmetic_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match=r"set:1: the chat template refuses .* \(roles must alternate\)"):
        render(Problem("set:1", "q", "1"), tokenizer, "chat")


def test_an_own_template_and_its_arguments(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ 'T' if thinking else 'N' }}")
    table = {"prompt_style": "chat", "chat_template": str(path), "template_arguments": {"thinking": True}}
    section = validate({"data": table}, "recipe").data
    problem = Problem("set:1", "6*7=", "42", "set", CHAT)
    assert TOKENIZER.decode(render(problem, TOKENIZER, "chat", template_of(section))) == "[system]Be brief.[user]6*7=T"
    assert rendered(problem).startswith("<|im_start|>system")
    bare = build_arithmetic_tokenizer()
    assert render(problem, bare, "chat", template_of(section)) == render(
        problem, TOKENIZER, "chat", template_of(section)
    )
    path.write_text("good\n{% for %}")
    with pytest.raises(UserError, match=r"own.jinja, line 2: Expected .*; correct the template"):
        render(problem, TOKENIZER, "chat", template_of(section))
    for text in ("{{ 1 + 'x' }}", "{{ messages[9].role }}", "{{ none_such.x }}", "{{ 1 / 0 }}"):
        path.write_text(text)
        with pytest.raises(UserError, match="the chat template refuses"):
            render(problem, TOKENIZER, "chat", template_of(section))
    path.write_bytes(b"\xff")
    for wrong in (path, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"data.chat_template = .* cannot be read"):
            template_of(section.model_copy(update={"chat_template": wrong}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_style": "plain", "chat_template": "x.jinja"},
        {"prompt_style": "llama", "template_arguments": {"a": 1}},
        {"prompt_style": "chat", "template_arguments": {"a": {"b": 1}}},
    ],
)
def test_template_settings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"recipe: `data\."):
        validate({"data": wrong}, "recipe")


def test_a_prompt_is_shown_as_one_line_with_its_special_tokens() -> None:
    short = decoded_line(TOKENIZER, render(Problem("set:1", "6*7=\n", "42"), TOKENIZER, "chat"))
    assert short == repr("<|im_start|>user\n6*7=\n<|im_end|>\n<|im_start|>assistant\n")
    long = decoded_line(TOKENIZER, TOKENIZER.encode("x" * 5000 + "end"))
    assert len(long) < 2 * EXCERPT_CHARS + 10
    assert (long[:3], long[-4:]) == ("'xx", "end'")
