"""Jobs of auxiliary models: what the engine is sent, and how its responses become rows of the stage's column.

A teacher has the policy's vocabulary, and gives log-probabilities of the stage's own sampled tokens.

A judge is a chat model that is asked about every response; a function reads a score from its answer. Its question is a
Jinja file, rendered with `prompt` (what the policy was asked, as text), `response`, `gold` and `row`. Questions and
answers are kept beside the score. If no score can be read from an answer, this is counted, and the response gets the
mean of its group's scores, which changes no comparison in the group (`phases.batches.neutral_where_missing`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mugrpo_megatron.call_guard import TookTooLong, template_clock
from mugrpo_megatron.data.quoted import encode_quoting, mark_special
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.auxiliary.auxiliary_columns import ColumnParts
from mugrpo_megatron.extras.auxiliary.models import judge_recipe, question_room, teacher_recipe
from mugrpo_megatron.extras.auxiliary.score_reader import Reader, score_reader
from mugrpo_megatron.files.hf_config import read_model_config
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.functions import describe_exception
from mugrpo_megatron.samples import Problem, Prompt, Response, Sample
from mugrpo_megatron.stages.columns import LogprobColumn, ScoreColumn, logprob_table
from mugrpo_megatron.stages.store import StageStore

NOTHING = Problem("", "", "")
"""Placeholder for the problem of a prompt whose tokens are only scored."""
TOO_LONG = "the question is longer than the judge's context"


class Teacher:
    """Has a teacher compute logprobs of a stage's sampled tokens; one of the two kinds of `Job`."""

    what = "teacher logprobs"
    workers = staticmethod(nullcontext)
    """A context manager that does nothing: `rows` needs no workers here, unlike `Judge.rows`."""

    def __init__(self, column: LogprobColumn, parts: ColumnParts) -> None:
        self.column, self.parts = column, parts
        self.sampling = Sampling(1.0, 1.0, 1, ())
        """Placeholder, since nothing is sampled; the temperature of the logits is in the engine's arguments."""

    @staticmethod
    def recipe(recipe: Recipe, name: str, directory: Path) -> Recipe:
        return teacher_recipe(recipe, name, directory)

    def read(self, store: StageStore, update: int) -> list[Sample]:
        return store.read_update(update)

    def prompts(self, samples: Sequence[Sample]) -> dict[int, Prompt]:
        """The engine's prompts, by the sample's index in the update; a sample without response tokens gets none."""
        return {
            index: Prompt(
                index,
                NOTHING,
                [*sample.prompt_ids.tolist(), *sample.response_ids.tolist()],
                len(sample.response_ids),
                sample.support_ids,
            )
            for index, sample in enumerate(samples)
            if len(sample.response_ids)
        }

    def rows(self, samples: Sequence[Sample], responses: Mapping[int, Response]) -> pa.Table:
        """The update's rows of the column. `responses` has the response to each of `prompts`, by the same index."""
        none = np.zeros(0, dtype=np.float32)
        return logprob_table([responses[i].logprobs if i in responses else none for i in range(len(samples))])

    def metrics(self, store: StageStore) -> dict[str, float]:
        """The metric `kl_teacher`: the mean of engine minus teacher logprobs over the stage's response tokens.

        Empty if the engine's logprobs are missing.
        """
        total, tokens = 0.0, 0
        for update in range(store.updates):
            engine = np.concatenate([sample.engine_logprobs for sample in store.read_update(update)])
            total += float(np.subtract(engine, np.concatenate(self.column.read(update)), dtype=np.float64).sum())
            tokens += len(engine)
        mean = total / max(1, tokens)
        return {} if np.isnan(mean) else {"kl_teacher": mean}


def read_template(key: str, path: Path) -> Template:
    """Read the template of a judge's question; raise UserError when the file is missing or is not Jinja."""
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
    try:
        text = path.read_text(encoding="utf-8")
        # Jinja evaluates constant expressions when it compiles a template, so compiling needs a time limit too.
        with template_clock():
            return environment.from_string(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key} = {path}: cannot be read ({error}); name a Jinja file") from None
    # SyntaxError: Jinja compiles a template to Python, whose compiler refuses nesting that Jinja accepts.
    except (TemplateError, SyntaxError, RecursionError, TookTooLong) as error:
        raise UserError(f"{key} = {path}: not a Jinja template ({error}); correct it") from None


