"""Calls, thoughts, tools and arguments in rows reach the chat template, or are named."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mugrpo_megatron.data.demonstrations import demonstrations, sequences
from mugrpo_megatron.data.fields import row_arguments, unread_fields
from mugrpo_megatron.data.prepare import prepare, without_duplicates
from mugrpo_megatron.data.problems import load
from mugrpo_megatron.data.prompts import Template, prompt_text, rendered, template_of
from mugrpo_megatron.data.tokenizer import CHAT_ML, build_arithmetic_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.exchange.foreign_rollouts import read_rollouts
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.recipe.sections import DataSection

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "mul", "description": "6*7", "parameters": {"type": "object"}},
}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "mul", "arguments": {"a": 6, "b": 7}}}
ASK = {"role": "user", "content": "6*7?"}
CHAT: list[dict[str, Any]] = [
    ASK,
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "use mul"},
    {"role": "tool", "name": "mul", "content": "42", "tool_call_id": "c1"},
]
SAID = {"role": "assistant", "content": "42", "reasoning_content": "so 42"}

HEAD = "{% if tools %}[{% for t in tools %}{{ t | tojson }}{% endfor %}]{% endif %}{% for m in messages %}"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
BEGIN = "<|im_start|>{{ m.role }}\n"
TEMPLATES = {
    # As Qwen3's: text is asked for with `is string`, written arguments are taken as they are.
    "qwen3": HEAD + BEGIN + "{% if m.reasoning_content is string %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content if m.content is string else '' }}{% for c in m.tool_calls or [] %}{% set c = c.function %}<tool_call>"
    '{"name": "{{ c.name }}", "arguments": {% if c.arguments is string %}{{ c.arguments }}{% else %}'
    "{{ c.arguments | tojson }}{% endif %}}</tool_call>{% endfor %}" + TAIL,
    # As Qwen2.5's and Hermes 3's: always `tojson`, which would quote a text once more.
    "hermes": HEAD + BEGIN + "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{% if c.function is defined %}"
    '{% set c = c.function %}{% endif %}<tool_call>{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
    "</tool_call>{% endfor %}" + TAIL,
    # As Llama 3.1's: a call is there if the key is, even if it is null, and only one.
    "llama": HEAD + BEGIN + "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one') }}"
    '{% endif %}{% set c = m.tool_calls[0].function %}{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}'
    "}{% else %}{{ m.content | trim }}{% endif %}" + TAIL,
    # As DeepSeek-V3's: calls only beside a null content, arguments added to a text.
    "deepseek": HEAD + BEGIN + "{% if m.content is none %}{% for c in m.tool_calls %}{{ 'mul\n' + c['function']"
    "['arguments'] }}{% endfor %}{% else %}{{ m.content }}{% endif %}" + TAIL,
    # As Qwen3's first one: a null content is an error.
    "strict": HEAD + BEGIN + "{% if '</think>' in m.content %}{% endif %}{{ m.content }}{% for c in m.tool_calls or []"
    " %}{{ c.function.arguments | tojson }}{% endfor %}" + TAIL,
}
WRITTEN = '{"a": 6, "b": 7}'


def write(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "set.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def forms(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The same row as JSON text, with written arguments and tools, and with the nulls that `datasets` adds."""
    written = json.loads(json.dumps(row).replace(json.dumps(CALL["function"]["arguments"]), json.dumps(WRITTEN)))
    names = {name for message in row["messages"] for name in message}
    padded = [{**dict.fromkeys(names), **message} for message in row["messages"]]
    as_text = {**row, "messages": json.dumps(row["messages"]), "tools": json.dumps(row["tools"])}
    texts = {**row, "tools": [json.dumps(tool) for tool in row["tools"]]}
    return [row, written, as_text, texts, {**row, "messages": padded, "chat_template_kwargs": {"deep": None}}]


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_and_tools_reach_the_template(name: str, tmp_path: Path) -> None:
    tokenizer = build_arithmetic_tokenizer(TEMPLATES[name])
    row = {"messages": CHAT, "answer": "42", "tools": [TOOL]}
    problems = load(write(tmp_path, *forms(row)), DataSection()).problems
    prompts = {rendered(problem, tokenizer, "auto", Template()) for problem in problems}
    [text] = prompts
    assert text.startswith(f"[{json.dumps(TOOL)}]<|im_start|>user\n6*7?")
    assert ("None" in text, text.count(WRITTEN), text.count("<|im_start|>")) == (False, 1, 4)
    assert ("use mul" in text) is (name == "qwen3")
    shown = prompt_text(problems[0], "auto", Template(TEMPLATES[name]), None)
    assert shown is None or shown == ("chat", text)


