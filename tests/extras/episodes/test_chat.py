"""What one request costs the loop of the engine's leader: a chat is rendered once, and tokenized only if it fits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.data.prompts import Template
from mugrpo_megatron.extras.episodes.chat import Chat, TooLong
from mugrpo_megatron.extras.episodes.trajectory import Trajectory, continued
from tests.extras.episodes.fake import TOKENIZER


@given(st.lists(st.sampled_from(["1+2=", "    ", "é", "<|im_start|>", "語"]), min_size=1), st.integers(1, 40))
def test_a_chat_is_tokenized_to_its_end_if_it_fits(words: list[str], longest: int) -> None:
    """Otherwise its pieces are counted, and those behind the context's end are not looked at."""
    text = "".join(words) * 10
    ids = Chat(TOKENIZER, Template(""), longest=10**6).prompt(text)
    try:
        assert Chat(TOKENIZER, Template(""), longest=longest).prompt(text) == ids
    except TooLong:
        assert len(ids) > longest


def test_what_is_behind_the_context_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def encode(text: str, _: object) -> list[str]:
        read.append(len(text))
        return list(text)

    monkeypatch.setattr("mugrpo_megatron.extras.episodes.chat.encode_quoting", encode)
    for begin in ("", " " * 1000):
        read.clear()
        with pytest.raises(TooLong, match="more than 500 tokens"):
            Chat(TOKENIZER, Template(""), longest=500).prompt(begin + "語" * 100_000)
        assert sum(read) <= len(begin) + 2000


def test_an_argument_of_a_chat_template_is_a_word_of_it() -> None:
    chat = Chat(TOKENIZER, Template("{{ thinking_budget }}{{ messages }}"), longest=100)
    chat.check_arguments({"thinking_budget": 1})
    for name in ("thinking", "budget", "messages", "tokenize", "", "x" * 1_000_000, "thinking_budget }}{{ messages"):
        with pytest.raises(ValueError, match="reads no such argument") as refusal:
            chat.check_arguments({name: 1})
        assert len(str(refusal.value)) < 300


def test_a_chat_is_rendered_once_however_many_earlier_ones_it_resembles() -> None:
    """This template writes earlier turns differently, as those do that leave out earlier thoughts."""
    template = (
        "{% for one in messages %}{{ one.content }}{{ loop.length if one.role == 'assistant' }}<|im_end|>{% endfor %}"
    )
    chat, rendered = Chat(TOKENIZER, Template(template), longest=1000), list[int]()
    render, earlier, messages = chat._render, list[Trajectory](), list[Any]()

    def counted(messages: Any, *rest: Any, **named: Any) -> str:
        rendered.append(len(messages))
        return render(messages, *rest, **named)

    chat._render = counted  # type: ignore[method-assign]
    for turn in range(6):
        messages = [*messages, {"role": "user", "content": str(turn)}]
        earlier.append(Trajectory(1000))
        earlier[-1].prompt = chat.prompt(chat.rendered(messages, (), {}))
        earlier[-1].answered(messages, {"role": "assistant", "content": "a"})
        messages = earlier[-1].messages
    rendered.clear()
    messages = [*messages, {"role": "user", "content": "9"}]
    assert continued(earlier, messages, (), {}, {}, chat)[0] is None
    assert rendered.count(len(messages)) == 1
    assert sorted(rendered) == [2, 4, 6, 8, 10, 12, 13]
