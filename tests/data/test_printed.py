"""Lists and objects that a column holds as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.data.demonstrations import demonstrations, sequences
from mugrpo_megatron.data.printed import printed_list
from mugrpo_megatron.data.problems import load
from mugrpo_megatron.data.reading import verifiable_answer
from mugrpo_megatron.data.tokenizer import CHAT_ML, build_arithmetic_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.sections import DataSection

CHAT = [{"role": "user", "content": "7+6?"}, {"role": "assistant", "content": "13"}]


@given(
    st.lists(st.sampled_from([r"\frac{3}{4}", r"\rho", r"\xi_1", r"\nabla", r"\vec{a}", r"\unit", r"\Nu"]), min_size=1)
)
def test_lists_of_latex_lose_no_backslash(elements: list[str]) -> None:
    """Printed by Python with doubled backslashes, or written by hand with single ones; JSON's quotes too."""
    assert printed_list(repr(elements)) == elements
    for quote in "'\"":
        assert printed_list(f"[{', '.join(quote + element + quote for element in elements)}]") == elements
    assert printed_list(f"[{' '.join(map(repr, elements))}]") == elements


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"['\times 3']", r"\times 3"),
        (r"['\frac{2}{5}', 7, '\beta']", r"\frac{2}{5}, 7, \beta"),
        (r"['\binom{4}{2}\n']", r"\binom{4}{2}"),
        (r"['caf\u00e9']", "café"),
        (r"['\begin{cases}x\\y\end{cases}']", r"\begin{cases}x\\y\end{cases}"),
        ("['a]b']", "a]b"),
        (r"('\nu',)", r"\nu"),
        (r"{'\alpha'}", r"\alpha"),
        (r"[['\theta', 'x']]", r"\theta, x"),
        (r"[r'\rho']", r"\rho"),
        (r"array(['\tau', '2'], dtype=object)", r"\tau, 2"),
        ("(f'(x), g'(x))", "(f'(x), g'(x))"),
        ("[2, 3)", "[2, 3)"),
    ],
)
def test_golds(gold: str, answer: str) -> None:
    assert verifiable_answer(gold, "answer").strip() == answer


@pytest.mark.parametrize("gold", [json.loads(r'"\frac{2}{5}"'), json.loads(r'"\theta"'), json.loads(r'"\beta"')])
def test_golds_whose_backslash_json_took(gold: str) -> None:
    with pytest.raises(ValueError, match="control character"):
        verifiable_answer(gold, "answer")


def write(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "set.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("column", ["messages", "prompt"])
@pytest.mark.parametrize("as_text", [json.dumps, repr])
def test_chats_as_text_are_chats(column: str, as_text: Any, tmp_path: Path) -> None:
    [problem] = load(write(tmp_path, {column: as_text(CHAT[:1]), "answer": "13"}), DataSection()).problems
    assert problem.messages == ({"role": "user", "content": "7+6?"},)
    text = as_text({"ground_truth": r"\frac{1}{13}"})
    [problem] = load(write(tmp_path, {column: as_text(CHAT[:1]), "reward_model": text}), DataSection()).problems
    assert problem.answer == r"\frac{1}{13}"


@pytest.mark.parametrize(
    "text",
    [json.dumps(json.dumps(CHAT[:1])), json.dumps({"messages": CHAT[:1]}), json.dumps(CHAT[0]), repr(CHAT[0])],
)
def test_other_forms_of_chats(text: str, tmp_path: Path) -> None:
    parts = [{"role": "user", "content": json.dumps([{"type": "text", "text": "7+6?"}])}]
    for row in ({"messages": text}, {"prompt": text}, {"messages": parts}):
        [problem] = load(write(tmp_path, row | {"answer": "13"}), DataSection()).problems
        assert problem.messages == ({"role": "user", "content": "7+6?"},)
    for question in ('{"a": 1} has how many keys?', '{"role": of a verb} is?', '[{"a": 1}]'):
        [problem] = load(write(tmp_path, {"prompt": question, "answer": "1"}), DataSection()).problems
        assert (problem.question, problem.messages) == (question, ())
    with pytest.raises(UserError, match="field 'messages' is empty"):
        load(write(tmp_path, {"messages": "[]", "answer": "13"}), DataSection())


def test_a_cut_chat_is_named(tmp_path: Path) -> None:
    source = write(tmp_path, {"messages": json.dumps(CHAT)[:-9], "answer": "13"})
    with pytest.raises(UserError, match="column 'messages' holds text that begins like a list"):
        load(source, DataSection())


def test_lists_of_answers_are_named(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "7+6?", "answer": ["13", "thirteen"]},
        {"question": "1?", "answer": "['1', '2']"},
    ]
    assert "2 rows have a list of several answers" in load(write(tmp_path, *rows), DataSection()).notes[-1]
    rows = [{"question": "7+6?", "answer": ["13"]}, {"question": "1?", "answer": "[1, 2]"}]
    assert not any("several answers" in note for note in load(write(tmp_path, *rows), DataSection()).notes)


def test_integers_of_any_length(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(f'{{"question": "?", "answer": {"3" * 4321}}}\n')
    with pytest.raises(UserError, match="more than 4,300 digits; write it as text"):
        load(str(path), DataSection())


@pytest.mark.parametrize(
    "response", ["13", "13<|im_end|>", "13<|im_end|>\n<|endoftext|>", "<|im_start|>assistant\n13<|im_end|>"]
)
def test_demonstrations_repeat_nothing(response: str, tmp_path: Path) -> None:
    tokenizer = build_arithmetic_tokenizer(CHAT_ML)
    section = DataSection()
    source = write(tmp_path, {"prompt": CHAT[:1], "response": response})
    [(_, ids)] = sequences(demonstrations(source, section), tokenizer, section, 100).pairs
    assert tokenizer.decode(ids) == "13<|im_end|>"


@pytest.mark.parametrize("tag", ["<think>", "[THINK]", "◁think▷", "<seed:think>"])
def test_a_thought_that_the_template_opens_is_opened_once(tag: str, tmp_path: Path) -> None:
    tokenizer = build_arithmetic_tokenizer(CHAT_ML.replace("assistant\n{% endif", f"assistant\n{tag}\n{{% endif"))
    section = DataSection()
    source = write(tmp_path, {"prompt": "7+6?", "response": f"{tag}\n6+7</think>13"})
    [(prompt, ids)] = sequences(demonstrations(source, section), tokenizer, section, 100).pairs
    assert tokenizer.decode([*prompt, *ids]).endswith(f"assistant\n{tag}\n6+7</think>13<|im_end|>")