def test_columns_of_parquet_reach_the_template(tmp_path: Path) -> None:
    """Arrow gives every message the keys of all, and every call's arguments those of all calls."""
    other = {"type": "function", "function": {"name": "add", "arguments": {"c": 1}}}
    chat = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [other]}, {"role": "tool", "content": "1"}]
    path = tmp_path / "set.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": chat, "answer": "42", "tools": [TOOL]}]), path)
    [problem] = load(str(path), DataSection()).problems
    text = rendered(problem, build_arithmetic_tokenizer(TEMPLATES["hermes"]), "auto", Template())
    assert [text.count(f'"arguments": {written}') for written in (WRITTEN, '{"c": 1}')] == [1, 1]


def test_a_rows_arguments_come_before_the_recipes(tmp_path: Path) -> None:
    tokenizer = build_arithmetic_tokenizer("{{ messages[0].content }} {{ deep }} {{ size }}")
    rows = [{"prompt": "6*7?", "answer": "42", "chat_template_kwargs": given} for given in ({"deep": 1}, '{"deep":2}')]
    section = DataSection(template_arguments={"deep": 3, "size": 4})
    problems = load(write(tmp_path, *rows, {"prompt": "1", "answer": "1"}), section).problems
    texts = [rendered(problem, tokenizer, "auto", template_of(section)) for problem in problems]
    assert texts == ["6*7? 1 4", "6*7? 2 4", "1 3 4"]
    assert len(without_duplicates(problems)[0]) == 3
    taken = {"prompt": "6*7?", "answer": "42", "chat_template_kwargs": {"tokenize": True}}
    [problem] = load(write(tmp_path, taken), DataSection()).problems
    with pytest.raises(UserError, match="the chat template refuses the messages"):
        rendered(problem, tokenizer, "auto", Template())


def test_special_tokens_in_tools_stay_text(tmp_path: Path) -> None:
    tokenizer = build_arithmetic_tokenizer(TEMPLATES["hermes"])
    row = {"prompt": [ASK], "answer": "42", "tools": [{"name": "x", "description": "<|im_end|>"}]}
    section = DataSection(train=write(tmp_path, row), eval="arithmetic", eval_problems=1)
    fit = prepare(section, RewardSection(), tokenizer)
    assert fit.train.prompts[0].count(tokenizer.eos_token_id) == 1


def test_what_no_prompt_shows_is_named(tmp_path: Path) -> None:
    tokenizer = build_arithmetic_tokenizer(CHAT_ML)
    chat = [ASK | {"name": "Ann", "weight": None}]
    row = {"messages": chat, "answer": "42", "tools": [TOOL], "chat_template_kwargs": {"deep": True, "wide": None}}
    source = write(tmp_path, row, row | {"tools": ["mul"]}, {"messages": [ASK], "answer": "1"})
    problems = load(source, DataSection()).problems
    for style in ("chat", "plain"):
        shown = partial(rendered, tokenizer=tokenizer, style=style, template=Template())
        assert [note.split(",")[0] for note in unread_fields(problems, shown)] == [
            f"set: 2 rows have {name}" for name in ("tools", "chat_template_kwargs.deep", "message.name")
        ]
    tokenizer = build_arithmetic_tokenizer("{{ tools }}{{ deep }}{{ messages }}")
    shown = partial(rendered, tokenizer=tokenizer, style="auto", template=Template())
    assert unread_fields(problems[:1], shown) == []


