"""The whole recipe, and its sections about the run, data, schedule and optimizer.

The docstring of a field is its entry in docs/recipe.md.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from mugrpo_megatron.recipe.objective import Change, ObjectiveSection, Section, changes
from mugrpo_megatron.recipe.policy import (
    AuxiliariesSection,
    EpisodesSection,
    LoraSection,
    ModelSection,
    OwnDirectory,
    RolloutSection,
    SftSection,
)
from mugrpo_megatron.recipe.removed import as_now
from mugrpo_megatron.recipe.scoring import GYM, GYM_REWARD, STYLES_WITHOUT_BOX, EvalSection, RewardSection
from mugrpo_megatron.recipe.systems import EngineSection, LearnerSection, ParallelSection

QUESTION = "{question}"
_LATEX_COMMAND = re.compile(r"\\[A-Za-z]+(?:\{[^{}]*\})+")
"""Matches a LaTeX command with its arguments, such as `\\boxed{answer}`, whose braces are not a field of the
template."""
_FIELD = re.compile(r"\{[A-Za-z_][\w.]*\}")


def question_template(text: str) -> str:
    """Check a template and return it; ValueError without `{question}`, for a field with another name, and for `{{`.

    Braces that contain no name, and braces of LaTeX commands, are text.
    """
    if QUESTION not in text:
        raise ValueError(f"has no {QUESTION}, where each question goes; add it")
    if "{{" in text:
        raise ValueError("braces are not doubled here: write {question} and \\boxed{}")
    if other := [field for field in _FIELD.findall(_LATEX_COMMAND.sub("", text)) if field != QUESTION]:
        raise ValueError(f"{other[0]} cannot be filled in: {QUESTION} is the only field; remove the other")
    return text


def fill_template(question: str, template: str | None) -> str:
    """Returns the template with the question in it; the question itself if `template` is None."""
    return question if template is None else template.replace(QUESTION, question)


class RunSection(Section):
    """Directory, seed and reproducibility of the run. A run uses CUDA if torch finds a device; `CUDA_VISIBLE_DEVICES=`
    hides all devices."""

    dir: OwnDirectory = Field(Path("runs/default"), json_schema_extra=changes("work"))
    """Run directory: resolved recipe, metrics, stages, checkpoints, final Hugging Face checkpoint and report."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of the data order, of sampling and of all other randomness."""
    deterministic: bool = False
    """Make two runs of one recipe on equal machines bitwise equal, generation included. This is slower, and for CUDA
    only. On a CPU updates on the same stage are bitwise equal without it, and generation never is."""
    collective_timeout_s: float = Field(1800.0, gt=0.0, le=30 * 86_400.0, json_schema_extra=changes("work"))
    """Seconds after which a collective fails. The error names the rank, the phase and the likely cause."""