class Judge:
    """Has a judge score a stage's responses; one of the two kinds of `Job`."""

    def __init__(self, recipe: Recipe, name: str, directory: Path, column: ScoreColumn, parts: ColumnParts) -> None:
        """`name` is the name of the reward function, `directory` the judge's checkpoint."""
        section, key = recipe.reward.judges[name], f"reward.functions.{name}"
        assert section.prompt
        assert section.parse
        self.what, self.column, self.parts = f"scores of {name}", column, parts
        self._name, self._section, self._key = name, section, key
        self._template = read_template(f"{key}.prompt", section.prompt)
        self._reward, self._read_scores = recipe.reward, cast(Reader, None)
        self._tokenizer, self._policy_tokenizer = load_tokenizer(directory), load_tokenizer(recipe.model.directory)
        quoted = recipe.longest_training_sequence
        self._room = question_room(quoted, section, read_model_config(directory))
        end = self._tokenizer.eos_token_id
        self.sampling = Sampling(section.temperature, 1.0, section.max_tokens, () if end is None else (end,))
        """Sampling parameters of the judge's answers; greedy at temperature 0."""

    @contextmanager
    def workers(self) -> Iterator[None]:
        """Start the workers that `rows` needs, and end them with the block."""
        with score_reader(self._reward, self._section, self._key) as self._read_scores:
            yield

    def recipe(self, recipe: Recipe, name: str, directory: Path) -> Recipe:
        return judge_recipe(recipe, name, directory, self._section, self._room)

    def read(self, store: StageStore, update: int) -> list[Sample]:
        return store.read_update(update, with_text=True)

    def prompts(self, samples: Sequence[Sample]) -> dict[int, Prompt]:
        """The engine's prompts, by the sample's index in the update; a sample whose question is too long gets none."""
        questions = {index: self._question(sample) for index, sample in enumerate(samples)}
        return {
            index: Prompt(index, Problem(samples[index].problem, "", ""), ids)
            for index, ids in questions.items()
            if len(ids) <= self._room
        }

    def _question(self, sample: Sample) -> list[int]:
        with self._errors_on(sample, f"{self._key}.prompt = {self._section.prompt}"):
            facts = {
                "prompt": self._policy_tokenizer.decode(sample.prompt_ids.tolist(), skip_special_tokens=True),
                "response": sample.text,
                "gold": sample.gold,
                "row": json.loads(sample.row) if sample.row else {},
            }
            text = self._template.render(mark_special(facts, self._tokenizer))
        if not self._tokenizer.chat_template:
            return encode_quoting(text, self._tokenizer, add_special_tokens=True)
        with self._errors_on(sample, "the judge's chat template"):
            chat = [{"role": "user", "content": text}]
            rendered = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return encode_quoting(str(rendered), self._tokenizer)

    @contextmanager
    def _errors_on(self, sample: Sample, template: str) -> Iterator[None]:
        """Turn any error of the block, which renders `template`, into UserError; limit the block's time and memory."""
        try:
            with template_clock():
                yield
        except (Exception, TookTooLong) as error:
            raise UserError(
                f"{template}: fails on {sample.problem} ({describe_exception(error)}); correct it"
            ) from None

    def rows(self, samples: Sequence[Sample], responses: Mapping[int, Response]) -> pa.Table:
        """The update's rows of the column. `responses` has the response to each of `prompts`, by the same index."""
        answers = {
            index: str(self._tokenizer.decode(response.ids.tolist(), skip_special_tokens=True))
            for index, response in responses.items()
        }
        verdicts = dict(zip(answers, self._read_scores(list(answers.values())), strict=True))
        rows = [
            {
                "score": None if index not in verdicts or verdicts[index].failed else verdicts[index].reward,
                "prompt": str(self._tokenizer.decode(self._question(sample))),
                "answer": answers.get(index, ""),
                "why": verdicts[index].why if index in verdicts else TOO_LONG,
            }
            for index, sample in enumerate(samples)
        ]
        return pa.Table.from_pylist(rows, schema=self.column.schema)

    def metrics(self, store: StageStore) -> dict[str, float]:
        """The metrics `unparsed/NAME`, the number of responses without a score, and `reward/NAME`, the mean score, left
        out if no response has one."""
        scores = np.concatenate([self.column.read(update) for update in range(store.updates)])
        unparsed = np.isnan(scores)
        mean = {} if unparsed.all() else {f"reward/{self._name}": float(scores[~unparsed].mean())}
        return {f"unparsed/{self._name}": float(unparsed.sum()), **mean}


Job = Teacher | Judge
"""One auxiliary model's work on one stage."""