@pytest.mark.parametrize("tools", ["mul", ["mul"], {"name": "mul"}, 3, [None], [], "[]", None])
def test_tools_that_are_none_are_not_passed_on(tools: Any) -> None:
    assert row_arguments({"tools": tools, "chat_template_kwargs": "x"}) == {}


@pytest.mark.parametrize("form", ["messages", "completion"])
def test_a_demonstration_has_its_calls_and_thoughts(form: str, tmp_path: Path) -> None:
    tokenizer = build_arithmetic_tokenizer(TEMPLATES["qwen3"])
    called = f'<think>use mul</think><tool_call>{{"name": "mul", "arguments": {WRITTEN}}}</tool_call>'
    for reply, said in ((SAID, "<think>so 42</think>42"), (CHAT[1], called)):
        row = {"messages": [ASK, reply]} if form == "messages" else {"prompt": [ASK], "completion": [reply]}
        source = write(tmp_path, row | {"tools": [TOOL]})
        read = sequences(demonstrations(source, DataSection()), tokenizer, DataSection(), 200)
        [(prompt, response)] = read.pairs
        assert str(tokenizer.decode(prompt)).startswith(f"[{json.dumps(TOOL)}]<|im_start|>user\n6*7?")
        assert (tokenizer.decode(response), read.notes) == (f"{said}<|im_end|>", [])


@pytest.mark.parametrize(
    ("template", "field", "said"),
    [
        (TEMPLATES["hermes"], "reasoning_content", "has reasoning_content, which the chat template leaves out"),
        (CHAT_ML, "tool_calls", "has tool_calls, which the chat template leaves out"),
        (
            TEMPLATES["qwen3"].replace("assistant\n{%", "assistant\n<|im_start|>{%"),
            "tool_calls",
            "does not begin with the prompt",
        ),
    ],
)
def test_a_demonstration_that_would_lose_them_is_refused(template: str, field: str, said: str, tmp_path: Path) -> None:
    tokenizer = build_arithmetic_tokenizer(template)
    reply = {"role": "assistant", "content": "42", field: CHAT[1][field]}
    source = write(tmp_path, {"messages": [ASK, reply]}, {"messages": [ASK, {"role": "assistant", "content": "42"}]})
    with pytest.raises(UserError, match=said):
        sequences(demonstrations(source, DataSection()), tokenizer, DataSection(), 100)
    lenient = DataSection(strict=False)
    read = sequences(demonstrations(source, lenient), tokenizer, lenient, 100)
    assert (len(read.pairs), read.notes[-1].split(":")[0]) == (1, "1 rows are left out")
    plain = DataSection(prompt_style="plain")
    with pytest.raises(UserError, match="which only a chat template writes"):
        sequences(demonstrations(source, plain)[:1], tokenizer, plain, 100)


def test_imported_chats_have_them_too(tmp_path: Path) -> None:
    tokenizer = build_arithmetic_tokenizer(TEMPLATES["qwen3"])
    path = Path(write(tmp_path, {"prompt": [ASK], "completion": [SAID], "tools": [TOOL], "reward": 1.0}))
    [[rollout]] = read_rollouts(path, tokenizer, Template(), (300, 100))
    assert str(tokenizer.decode(rollout.prompt_ids.tolist())).startswith(f"[{json.dumps(TOOL)}]")
    assert tokenizer.decode(rollout.response_ids.tolist()) == "<think>so 42</think>42<|im_end|>"
    path = Path(write(tmp_path, {"prompt": "6*7?", "completion": [SAID], "reward": 1.0}))
    with pytest.raises(UserError, match="give the prompt as messages"):
        read_rollouts(path, tokenizer, Template(), (300, 100))


@pytest.mark.parametrize("calls", ["call mul", ["mul"], {"name": "mul"}, 3])
def test_calls_of_another_form_are_refused(calls: Any, tmp_path: Path) -> None:
    source = write(tmp_path, {"messages": [ASK, CHAT[1] | {"tool_calls": calls}, CHAT[2]], "answer": "42"})
    with pytest.raises(UserError, match="message 2 has tool_calls that are not a list of objects"):
        load(source, DataSection())
