"""Rows of prompts and responses are recognised; only the response is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.data.demonstrations import demonstrations, sequences
from mugrpo_megatron.data.tokenizer import CHAT_ML, build_arithmetic_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.sections import DataSection

USER = {"role": "user", "content": "6*7="}
SYSTEM = {"role": "system", "content": "Be brief."}
SAID = {"role": "assistant", "content": "so #### 42"}
EARLIER = [USER, {"role": "assistant", "content": "41"}, {"role": "user", "content": "Sure?"}]

ROWS: dict[str, dict[str, Any]] = {
    "response": {"prompt": "6*7=", "response": "so #### 42", "answer": 42},
    "completion": {"prompt": "6*7=", "completion": "so #### 42"},
    "TRL": {"prompt": [USER], "completion": [SAID]},
    "chat and text": {"prompt": [SYSTEM, USER], "response": "so #### 42"},
    "messages": {"messages": [SYSTEM, USER, SAID]},
    "several turns": {"messages": [*EARLIER, SAID]},
    "GSM8K": {"question": "6*7=", "answer": "so #### 42"},
    "MATH": {"problem": "6*7=", "solution": "so #### 42", "answer": "42"},
    "chat with a gold": {"messages": [USER, SAID], "answer": "42", "solution": "42"},
}
TOKENIZER = build_arithmetic_tokenizer(CHAT_ML)


def write(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_a_prompt_as_in_rl_and_its_whole_response(name: str, tmp_path: Path) -> None:
    section = DataSection()
    read = sequences(demonstrations(write(tmp_path, ROWS[name]), section), TOKENIZER, section, 100)
    [(prompt, response)] = read.pairs
    shown = str(TOKENIZER.decode(prompt))
    assert shown.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert shown.startswith(
        "<|im_start|>system\nBe brief." if name in ("chat and text", "messages") else "<|im_start|>user"
    )
    assert ("41" in shown) is (name == "several turns")
    assert "42" not in shown
    assert TOKENIZER.decode(response) == "so #### 42<|im_end|>"


def test_a_row_without_a_system_turn_gets_the_recipes_as_in_rl(tmp_path: Path) -> None:
    section = DataSection(system_prompt="Answer with a number.")
    read = sequences(demonstrations(write(tmp_path, *ROWS.values()), section), TOKENIZER, section, 100)
    for name, (prompt, _) in zip(ROWS, read.pairs, strict=True):
        system = "Be brief." if name in ("chat and text", "messages") else "Answer with a number."
        assert str(TOKENIZER.decode(prompt)).startswith(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n")


def test_rows_that_are_too_long_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "p" * n, "response": "r" * n} for n in (2, 9)]
    section = DataSection(prompt_style="plain", max_prompt_tokens=8)
    found = demonstrations(write(tmp_path, *rows), section)
    read = sequences(found, TOKENIZER, section, 100)
    assert (len(read.pairs), read.too_long) == (1, 1)
    assert sequences(found, TOKENIZER, DataSection(prompt_style="plain"), 3).too_long == 1
    with pytest.raises(UserError, match="no row is left: 2 are longer"):
        sequences(found, TOKENIZER, section, 2)


def test_each_message_of_the_assistant_in_a_completion_is_a_response(tmp_path: Path) -> None:
    """After the prompt and the messages before it, as the model meets it; TRL trains on the whole completion."""
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 40}}}]}
    tool = {"role": "tool", "content": "42"}
    for prompt in ("x", [{"role": "user", "content": "x"}], [SYSTEM, {"role": "user", "content": "x"}]):
        found = demonstrations(write(tmp_path, {"prompt": prompt, "completion": [call, tool, SAID]}), DataSection())
        assert [bool(row.reply) for row in found] == [True, False]
        assert found[1].response == SAID["content"]
        before = [dict(message) for message in found[1].problem.messages]
        assert [message["role"] for message in before[-3:]] == ["user", "assistant", "tool"]
        assert before[:-3] == ([SYSTEM] if len(prompt) == 2 else [])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"response": "x"}, "has none of the columns problem, question, prompt, messages"),
    "no response": ({"prompt": "x", "responce": "y"}, "the assistant's (found prompt, responce)"),
    "a question at the end": ({"messages": [USER]}, "has no response"),
    "blank": ({"prompt": "x", "response": " "}, "field 'response' has an empty response"),
    "object": ({"prompt": "x", "response": {"a": 1}}, "field 'response' holds an object"),
    "of the user": ({"prompt": "x", "response": [USER]}, "ends with a message of 'user'"),
    "several": ({"prompt": "x", "completion": [SAID, USER]}, "field 'completion' ends with a message of 'user'"),
    "empty": ({"prompt": "x", "response": []}, "field 'response' is an empty list"),
    "no message": ({"prompt": "x", "response": ["x", 3]}, "message 1 has no role"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_row_that_cannot_be_imitated_is_named_or_left_out(name: str, tmp_path: Path) -> None:
    row, reason = WRONG[name]
    source = write(tmp_path, ROWS["response"], row)
    with pytest.raises(UserError) as caught:
        demonstrations(source, DataSection())
    assert str(caught.value).startswith(f"{source}:2: ")
    assert reason in str(caught.value)
    assert len(demonstrations(source, DataSection(strict=False))) == 1
