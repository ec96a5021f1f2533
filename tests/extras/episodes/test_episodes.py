"""Episodes against an engine without a model: the processes, the messages and the records are the real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.episodes.episodes import Episodes
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.samples import Problem, Prompt, Response
from tests.extras.episodes.fake import EOS, TOKENIZER, FakeEngine, Says
from tests.tiny import save_model

pytestmark = pytest.mark.process
HERE = "tests.extras.episodes.functions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def recipe_of(model: Path, function: str, **episodes: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"path": model, "dtype": "float32"},
            "rollout": {"function": function if ":" in function else f"{HERE}:{function}", "max_response_tokens": 64},
            "data": {"max_prompt_tokens": 64},
            "episodes": {"seconds": 20.0, "max_failure_share": 1.0, **episodes},
        }
    )


def prompts_of(questions: Sequence[str], row: dict[str, Any] | None = None) -> list[Prompt]:
    return [
        Prompt(
            place,
            Problem(f"test:{place}", text, "6", "test", row=row or {}),
            TOKENIZER.encode(text, add_special_tokens=False),
        )
        for place, text in enumerate(questions)
    ]


def played(
    recipe: Recipe, says: Says, questions: Sequence[str], n: int = 2, row: dict[str, Any] | None = None, **engine: Any
) -> dict[str, list[Response]]:
    """The responses to each question."""
    source = iter(prompts_of(questions, row))
    fake = FakeEngine(says, **engine)
    how = Sampling(1.0, 1.0, recipe.rollout.max_response_tokens, (EOS,), stop=tuple(recipe.rollout.stop))

    def take(held: int, slots: int) -> list[Prompt]:
        return list(islice(source, max(0, 2 * slots - held)))

    with closing(Episodes(recipe, fake)) as episodes:  # type: ignore[arg-type]
        return {prompt.problem.question: responses for prompt, responses in episodes.generate(take, n, how)}


def adds(context: str) -> str:
    """Asks for a sum, then says the tool's answer."""
    return context.split("=")[-1].strip() if "=" in context else f"{context}="


def test_sampled_tokens_have_mask_1_and_their_logprobs_in_place(model: Path) -> None:
    found = played(recipe_of(model, "calculator"), adds, ["1+2+3", "10+20"])
    for question, responses in found.items():
        answer = str(eval(question))
        for one in responses:
            assert one.episode
            assert TOKENIZER.decode(one.ids) == f"{question}={answer} {answer}<|im_end|>"
            mask = [True] * (len(question) + 1) + [False] * (len(answer) + 1) + [True] * (len(answer) + 1)
            assert one.episode.mask.tolist() == mask
            first, second = len(question) + 1, len(answer) + 1
            assert one.logprobs[one.episode.mask].tolist() == [*range(-1, -first - 1, -1), *range(-1, -second - 1, -1)]
            assert not one.logprobs[~one.episode.mask].any()
            assert one.episode.prompt_ids.tolist() == TOKENIZER.encode(question)
            assert one.episode.parts["turns"] == 2 and one.episode.parts["calls"] == 1
            assert one.episode.reward is None and one.ids[one.episode.last_turn :].tolist()[-1] == EOS
            assert one.finish_reason == "stop" and one.weight_version == 7


TOOLS = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['role'] == 'system' %}{{ m['content'] }}{% else %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}
<tool_call>
{"name": "{{ c['function']['name'] }}", "arguments": {{ c['function']['arguments'] | tojson }}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A chat template that writes calls as Qwen2.5's."""


@pytest.fixture(scope="module")
def chat_recipe(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(TOOLS, encoding="utf-8")

    def make(function: str, **episodes: Any) -> Recipe:
        recipe = recipe_of(model, function, **episodes)
        longer = recipe.rollout.model_copy(update={"max_response_tokens": 256})
        data = recipe.data.model_copy(update={"chat_template": path, "prompt_style": "chat"})
        return recipe.model_copy(update={"rollout": longer, "data": data})

    return make


def calls_the_tool(context: str) -> str:
    """A call whose JSON has other spaces than the template would give it, then the tool's answer."""
    if "<|im_start|>tool" in context:
        return context.split("<|im_start|>tool\n")[1].split("<|im_end|>")[0]
    terms = context.split("user\n")[1].split("<|im_end|>")[0]
    return f'Let me see.\n<tool_call>\n{{"name":  "add","arguments":{{"terms": "{terms}"}} }}\n</tool_call>'


def test_a_chat_with_tools_continues_what_was_sampled(chat_recipe: Callable[..., Recipe]) -> None:
    [one, _] = played(chat_recipe("chat"), calls_the_tool, ["1+2+3"])["1+2+3"]
    assert one.episode
    call = 'Let me see.\n<tool_call>\n{"name":  "add","arguments":{"terms": "1+2+3"} }\n</tool_call>'
    given = "\n<|im_start|>tool\n6<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(one.ids) == f"{call}<|im_end|>{given}6<|im_end|>"
    assert TOKENIZER.decode(one.ids[~one.episode.mask]) == given
    assert one.episode.reward == 1.0 and one.episode.parts["words"] == 1.0
    assert one.episode.parts["calls"] == 1 and one.episode.parts["failed_calls"] == 0


def test_a_broken_prefix_ends_the_episode_with_the_first_token_that_differs(
    model: Path, chat_recipe: Callable[..., Recipe]
) -> None:
    [one] = played(recipe_of(model, "tokenizes_again", retries=0), lambda context: "abcde", ["1"], n=1)["1"]
    assert one.episode and one.episode.failed
    assert one.episode.why == (
        "the episode failed: turn 2 does not continue turn 1: its token 4 is '&' (id 5) where 'd' (id 67) was sampled "
        "before; pass on the ids, or the messages, as they were returned"
    )
    [one] = played(chat_recipe("edits_messages", retries=0), lambda context: "abc", ["1"], n=1)["1"]
    assert one.episode and one.episode.failed
    assert "is 'e' (id 68) where 'a' (id 64) was sampled before" in one.episode.why


def test_limits_end_an_episode_as_cut(model: Path) -> None:
    [one] = played(recipe_of(model, "never_ends", turns=3), lambda context: "abcdef", ["1"], n=1)["1"]
    assert one.episode and one.episode.parts["turns"] == 3 and one.finish_reason == "length"
    assert TOKENIZER.decode(one.ids) == "ab(ab(ab"
    [one] = played(recipe_of(model, "never_ends", turns=999), lambda context: "abcdef", ["1"], n=1)["1"]
    assert one.episode and one.finish_reason == "length" and len(one.ids) in (63, 64)
    assert one.episode.mask[-1]
