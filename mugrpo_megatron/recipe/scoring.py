"""The recipe's sections about scores: rewards and evaluation; each docstring is an entry of docs/recipe.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.objective import USER_FUNCTION, Section, changes

STYLES_WITHOUT_BOX = frozenset({"auto", "plain", "chat"})
"""Prompt styles (`data.prompt_style`) that leave the form of the answer to the question or the tokenizer."""


MEAN = "mean"
"""The name of all sets together in a metric; no set gets it."""


MATH = "math"
CODE = "code"
JUDGE = "judge"
"""The names of the built-in reward functions."""
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Of a reward function: it is part of a metric's name."""
OVERLONG = "overlong"
"""The name of the penalty that is taken from what the functions give."""
RESERVED_NAMES = (OVERLONG, "mean")
"""Names that no function has."""
MIN_WORKER_MB = 64
"""Python itself takes about 40 of a worker's address space."""


class FunctionSection(Section):
    """One of several reward functions; the reward is the sum of weight x reward over those that apply."""

    function: str = Field(min_length=1)
    """`math`, `code`, `judge` or a user's `module:function`."""
    weight: float = 1.0
    """Factor of its reward; 0 calls it only for the metrics."""
    sources: tuple[str, ...] = ()
    """Values of `data_source` (else names of data sets) whose responses it scores; empty scores all."""
    timeout_s: float | None = Field(None, gt=0.0, le=86400.0)
    """Unset takes `reward.timeout_s`."""
    worker_memory_mb: int | None = Field(None, ge=MIN_WORKER_MB)
    """Unset takes `reward.worker_memory_mb`."""
    model: str | None = None
    """Of a `judge`: the `[auxiliary.NAME]` that answers (docs/auxiliary-models.md)."""
    prompt: Path | None = None
    """Of a `judge`: a Jinja file; what it renders of `prompt`, `response`, `gold` and `row` is the judge's question."""
    parse: str | None = None
    """Of a `judge`: your `module:function` from the judge's answer to a number, or None where it finds none."""
    max_tokens: PositiveInt = 512
    """Of a `judge`: a longer answer is cut."""
    temperature: NonNegativeFloat = 0.0
    """Of a `judge`; 0 is greedy."""

    @model_validator(mode="after")
    def _check_judge(self) -> Self:
        if self.function != JUDGE:
            for name in ("model", "prompt", "parse", "max_tokens", "temperature"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f'{name} goes with function = "judge"; leave it out')
            return self
        if missing := [name for name in ("model", "prompt", "parse") if getattr(self, name) is None]:
            raise ValueError(f"a judge needs {missing[0]}")
        if self.parse is not None and not USER_FUNCTION.fullmatch(self.parse):
            raise ValueError("parse: name your own function as module:function")
        if self.sources:
            raise ValueError("sources: a judge scores every response; leave it out")
        return self


class CodeSection(Section):
    """How programs are judged where a reward function is `code`."""

    sandbox: Literal["namespaces", "limits"] = "namespaces"
    """What a program runs in: `namespaces`, or `limits` if the kernel refuses namespaces."""
    reward: Literal["all", "share"] = "all"
    """`all` gives 1 to a program that passes every test, else 0; `share` gives the share of tests passed."""
    test_s: float = Field(4.0, gt=0.0, le=3600.0)
    """CPU seconds of a test, rounded up; its wall-clock limit is twice that plus one second. `reward.timeout_s` is for
    all tests."""
    tests: NonNegativeInt = 0
    """Maximum number of a row's tests that run, evenly spaced; 0 takes all."""


