"""The whole recipe, and its sections of what is trained; each field's docstring is its entry in docs/recipe.md."""

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
from mugrpo_megatron.recipe.scoring import STYLES_WITHOUT_BOX, EvalSection, RewardSection
from mugrpo_megatron.recipe.systems import EngineSection, LearnerSection, ParallelSection

QUESTION = "{question}"
_OF_LATEX = re.compile(r"\\[A-Za-z]+(?:\{[^{}]*\})+")
"""A command with its arguments, as in `\\boxed{answer}`: no field."""
_FIELD = re.compile(r"\{[A-Za-z_][\w.]*\}")


def question_template(text: str) -> str:
    """The template itself; ValueError when it has no `{question}`, or a field of another name.

    Braces that hold no name, and those of LaTeX commands, are text.
    """
    if QUESTION not in text:
        raise ValueError(f"has no {QUESTION}, where each question goes")
    if "{{" in text:
        raise ValueError("braces are not doubled here: write {question} and \\boxed{}")
    if other := [field for field in _FIELD.findall(_OF_LATEX.sub("", text)) if field != QUESTION]:
        raise ValueError(f"{other[0]} cannot be filled in: {QUESTION} is the only field")
    return text


def fill_template(question: str, template: str | None) -> str:
    """The question inside the template; without one the question itself."""
    return question if template is None else template.replace(QUESTION, question)


class RunSection(Section):
    """The run's directory, seed and reproducibility. It runs on CUDA if torch finds it; `CUDA_VISIBLE_DEVICES=` hides
    it."""

    dir: OwnDirectory = Field(Path("runs/default"), json_schema_extra=changes("work"))
    """Run directory: resolved recipe, metrics, stages, checkpoints, final Hugging Face checkpoint, report."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of the data order, of sampling and of every other random stream."""
    deterministic: bool = False
    """Equal runs on equal machines are bitwise equal, including generation; slower, and CUDA only. On a CPU the
    learner's updates on equal stages are bitwise equal without this key, but generation never is."""
    collective_timeout_s: float = Field(1800.0, gt=0.0, le=30 * 86_400.0, json_schema_extra=changes("work"))
    """Seconds that a collective waits before it fails with rank, phase and likely cause."""


