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
            place, Problem(f"test:{place}", text, "6", "test", row=row or {}), TOKENIZER.encode(text, add_special_tokens=False)
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
            sampled = [*f"{question}=", None, *answer, EOS]
            mask = [True] * (len(question) + 1) + [False] * (len(answer) + 1) + [True] * (len(answer) + 1)
            assert one.episode.mask.tolist() == mask
            first, second = len(question) + 1, len(answer) + 1
            assert one.logprobs[one.episode.mask].tolist() == [*range(-1, -first - 1, -1), *range(-1, -second - 1, -1)]
            assert not one.logprobs[~one.episode.mask].any()
            assert len(sampled) == mask.count(True) + 1
            assert one.episode.prompt_ids.tolist() == TOKENIZER.encode(question)
            assert one.episode.parts["turns"] == 2 and one.episode.parts["calls"] == 1
            assert one.episode.reward is None and one.ids[one.episode.last_turn :].tolist()[-1] == EOS
            assert one.finish_reason == "stop" and one.weight_version == 7