class RewardSection(Section):
    """How a response becomes a number."""

    function: str = MATH
    """`math` (math-verify), `code` (runs the response's program against the row's tests) or a user's `module:function`,
    whose parameter names select its arguments (docs/rewards.md)."""
    functions: dict[str, FunctionSection] = Field(default_factory=dict)
    """Several functions instead of `function`, by name: `[reward.functions.NAME]`."""
    workers: int = Field(0, ge=0, json_schema_extra=changes("work"))
    """Processes of each function on each generating rank, more for one that waits for a service; 0 divides one per two
    cores among the node's engines, at least 1."""
    extract: Literal["auto", "boxed", "final", "last_number"] = "auto"
    """Which part of a response is its answer; `auto`: `boxed` if `data.prompt_style` asks for a box, else `final`."""
    policy: Literal["strict", "lenient"] = "strict"
    """`strict` refuses hedged answers and unfinished arithmetic; `lenient` accepts what math-verify accepts."""
    max_failure_share: float = Field(0.01, ge=0.0, le=1.0, json_schema_extra=changes("work"))
    """A user's function that fails on a larger share of responses (of at least 16) ends the run; 1 lets it fail,
    as a remote service may."""
    timeout_s: float = Field(8.0, gt=0.0, le=86400.0, json_schema_extra=changes("work"))
    """Wall-clock seconds after which a worker is killed; the worker itself stops a comparison after 1/8 of this in CPU
    time."""
    worker_memory_mb: int = Field(1024, ge=MIN_WORKER_MB, json_schema_extra=changes("work"))
    """Address space of a verifier process, so that one answer cannot take the machine's memory; a function that loads
    a library as large as torch needs several thousand. A program of `code` has half of it."""
    overlong_buffer_tokens: NonNegativeInt = 0
    """The last this many tokens before `rollout.max_response_tokens` reduce the reward, linearly up to 1 (DAPO); 0
    turns it off."""

    code: CodeSection = CodeSection()

    @model_validator(mode="after")
    def _check_functions(self) -> Self:
        if self.functions and self.function != MATH:
            raise ValueError("function and functions are both set; make the one function an entry of functions")
        for name in self.functions:
            if not FUNCTION_NAME.fullmatch(name) or name in RESERVED_NAMES:
                raise ValueError(
                    f"functions.{name}: name it with letters, digits, - and _, and not {', '.join(RESERVED_NAMES)}"
                )
        if self.functions and not self.table:
            raise ValueError(
                "functions: a judge answers once a stage is sampled, and evaluations need a function that scores at "
                "once; add one, with weight 0 if it is not to count"
            )
        if self.functions and not any(one.weight for one in self.functions.values()):
            raise ValueError("functions: every weight is 0, so every reward would be")
        return self

    @property
    def table(self) -> dict[str, FunctionSection]:
        """The functions that score a response at once, by name; one that is alone is called as its function is."""
        if self.functions:
            return {name: one for name, one in self.functions.items() if one.function != JUDGE}
        name = re.sub(r"[^A-Za-z0-9_-]", "_", self.function.rpartition(":")[2]) or "reward"
        return {f"{name}_" if name in RESERVED_NAMES else name: FunctionSection(function=self.function)}

    @property
    def judges(self) -> Mapping[str, FunctionSection]:
        """The functions that score a stage once it is sampled, by name."""
        return {name: one for name, one in self.functions.items() if one.function == JUDGE}

    @property
    def is_right_or_wrong(self) -> bool:
        """Whether the reward is 1 or 0: `math`'s verdict, or `code`'s unless it pays for shares."""
        all_tests = not self.functions and self.function == CODE and self.code.reward == "all"
        return self.finds_answers or all_tests

    @property
    def finds_answers(self) -> bool:
        """Whether every response is scored by the answer that `math` finds in it, or does not find."""
        return not self.functions and self.function == MATH

    def functions_of(self, source: str) -> tuple[str, ...]:
        """The names of the functions that score responses to problems of a `data_source`, in the recipe's order."""
        return tuple(name for name, one in self.table.items() if not one.sources or source in one.sources)

    def accepts_any_gold(self, source: str) -> bool:
        """Whether golds of a `data_source` may be any JSON value: `math` does not read them."""
        table = self.table
        return all(table[name].function != MATH for name in self.functions_of(source))

    def check_sources(self, sources: Iterable[str]) -> None:
        """Raise UserError when no function scores responses to problems of one of these `data_source`s."""
        if missing := [source for source in dict.fromkeys(sources) if not self.functions_of(source)]:
            named = dict.fromkeys(source for one in self.table.values() for source in one.sources)
            raise UserError(
                f"no reward function scores the data source {', '.join(map(repr, missing))}: add it to the sources of "
                f"one of reward.functions (they name {', '.join(map(repr, named))}), or leave one's sources empty"
            )


class SetSection(Section):
    """How one held-out set is sampled; unset keys take the values of `[eval]`."""

    samples: PositiveInt | None = None
    """Responses per problem (mean@k)."""
    temperature: NonNegativeFloat | None = None
    """0 is greedy."""
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    """Nucleus sampling."""
    max_tokens: PositiveInt | None = None
    """A longer response is cut."""


class EvalSection(Section):
    """Held-out accuracy before, during and after training, set by set."""

    model_config = ConfigDict(json_schema_extra=changes("work"))

    every_stages: NonNegativeInt = 1
    """Evaluate after every n-th stage; 0 evaluates only before the first stage and after the last."""
    every_updates: NonNegativeInt = 0
    """Also evaluate inside a stage, after every n-th of its updates; 0 evaluates only at the ends of stages."""
    samples: PositiveInt = 1
    """Responses per problem (mean@k)."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling."""
    max_tokens: PositiveInt | None = None
    """A longer response is cut; unset takes `rollout.max_response_tokens`."""
    sets: dict[str, SetSection] = Field(default_factory=dict)
    """Held-out sets with other settings, by name: `[eval.sets.aime24]`, with any of the four keys above."""

    def of(self, name: str) -> EvalSection:
        """The settings of the held-out set `name`: its own, else the general ones."""
        own = self.sets.get(name, SetSection())
        return self.model_copy(update={**own.model_dump(exclude_none=True), "sets": {}})