class DataSection(Section):
    """Problems to train on and to evaluate on."""

    train: str = "arithmetic"
    """A bundled task, a JSON, Parquet or CSV file, a named data set, or `owner/name` on the hub; commas separate
    several."""
    eval: str = Field("arithmetic", json_schema_extra=changes("branch"))
    """Held-out problems; sources as for `train`."""
    eval_problems: int = Field(500, gt=0, le=10_000_000)
    """At most this many problems of each held-out set are used for an evaluation, evenly spaced over the set."""
    question_field: str = "problem"
    """Column with the question, text or messages, or a path inside one; at the default other names are recognised
    too."""
    answer_field: str = "answer"
    """Column that holds the gold answer, or a path inside one (`reward_model.ground_truth`)."""
    prompt_style: str = "auto"
    """How a question becomes a prompt: `plain`, `chat` (the tokenizer's chat template), a named math style, or `auto`:
    `chat` if the tokenizer has a template, else `plain`."""
    question_template: str | None = None
    """Text around each question, with the field `{question}`, for every prompt style; other braces are kept."""
    system_prompt: str | None = None
    """System turn for chats without one; needs a chat template."""
    chat_template: Path | None = None
    """Jinja file that replaces the tokenizer's own chat template, or stands in for it in a base model."""
    template_arguments: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking = false`."""
    max_prompt_tokens: PositiveInt = 512
    """Longer prompts are skipped and counted."""
    strict: bool = True
    """A malformed row or an unverifiable gold ends the command with an error; false skips and counts them."""
    contamination: Literal["report", "drop", "off"] = "report"
    """What to do with training problems that share half of their 8-grams with a held-out problem."""

    @field_validator("system_prompt", "chat_template", "template_arguments")
    @classmethod
    def _check_style_takes_it(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("prompt_style") not in ("chat", "auto"):
            raise ValueError('needs prompt_style = "chat" or "auto"; the other styles are fixed texts')
        return value

    @field_validator("question_template")
    @classmethod
    def _check_question(cls, value: str | None) -> str | None:
        return None if value is None else question_template(value)


MAX_STAGE_UPDATES = 99_999
"""Most stages of a run, and most updates on a stage: the largest number in the names of their files."""


class ScheduleSection(Section):
    """S stages of µ updates each. GRPO and mu-GRPO differ in this section and in `[objective]`."""

    stages: int = Field(4, gt=0, le=MAX_STAGE_UPDATES, json_schema_extra=changes("branch"))
    """S: number of stages, each generated once; stages that end early are followed by more."""
    updates_per_stage: PositiveInt = 64
    """µ: updates that one stage's responses are sampled for; the paper has 4 for GRPO and 1024 for mu-GRPO."""
    growth: float = Field(1.0, ge=0.1, le=10.0)
    """Each stage has this many times the updates of the one before; S stages still have S µ updates in all.
    For short stages while the policy moves fast."""
    epochs: int = Field(1, ge=1, le=1000, json_schema_extra=changes("method"))
    """Epochs over each stage's updates, to sample less: µ x epochs optimizer updates per stage, with later epochs
    shuffled."""
    max_kl: float = Field(0.0, ge=0.0, allow_inf_nan=False, json_schema_extra=changes("method"))
    """End a stage early once the policy has moved this many nats a response from the one that sampled it; 0 never does.
    The log's `kl_response`, smoothed; the next stage samples anew, and the run still takes all its updates."""

    @model_validator(mode="after")
    def _check_longest(self) -> Self:
        longest = self.epochs * max(self.length(0), self.length(self.stages - 1))
        if longest > MAX_STAGE_UPDATES:
            raise ValueError(f"a stage has {longest:,} updates, and at most {MAX_STAGE_UPDATES:,} can be numbered")
        return self

    def length(self, stage: int) -> int:
        """Updates that stage `stage` (from 0) samples responses for: µ, or its part of the S µ where stages grow.

        Lengths are whole, at least 1, and in the ratio `growth` up to rounding. A stage after the S-th, in a run whose
        stages end early, is as long as the S-th.
        """
        if self.growth == 1.0:
            return self.updates_per_stage
        longest = self.stages - 1 if self.growth > 1.0 else 0
        weights = [self.growth ** (k - longest) for k in range(self.stages)]  # the largest is 1: no overflow
        spare = self.stages * self.updates_per_stage - self.stages  # beyond one update for each
        parts = [0.0, *itertools.accumulate(weight / sum(weights) for weight in weights)]
        index = min(stage, self.stages - 1)
        return 1 + round(spare * parts[index + 1]) - round(spare * parts[index])

    @property
    def ends_early(self) -> bool:
        """Whether `max_kl` may end a stage before its last update."""
        return self.max_kl > 0

    @property
    def updates_on_stage(self) -> int:
        """µ x epochs: optimizer updates taken on a stage of full length; the mean over stages where they grow."""
        return self.updates_per_stage * self.epochs

    @property
    def total_updates(self) -> int:
        """S µ x epochs: optimizer updates of the whole run."""
        return self.stages * self.updates_on_stage


class OptimizerSection(Section):
    """AdamW over float32 master weights."""

    model_config = ConfigDict(json_schema_extra=changes("method"))

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    decay_over: Literal["run", "stage"] = "run"
    """Span of `decay`: the run, or each stage, so that the rate falls as the responses become stale and restarts with
    each stage. The warm-up is always at the run's start."""
    warmup_updates: NonNegativeInt = 0
    """Updates of linear warm-up from 0 to `lr`."""
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0.0, lt=1.0)
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; not applied to norms and biases."""
    clip_grad: PositiveFloat = 1.0
    """Global gradient norm that an update is clipped to."""

    @field_validator("min_lr")
    @classmethod
    def _check_decay(cls, value: float, info: ValidationInfo) -> float:
        if value > info.data.get("lr", value):
            raise ValueError("is above lr, from which it decays")
        return value


class CheckpointSection(Section):
    """When the learner's full state is saved, and how many saves are kept."""

    model_config = ConfigDict(json_schema_extra=changes("work"))

    every_stages: PositiveInt = 1
    """Save at the end of every n-th stage, and of the last. A resumed run repeats the updates of later stages, on the
    responses on disk."""
    every_updates: NonNegativeInt = 0
    """Also save inside a stage every n updates; 0 saves only at stage ends."""
    asynchronous: bool = True
    """Copy the state to host memory and write it while training continues; false waits for the disk,
    where the host has no memory for the copy. At a stage's end that is also the policy for `hf/`, whole on the first
    rank's host, from which `mugrpo generate --engine-only` samples."""
    keep: PositiveInt = 2
    """Number of newest complete checkpoints to keep."""


class TrackSection(Section):
    """Where metrics are written, besides metrics.jsonl."""

    model_config = ConfigDict(json_schema_extra=changes("work"))

    tensorboard: bool = True
    """Write TensorBoard event files under the run directory."""
    wandb_project: str | None = None
    """Weights & Biases project; key, group and tags come from its own variables (WANDB_RUN_GROUP, WANDB_TAGS)."""
    profile_updates: list[NonNegativeInt] = Field(default_factory=list)
    """Numbers of updates, from 0, that PyTorch's profiler records; a trace of each rank goes to `profile/`."""


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
        """When `section.key`, or a key below it, may change after a run has begun; None for never."""
        name, _, rest = key.partition(".")
        field = cls.model_fields.get(name)
        section: Any = field.annotation if field else None
        return section.change_of(rest.partition(".")[0]) if section else None  # type: ignore[no-any-return]

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response that training or an evaluation may sample."""
        held_out = [self.eval.max_tokens, *(one.max_tokens for one in self.eval.sets.values())]
        return max(self.rollout.max_response_tokens, *(tokens or 0 for tokens in held_out))

    @model_validator(mode="after")
    def _check_auxiliaries(self) -> Self:
        """Every auxiliary model has work, and who is given work is an auxiliary model."""
        work = {f"reward.functions.{name}.model": one.model for name, one in self.reward.judges.items()}
        work, auxiliaries = {**work, "objective.teacher": self.objective.teacher}, self.auxiliary.by_name
        for key, name in work.items():
            if name is not None and name not in auxiliaries:
                raise ValueError(f"{key} = {name!r}: there is no such auxiliary model; add [auxiliary.{name}]")
        if idle := sorted(auxiliaries.keys() - set(work.values())):
            raise ValueError(f"auxiliary.{idle[0]}: neither objective.teacher nor a judge names it; remove it")
        return self

    @model_validator(mode="before")
    @classmethod
    def _extract_what_the_prompt_asks_for(cls, given: Any) -> Any:
        """`reward.extract = "auto"` is `boxed` where the prompt style asks for a box."""
        if not isinstance(given, dict):
            return given
        data, reward = given.get("data", {}), given.get("reward", {})
        if not isinstance(data, dict) or not isinstance(reward, dict):
            return given
        style = data.get("prompt_style", "auto")
        asks = isinstance(style, str) and style not in STYLES_WITHOUT_BOX and reward.get("extract", "auto") == "auto"
        return given | {"reward": reward | {"extract": "boxed"}} if asks else given
