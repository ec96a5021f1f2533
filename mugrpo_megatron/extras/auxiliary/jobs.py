"""The jobs of auxiliary models: what one computes of a stage, as prompts for its engine and as rows of a column.

A teacher has the policy's vocabulary, and gives log-probabilities of the stage's own sampled tokens.

A judge is a chat model that is asked about every response; a function reads a score from its answer. Its question is a
Jinja file, rendered with `prompt` (what the policy was asked, as text), `response`, `gold` and `row`. Questions and
answers are kept beside the score. An answer without a score has none, which is counted: the reward then leaves the
judge out of the comparison inside the group (`phases.batches.neutral_where_missing`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.auxiliary.models import judge_recipe, question_room, teacher_recipe
from mugrpo_megatron.extras.auxiliary.parts import Parts
from mugrpo_megatron.files.hf_config import read_model_config
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.functions import load_function, told
from mugrpo_megatron.samples import Problem, Prompt, Response, Sample
from mugrpo_megatron.stages.columns import LogprobColumn, ScoreColumn, logprob_table
from mugrpo_megatron.stages.store import StageStore

NOTHING = Problem("", "", "")
"""Stands for the problem of a prompt that is not sampled from."""
TOO_LONG = "the question is longer than the judge's context"


class Teacher:
    """Scores a stage for its column; a `Job`."""

    what = "teacher logprobs"

    def __init__(self, column: LogprobColumn, parts: Parts) -> None:
        self.column, self.parts = column, parts
        self.sampling = Sampling(1.0, 1.0, 1, ())
        """Nothing is sampled; the temperature is in the engine's arguments."""

    @staticmethod
    def recipe(recipe: Recipe, name: str, directory: Path) -> Recipe:
        return teacher_recipe(recipe, name, directory)

    def read(self, store: StageStore, update: int) -> list[Sample]:
        return store.read_update(update)

    def prompts(self, samples: Sequence[Sample]) -> dict[int, Prompt]:
        """By a sample's place; one without tokens has nothing to score."""
        return {
            place: Prompt(
                place,
                NOTHING,
                [*one.prompt_ids.tolist(), *one.response_ids.tolist()],
                len(one.response_ids),
                one.support_ids,
            )
            for place, one in enumerate(samples)
            if len(one.response_ids)
        }

    def rows(self, samples: Sequence[Sample], responses: Mapping[int, Response]) -> pa.Table:
        """The update's rows of the column; `responses` by place, one for each prompt."""
        none = np.zeros(0, dtype=np.float32)
        return logprob_table([responses[i].logprobs if i in responses else none for i in range(len(samples))])

    def metrics(self, store: StageStore) -> dict[str, float]:
        """The mean of log behaviour - log teacher over the stage's tokens, as far as the behaviour is known."""
        total, tokens = 0.0, 0
        for update in range(store.updates):
            own = np.concatenate([one.engine_logprobs for one in store.read_update(update)])
            total += float(np.subtract(own, np.concatenate(self.column.read(update)), dtype=np.float64).sum())
            tokens += len(own)
        mean = total / max(1, tokens)
        return {} if np.isnan(mean) else {"kl_teacher": mean}


def read_template(key: str, path: Path) -> Template:
    """The template of a judge's question; UserError when it is missing or not Jinja."""
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False)
    try:
        return environment.from_string(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key} = {path}: cannot be read ({error}); name a Jinja file") from None
    except TemplateError as error:
        raise UserError(f"{key} = {path}: not a Jinja template ({error})") from None


class Judge:
    """Scores a stage for its column; a `Job`."""

    def __init__(self, recipe: Recipe, name: str, directory: Path, column: ScoreColumn, parts: Parts) -> None:
        """`name` is the reward function's, `directory` the auxiliary model's."""
        section, key = recipe.reward.judges[name], f"reward.functions.{name}"
        assert section.prompt
        assert section.parse
        self.what, self.column, self.parts = f"scores of {name}", column, parts
        self._name, self._section, self._key = name, section, key
        self._template = read_template(f"{key}.prompt", section.prompt)
        self._parse: Callable[[str], Any] = load_function(f"{key}.parse", section.parse)
        self._tokenizer, self._policys = load_tokenizer(directory), load_tokenizer(recipe.model.directory)
        self._room = question_room(recipe, section, read_model_config(directory))
        end = self._tokenizer.eos_token_id
        self.sampling = Sampling(section.temperature, 1.0, section.max_tokens, () if end is None else (end,))
        """Greedy at temperature 0."""

    def recipe(self, recipe: Recipe, name: str, directory: Path) -> Recipe:
        return judge_recipe(recipe, name, directory, self._section, self._room)

    def read(self, store: StageStore, update: int) -> list[Sample]:
        return store.read_update(update, whole=True)

    def prompts(self, samples: Sequence[Sample]) -> dict[int, Prompt]:
        """By a sample's place; a question that is too long is not asked."""
        questions = {place: self._question(one) for place, one in enumerate(samples)}
        return {
            place: Prompt(place, Problem(samples[place].problem, "", ""), ids)
            for place, ids in questions.items()
            if len(ids) <= self._room
        }

    def _question(self, sample: Sample) -> list[int]:
        facts = {
            "prompt": self._policys.decode(sample.prompt_ids.tolist(), skip_special_tokens=True),
            "response": sample.text,
            "gold": sample.gold,
            "row": json.loads(sample.row) if sample.row else {},
        }
        try:
            text = self._template.render(facts)
        except Exception as error:  # a template may fail in any way on a row
            raise UserError(
                f"{self._key}.prompt = {self._section.prompt}: fails on {sample.problem} ({told(error)}); correct it"
            ) from None
        if not self._tokenizer.chat_template:
            return list(self._tokenizer.encode(text))
        chat = [{"role": "user", "content": text}]
        ids: Any = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return list(ids)

    def rows(self, samples: Sequence[Sample], responses: Mapping[int, Response]) -> pa.Table:
        """The update's rows of the column; `responses` by place, one for each prompt."""
        rows = [self._row(one, responses.get(place)) for place, one in enumerate(samples)]
        return pa.Table.from_pylist(rows, schema=self.column.schema)

    def _row(self, sample: Sample, response: Response | None) -> dict[str, float | str | None]:
        score: float | None = None
        answer, why = "", TOO_LONG
        if response is not None:
            answer = str(self._tokenizer.decode(response.ids.tolist(), skip_special_tokens=True))
            score, why = parsed(self._parse, answer)
        question = str(self._tokenizer.decode(self._question(sample)))
        return {"score": score, "prompt": question, "answer": answer, "why": why}

    def metrics(self, store: StageStore) -> dict[str, float]:
        """The mean score and the number of responses without one."""
        scores = np.concatenate([self.column.read(update) for update in range(store.updates)])
        unparsed = np.isnan(scores)
        mean = {} if unparsed.all() else {f"reward/{self._name}": float(scores[~unparsed].mean())}
        return {f"unparsed/{self._name}": float(unparsed.sum()), **mean}


def parsed(parse: Callable[[str], Any], answer: str) -> tuple[float | None, str]:
    """The score in a judge's answer, or None and why there is none; the user's function may fail in any way."""
    try:
        value = parse(answer)
        if value is None:
            return None, "no score in the answer"
        score = float(value)
    except Exception as error:
        return None, told(error, __file__)
    return (score, "") if math.isfinite(score) else (None, f"the score is {score}")


Job = Teacher | Judge
"""What one auxiliary model computes of one stage; prompts and responses are by the place of their sample in the
update."""
