"""Sections about scores: rewards and evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.objective import USER_FUNCTION, Section, changes

STYLES_WITHOUT_BOX = frozenset({"auto", "plain", "chat"})
"""Values of `data.prompt_style` that do not ask for a boxed answer."""


MEAN = "mean"
"""Name of the mean over all held-out sets in a metric; no set has it."""


MATH = "math"
CODE = "code"
JUDGE = "judge"
"""Names of the built-in reward functions."""
GYM = "reasoning_gym:"
"""Beginning of a source of problems that a task of the package reasoning-gym generates."""
GYM_REWARD = "reasoning_gym:task_reward"
"""The reward function that is the task's own verifier; a source of these problems sets it."""
HAS_TESTS = "code:has_tests"
"""The reward function that is 1 for a row with usable tests (`rewards.gold_check`)."""
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Name of a reward function; metrics are named after it."""
OVERLONG = "overlong"
"""Name of the length penalty, which is subtracted from the functions' reward."""
RESERVED_NAMES = (OVERLONG, MEAN)
"""Names that no reward function may have."""
MIN_WORKER_MB = 64
"""Least address space of a worker; Python itself takes about 40 MB."""


class FunctionSection(Section):
    """One of several reward functions; a response's reward is the sum of weight x reward over those that apply."""

    function: str = Field(min_length=1)
    """`math`, `code`, `judge` or a user's `module:function`."""
    weight: float = 1.0
    """Weight of its reward; 0 only logs it."""
    sources: tuple[str, ...] = ()
    """Values of a row's `data_source` (else names of data sets) to score; empty scores all."""
    timeout_s: float | None = Field(None, gt=0.0, le=86400.0)
    """Time limit of a call; unset takes `reward.timeout_s`."""
    worker_memory_mb: int | None = Field(None, ge=MIN_WORKER_MB)
    """Address space of its workers; unset takes `reward.worker_memory_mb`."""
    model: str | None = None
    """`judge` only: the `[auxiliary.NAME]` that answers (docs/auxiliary-models.md)."""
    prompt: Path | None = None
    """`judge` only: Jinja file of the question, with `prompt`, `response`, `gold` and `row`."""
    parse: str | None = None
    """`judge` only: your `module:function` from an answer to a number, or None if it has none."""
    max_tokens: PositiveInt = 512
    """`judge` only: length at which an answer is truncated."""
    temperature: NonNegativeFloat = 0.0
    """`judge` only: sampling temperature; 0 is greedy."""

    @model_validator(mode="after")
    def _check_judge(self) -> Self:
        if self.function != JUDGE:
            for name in ("model", "prompt", "parse", "max_tokens", "temperature"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f'{name} goes with function = "judge"; leave it out')
            return self
        if missing := [name for name in ("model", "prompt", "parse") if getattr(self, name) is None]:
            raise ValueError(f'a judge needs {missing[0]}: set it beside function = "judge"')
        if self.parse is not None and not USER_FUNCTION.fullmatch(self.parse):
            raise ValueError("parse: name your own function as module:function")
        if self.sources:
            raise ValueError("sources: a judge scores every response; leave it out")
        return self


class CodeSection(Section):
    """Tests and sandbox of the reward function `code`."""

    sandbox: Literal["namespaces", "limits"] = "namespaces"
    """Sandbox of a program: `namespaces`, or `limits` if the kernel refuses namespaces."""
    reward: Literal["all", "share"] = "all"
    """`all` rewards a program with 1 if it passes every test, else 0; `share` with the fraction of tests passed."""
    test_s: float = Field(4.0, gt=0.0, le=3600.0)
    """CPU seconds of a test, rounded up. A program that sleeps is ended after twice that plus one second by the clock.
    `reward.timeout_s` limits the CPU seconds of all tests together."""
    tests: NonNegativeInt = 0
    """Number of a row's tests to run, evenly spaced; 0 runs all."""