class DataSection(Section):
    """Problems for training and evaluation, and their prompts."""

    paths_in_text = frozenset(("train", "eval"))

    train: str = "arithmetic"
    """Training problems: a bundled task, a JSON, Parquet or CSV file, a named data set, `owner/name` on the hub, or
    `reasoning_gym:TASK?key=value&...`; several with commas."""
    eval: str = Field("arithmetic", json_schema_extra=changes("branch"))
    """Held-out problems, sources as for `train`."""
    eval_problems: int = Field(500, gt=0, le=10_000_000)
    """Maximum number of problems of each held-out set. If a set has more, they are taken evenly spaced over it."""
    question_field: str = "problem"
    """Column of the question (text or messages), or a path inside a column. The default also finds other usual
    names."""
    answer_field: str = "answer"
    """Column of the right answer, or a path inside a column, such as `reward_model.ground_truth`."""
    prompt_style: str = "auto"
    """Format of prompts: `plain`, `chat` (the tokenizer's chat template), a named math style, or `auto`: `chat` if the
    tokenizer has a template, else `plain`."""
    question_template: str | None = None
    """Text around each question, in every prompt style. `{question}` stands where the question goes; other braces are
    text."""
    system_prompt: str | None = None
    """System message of chats that have none. It needs a chat template."""
    chat_template: Path | None = None
    """Jinja file with a chat template, instead of the tokenizer's, or for a base model that has none."""
    template_arguments: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking = false`."""
    max_prompt_tokens: PositiveInt = 512
    """Number of tokens above which a prompt is left out and counted."""
    strict: bool = True
    """End with an error at a malformed row or a gold that cannot be verified. With false, such rows are left out and
    counted."""
    pass_rate: tuple[float, float] = (0.0, 1.0)
    """Least and largest pass rate of a training problem, as its column `pass_rate` has it (`mugrpo rollouts --by
    problem --json` writes this column). [0, 1] takes every row. No shipped recipe's data have this column."""
    contamination: Literal["report", "drop", "off"] = "report"
    """What happens to training problems that contain half of the 8-grams of a held-out problem: they are only
    reported, left out (`drop`), or not looked for (`off`)."""

    @field_validator("system_prompt", "chat_template", "template_arguments")
    @classmethod
    def _check_style_takes_it(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("prompt_style") not in ("chat", "auto"):
            raise ValueError('needs prompt_style = "chat" or "auto"; other styles use no chat template')
        return value

    @field_validator("pass_rate")
    @classmethod
    def _check_pass_rate(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= value[0] <= value[1] <= 1:
            raise ValueError("name the least and the largest pass rate, from 0 to 1, in this order")
        return value

    @field_validator("question_template")
    @classmethod
    def _check_question(cls, value: str | None) -> str | None:
        return None if value is None else question_template(value)


MAX_STAGE_UPDATES = 99_999
"""Most stages of a run and most updates on a stage, since file names have five digits for their numbers."""


class ScheduleSection(Section):
    """S stages of µ updates. GRPO and mu-GRPO differ here and in `[objective]`."""

    stages: int = Field(4, gt=0, le=MAX_STAGE_UPDATES, json_schema_extra=changes("branch"))
    """S: number of stages. The responses of each are sampled once. More stages follow if some end early (`max_kl`)."""
    updates_per_stage: PositiveInt = 64
    """µ: number of updates for which a stage's responses are sampled. The paper has 4 for GRPO and 1024 for mu-GRPO."""
    growth: float = Field(1.0, ge=0.1, le=10.0)
    """How many times as many updates each stage has as the stage before, with S µ updates in all. Above 1, stages are
    short at first, while the policy moves fast."""
    epochs: int = Field(1, ge=1, le=1000, json_schema_extra=changes("method"))
    """Number of passes over each stage's responses, shuffled from the second on. A stage has µ x epochs optimizer
    updates."""
    max_kl: float = Field(0.0, ge=0.0, allow_inf_nan=False, json_schema_extra=changes("method"))
    """KL divergence in nats per response (the metric `kl_response`, smoothed) at which a stage ends early: the policy
    has then moved so far from its stage's start. 0 never ends one. The run still takes all its updates, on further
    stages."""

    @model_validator(mode="after")
    def _check_longest(self) -> Self:
        longest = self.epochs * max(self.length(0), self.length(self.stages - 1))
        if longest > MAX_STAGE_UPDATES:
            raise ValueError(
                f"a stage has {longest:,} updates, and at most {MAX_STAGE_UPDATES:,} can be numbered; lower "
                "updates_per_stage, epochs or growth"
            )
        return self

    def length(self, stage: int) -> int:
        """Returns the number of updates for which stage `stage` (from 0) samples responses: µ, or with `growth` its
        share of S µ.

        Lengths are integers, at least 1, and successive ones have the ratio `growth` up to rounding. Stages after the
        S-th, which follow if stages ended early, are as long as the S-th.
        """
        if self.growth == 1.0:
            return self.updates_per_stage
        longest = self.stages - 1 if self.growth > 1.0 else 0
        # Weights are relative to the longest stage, whose weight is 1, so that no power overflows.
        weights = [self.growth ** (k - longest) for k in range(self.stages)]
        spare = self.stages * self.updates_per_stage - self.stages  # the updates that remain once each stage has one
        fractions = [0.0, *itertools.accumulate(weight / sum(weights) for weight in weights)]
        index = min(stage, self.stages - 1)
        return 1 + round(spare * fractions[index + 1]) - round(spare * fractions[index])

    @property
    def ends_early(self) -> bool:
        """Whether a stage may end before its last update, by `max_kl`."""
        return self.max_kl > 0

    @property
    def updates_on_stage(self) -> int:
        """µ x epochs: the number of optimizer updates on a full stage; with `growth` the mean over stages."""
        return self.updates_per_stage * self.epochs

    @property
    def total_updates(self) -> int:
        """S µ x epochs: the number of optimizer updates of the whole run."""
        return self.stages * self.updates_on_stage


class OptimizerSection(Section):
    """AdamW over float32 master weights."""

    model_config = ConfigDict(json_schema_extra=changes("method"))

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate after the warm-up."""
    decay_over: Literal["run", "stage"] = "run"
    """What `decay` spans: the whole run, or each stage, so that the rate falls as the responses become stale. The
    warm-up is always at the run's start."""
    warmup_updates: NonNegativeInt = 0
    """Number of updates in which the learning rate rises linearly from 0 to `lr`."""
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Adam's decay of the first moment."""
    beta2: float = Field(0.95, ge=0.0, lt=1.0)
    """Adam's decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay. It is not applied to norms and biases."""
    clip_grad: PositiveFloat = 1.0
    """Global gradient norm that an update is clipped to."""

    @field_validator("clip_grad", mode="before")
    @classmethod
    def _check_clip(cls, value: Any) -> Any:
        if not isinstance(value, bool) and value == 0:
            raise ValueError("would clip every gradient to 0; to turn clipping off, set a large value such as 1e9")
        return value

    @field_validator("min_lr")
    @classmethod
    def _check_decay(cls, value: float, info: ValidationInfo) -> float:
        if value > info.data.get("lr", value):
            raise ValueError("is above lr, from which the rate decays to it; set it to lr or less")
        return value


class CheckpointSection(Section):
    """Saves of the learner's full state."""

    model_config = ConfigDict(json_schema_extra=changes("work"))

    every_stages: PositiveInt = 1
    """Number of stages between saves; the last stage is always saved. A resumed run repeats the updates since the last
    save, on the responses on disk."""
    every_updates: NonNegativeInt = 0
    """Updates between saves inside a stage; 0 saves only at stage ends."""
    asynchronous: bool = True
    """Copy the state to host memory and write it while training continues. With false, training waits for the disk and
    needs no copy. At a stage's end the copy includes all of `hf/`, in the memory of the first rank's host."""
    keep: PositiveInt = 2
    """Number of newest complete checkpoints to keep."""


class TrackSection(Section):
    """Places where a run writes its metrics besides metrics.jsonl, and updates that it profiles."""

    model_config = ConfigDict(json_schema_extra=changes("work"))

    tensorboard: bool = True
    """Write TensorBoard event files under the run directory."""
    wandb_project: str | None = None
    """Weights & Biases project. Its own environment variables set key, group and tags (WANDB_RUN_GROUP, WANDB_TAGS)."""
    profile_updates: list[NonNegativeInt] = Field(default_factory=list)
    """Numbers of the updates, from 0, that PyTorch's profiler records. Each rank writes a trace to `profile/`."""


class Recipe(Section):
    """All settings of one run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    lora: LoraSection = LoraSection()
    data: DataSection = DataSection()
    schedule: ScheduleSection = ScheduleSection()
    rollout: RolloutSection = RolloutSection()
    episodes: EpisodesSection = EpisodesSection()
    objective: ObjectiveSection = ObjectiveSection()
    optimizer: OptimizerSection = OptimizerSection()
    parallel: ParallelSection = ParallelSection()
    learner: LearnerSection = LearnerSection()
    engine: EngineSection = EngineSection()
    reward: RewardSection = RewardSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    track: TrackSection = TrackSection()
    auxiliary: AuxiliariesSection = AuxiliariesSection()
    sft: SftSection = SftSection()

    @classmethod
    def changes_of(cls, key: str) -> Change | None:
        """Returns when `section.key`, or a key inside it, may change after a run has begun; None if it never may."""
        name, _, rest = key.partition(".")
        field = cls.model_fields.get(name)
        section: Any = field.annotation if field else None
        return section.change_of(rest.partition(".")[0]) if section else None  # type: ignore[no-any-return]

    @property
    def longest_training_sequence(self) -> int:
        """The most tokens that a prompt with its response may have in training."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def longest_response(self) -> int:
        """The most tokens that a response may have, in training and in evaluations."""
        held_out = [self.eval.max_tokens, *(section.max_tokens for section in self.eval.sets.values())]
        return max(self.rollout.max_response_tokens, *(tokens or 0 for tokens in held_out))

    @property
    def longest_sequence(self) -> int:
        """The most tokens that a prompt with its response may have, in training and in evaluations."""
        return self.data.max_prompt_tokens + self.longest_response

    @model_validator(mode="after")
    def _check_auxiliaries(self) -> Self:
        """Check that each auxiliary model is used by another key, and that each one that a key names exists."""
        references = {f"reward.functions.{name}.model": judge.model for name, judge in self.reward.judges.items()}
        references["objective.teacher"] = self.objective.teacher
        auxiliaries = self.auxiliary.by_name
        for key, name in references.items():
            if name is not None and name not in auxiliaries:
                raise ValueError(f"{key} = {name!r}: there is no such auxiliary model; add [auxiliary.{name}]")
        if idle := sorted(auxiliaries.keys() - set(references.values())):
            raise ValueError(f"auxiliary.{idle[0]}: neither objective.teacher nor a judge names it; remove it")
        return self

    @model_validator(mode="before")
    @classmethod
    def _read_as_now(cls, given: Any) -> Any:
        """Bring a recipe of an earlier version into today's form, as far as that keeps its meaning
        (`recipe/removed.py`)."""
        return as_now(given) if isinstance(given, dict) else given

    @model_validator(mode="before")
    @classmethod
    def _extract_what_the_prompt_asks_for(cls, given: Any) -> Any:
        """Set `reward.extract` to `boxed` if it is `auto` and the prompt style asks for a box."""
        if not isinstance(given, dict):
            return given
        data, reward = given.get("data", {}), given.get("reward", {})
        if not isinstance(data, dict) or not isinstance(reward, dict):
            return given
        style = data.get("prompt_style", "auto")
        asks = isinstance(style, str) and style not in STYLES_WITHOUT_BOX and reward.get("extract", "auto") == "auto"
        return given | {"reward": reward | {"extract": "boxed"}} if asks else given

    @model_validator(mode="before")
    @classmethod
    def _score_by_the_task(cls, given: Any) -> Any:
        """Set `reward.function` to the task's own verifier and `data.eval` to the training task, if a recipe with
        problems of reasoning-gym leaves them unset. ValueError if it also has other problems and no reward
        function."""
        data, reward = (given.get(key, {}) if isinstance(given, dict) else None for key in ("data", "reward"))
        if not isinstance(data, dict) or not isinstance(reward, dict) or not isinstance(data.get("train", ""), str):
            return given
        if "eval" not in data and data.get("train", "").startswith(GYM):
            data = data | {"eval": data["train"]}
        named = [str(data.get(key, DataSection.model_fields[key].default)) for key in ("train", "eval")]
        sources = list(filter(None, map(str.strip, ",".join(named).split(","))))
        generated = [source for source in sources if source.startswith(GYM)]
        if not generated or reward.get("function") or reward.get("functions"):
            return given | {"data": data} if "data" in given else given
        if others := [source for source in sources if source not in generated]:
            raise ValueError(
                f"{generated[0]} is scored by its task, and {others[0]} is not: name one kind in data.train and "
                'data.eval, or a reward for both (reward.function = "math", or [reward.functions] with sources)'
            )
        return given | {"data": data, "reward": reward | {"function": GYM_REWARD}}