class RewardSection(Section):
    """The functions that give each response its reward, and their limits."""

    function: str = MATH
    """`math` (math-verify), `code` (runs the response's program on the row's tests), or your own `module:function`,
    whose parameter names select its arguments (docs/rewards.md)."""
    functions: dict[str, FunctionSection] = Field(default_factory=dict)
    """Several weighted functions instead of `function`, by name: `[reward.functions.NAME]`."""
    workers: int = Field(0, ge=0, json_schema_extra=changes("work"))
    """Worker processes of each function on each generating rank; 0 divides one per two cores among the node's engines.
    A function that waits for a service needs more."""
    extract: Literal["auto", "boxed", "final", "last_number"] = "auto"
    """Extraction of the answer from a response; `auto`: `boxed` if `data.prompt_style` asks for a box, else `final`."""
    policy: Literal["strict", "lenient"] = "strict"
    """`strict` refuses hedged answers and unfinished arithmetic; `lenient` also accepts what math-verify accepts."""
    max_failure_share: float = Field(0.01, ge=0.0, le=1.0, json_schema_extra=changes("work"))
    """Fraction of responses (of at least 16) above which a user's failing function ends the run; 1 never does, for
    remote services."""
    timeout_s: float = Field(8.0, gt=0.0, le=86400.0, json_schema_extra=changes("work"))
    """Seconds by the clock after which a worker that waits is killed; one that computes is killed after as many CPU
    seconds more. `math` itself gives up after 1/8 of this in CPU time."""
    worker_memory_mb: int = Field(1024, ge=MIN_WORKER_MB, json_schema_extra=changes("work"))
    """Address space of a worker process, against answers that exhaust memory; a function that loads torch needs several
    thousand. A program of `code` gets half."""
    overlong_buffer_tokens: NonNegativeInt = 0
    """Soft overlong penalty (DAPO): tokens before `rollout.max_response_tokens` over which it grows linearly to 1; 0
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
                "functions: judges score only whole stages, and evaluations need a function as well; add one, with "
                "weight 0 if it shall not count"
            )
        if self.functions and not any(function.weight for function in self.functions.values()):
            raise ValueError("functions: every weight is 0, so every reward would be 0; give one a weight")
        return self

    @property
    def table(self) -> dict[str, FunctionSection]:
        """Name -> function, of those that score a response at once; a single function's name is its own."""
        if self.functions:
            return {name: section for name, section in self.functions.items() if section.function != JUDGE}
        name = re.sub(r"[^A-Za-z0-9_-]", "_", self.function.rpartition(":")[2]) or "reward"
        return {f"{name}_" if name in RESERVED_NAMES else name: FunctionSection(function=self.function)}

    @property
    def judges(self) -> Mapping[str, FunctionSection]:
        """Name -> judge; judges score a stage once it is sampled."""
        return {name: section for name, section in self.functions.items() if section.function == JUDGE}

    def of_function(self, entry: FunctionSection, function: str | None) -> RewardSection:
        """Returns the section of one `function`, with the limits of its `entry`."""
        limits = {name: getattr(entry, name) or getattr(self, name) for name in ("timeout_s", "worker_memory_mb")}
        return self.model_copy(update={"function": function, "functions": {}, **limits})

    @property
    def is_right_or_wrong(self) -> bool:
        """Whether every reward is 1 or 0."""
        all_tests = not self.functions and self.function == CODE and self.code.reward == "all"
        return self.finds_answers or all_tests

    @property
    def finds_answers(self) -> bool:
        """Whether `math` alone scores every response, by an answer that it extracts."""
        return not self.functions and self.function == MATH

    def functions_of(self, source: str) -> tuple[str, ...]:
        """Returns the names of the functions that score problems of a `data_source`, in the recipe's order."""
        return tuple(name for name, section in self.table.items() if not section.sources or source in section.sources)

    def accepts_any_gold(self, source: str) -> bool:
        """Whether golds of a `data_source` may be any JSON value, as `math` does not read them."""
        table = self.table
        return all(table[name].function != MATH for name in self.functions_of(source))

    def check_sources(self, sources: Iterable[str]) -> None:
        """Raise UserError when no function scores problems of one of these `data_source`s."""
        if missing := [source for source in dict.fromkeys(sources) if not self.functions_of(source)]:
            known = dict.fromkeys(source for section in self.table.values() for source in section.sources)
            raise UserError(
                f"no reward function scores the data source {', '.join(map(repr, missing))}: add it to the sources of "
                f"one of reward.functions (they name {', '.join(map(repr, known))}), or leave one's sources empty"
            )


class SetSection(Section):
    """Sampling of one held-out set; unset keys take the values of `[eval]`."""

    samples: PositiveInt | None = None
    """Responses per problem (mean@k)."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; 0 is greedy."""
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    """Nucleus sampling."""
    max_tokens: PositiveInt | None = None
    """Length at which a response is truncated."""


class EvalSection(Section):
    """Held-out accuracy before, during and after training, set by set."""

    model_config = ConfigDict(json_schema_extra=changes("work"))

    every_stages: NonNegativeInt = 1
    """Stages between evaluations; 0 evaluates only before the first stage and after the last."""
    every_updates: NonNegativeInt = 0
    """Updates between evaluations inside a stage; 0 evaluates only at stage ends."""
    samples: PositiveInt = 1
    """Responses per problem (mean@k)."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling."""
    max_tokens: PositiveInt | None = None
    """Length at which a response is truncated; unset takes `rollout.max_response_tokens`."""
    sets: dict[str, SetSection] = Field(default_factory=dict)
    """Sets with other values of the four keys above, by name: `[eval.sets.aime24]`."""

    def check_samples(self, names: Iterable[str]) -> None:
        """Raise UserError for several samples of a problem of one of the sets `names` at temperature 0."""
        for name in names:
            section = self.of(name)
            if section.samples > 1 and section.temperature == 0:
                key = f"eval.sets.{name}" if name in self.sets else "eval"
                raise UserError(
                    f"{name}: {key}.samples = {section.samples} at temperature 0 is one greedy answer "
                    f"{section.samples} times: set {key}.temperature, such as 1.0, or one sample"
                )

    def of(self, name: str) -> EvalSection:
        """Returns the settings of the held-out set `name`."""
        overrides = self.sets.get(name, SetSection())
        return self.model_copy(update={**overrides.model_dump(exclude_none=True), "sets": {}})
