"""Sections about models: the policy and its sampling, LoRA, `mugrpo sft`, and auxiliary models."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from mugrpo_megatron.files.bundled import bundled_model
from mugrpo_megatron.files.hub import REPOSITORY
from mugrpo_megatron.recipe.objective import USER_FUNCTION, Section, changes
from mugrpo_megatron.recipe.systems import EngineSection


def _own_directory(path: Path) -> Path:
    """Returns the path of a directory that a command may fill; ValueError for the root directory and for a path
    with a null character."""
    absolute = Path(os.path.abspath(path))
    if absolute == absolute.parent or "\0" in str(path):
        raise ValueError("is not a directory that a command may fill; name a directory of its own, such as runs/first")
    return path


def _named(value: object) -> object:
    if isinstance(value, str) and not value.strip():
        raise ValueError("name a directory of its own; empty text would be the current one")
    return value


OwnDirectory = Annotated[Path, BeforeValidator(_named), AfterValidator(_own_directory)]


class ModelSection(Section):
    """The policy that is trained."""

    path: Path = Path("runs/warm-start/hf")
    """Hugging Face checkpoint that training starts from: a directory with config.json, safetensors and tokenizer,
    `owner/name` on the hub, or `arithmetic-364k`, the bundled start of the quickstart."""
    revision: str | None = Field(None, json_schema_extra=changes("branch"))
    """Commit, tag or branch of a model on the hub; run.json records the commit."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of the parameters and activations of learner and engine. With float16 the loss is scaled. Master weights and
    moments are float32. If this key is unset, CPUs without bfloat16 take float32."""
    _snapshot: Path | None = PrivateAttr(None)
    """Directory with the files of a hub model on this machine. It is not a key of the recipe."""

    @property
    def directory(self) -> Path:
        """The directory to read the model from: the snapshot of a hub model (`at`), a bundled model's, or `path`
        itself."""
        return self._snapshot or bundled_model(self.path) or self.path

    @property
    def commit(self) -> str | None:
        """The commit of a hub model; None before `at`, and for a model in a directory."""
        return self._snapshot.name if self._snapshot else None

    def at(self, snapshot: Path) -> ModelSection:
        """Returns the section with `snapshot` as the directory of its hub model; the snapshot's name is the commit."""
        section = self.model_copy()
        section._snapshot = snapshot
        return section

    @field_validator("revision")
    @classmethod
    def _check_on_the_hub(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and not REPOSITORY.fullmatch(str(info.data.get("path", ""))):
            raise ValueError("needs a model of the hub, `owner/name`; a directory has no revisions")
        return value


class LoraSection(Section):
    """Low-rank adapters (arXiv 2106.09685), trained instead of the weights: W + alpha / rank B A."""

    rank: PositiveInt | None = Field(None, json_schema_extra=changes("method"))
    """Rank of the adapters; unset trains all weights."""
    alpha: PositiveFloat = Field(32.0, json_schema_extra=changes("method"))
    """Numerator of the factor alpha / rank by which B A is multiplied."""
    targets: Literal["all-linear"] | list[str] = Field("all-linear", json_schema_extra=changes("method"))
    """Layers with an adapter, by the end of their Hugging Face names: `["q_proj", "v_proj"]`; experts are
    `gate_up_proj` and `down_proj`."""
    start: Path | None = None
    """Adapter in PEFT's format that training starts from; unset, A is random and B is 0."""

    @model_validator(mode="after")
    def _check_there_is_a_rank(self) -> Self:
        fields = type(self).model_fields.items()
        if self.rank is None and any(getattr(self, name) != field.default for name, field in fields):
            raise ValueError(
                "without a rank all weights are trained, and other keys of [lora] have no effect; set lora.rank"
            )
        return self


class RolloutSection(Section):
    """Sampling of an update's responses."""

    paths_in_text = frozenset(("agent",))

    prompts_per_update: PositiveInt = 32
    """Number of problems of an optimizer update. The update's batch has this times `responses_per_prompt` responses."""
    responses_per_prompt: int = Field(8, ge=2)
    """G: number of responses to each problem. They are the group in which advantages are computed."""
    max_response_tokens: PositiveInt = 1024
    """Tokens at which a response is truncated, with finish reason `length`."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the learner divides its logits by it too, so that importance ratios start at 1."""
    top_k: NonNegativeInt = 0
    """Number of most likely tokens to sample from; 0 takes all. From 1 to 64 (4,096 with SGLang 0.5.23) the stage
    stores these tokens, and importance ratios are exact."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling. Below 1, importance ratios are exact only beside a `top_k` that the stage stores."""
    stop: list[str] = Field(default_factory=list)
    """Stop strings besides the end-of-sequence token, for base models; the response includes them."""
    function: str | None = Field(None, pattern=USER_FUNCTION.pattern + "$")
    """Your own `module:function` or class for episodes of several turns with tools (docs/episodes.md)."""
    agent: str | None = Field(None, min_length=1)
    """Program that plays an episode as a client of OpenAI's chat API: a command, with files found from the current
    directory, or your own `module:function` of the row (docs/episodes.md)."""
    behaviour: Literal["engine", "learner"] = Field("engine", json_schema_extra=changes("method"))
    """Source of the logprobs that importance ratios divide by: the engine, at no cost, or a pass of the learner at the
    stage's start, with which ratios begin at exactly 1."""

    @field_validator("temperature", mode="before")
    @classmethod
    def _check_temperature(cls, value: Any) -> Any:
        if not isinstance(value, bool) and value == 0:
            raise ValueError(
                "greedy responses to a prompt are all the same, so a group has no advantage; write 1.0, and "
                "eval.temperature = 0 for greedy evaluation"
            )
        return value

    @model_validator(mode="after")
    def _check_who_plays(self) -> Self:
        if self.agent and self.function:
            raise ValueError("function and agent both play the episodes; remove one of them")
        try:
            words = shlex.split(self.agent or "true")
        except ValueError as error:
            raise ValueError(
                f"agent cannot be split into a command and its arguments ({error}); close its quotes, or remove the "
                "backslash at its end"
            ) from None
        if not words:
            raise ValueError("agent is empty; name a command, or a module:function")
        return self

    @property
    def episodes(self) -> str | None:
        """The function or the program that plays the episodes; None if responses have one turn."""
        return self.function or self.agent

    @property
    def truncates(self) -> bool:
        """Whether top-k or top-p excludes tokens from sampling."""
        return self.top_k > 0 or self.top_p < 1

    @field_validator("stop")
    @classmethod
    def _check_stops(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("an empty text would end every response at once; remove it")
        return value


class EpisodesSection(Section):
    """Limits of episodes (`rollout.function`, `rollout.agent`); `rollout.max_response_tokens` limits a response."""

    model_config = ConfigDict(json_schema_extra=changes("branch"))

    turns: PositiveInt = 16
    """Number of turns at which an episode is truncated, with finish reason `length`."""
    seconds: float = Field(300.0, gt=0.0, le=86_400.0)
    """Wall-clock seconds after which the process of an episode is killed. A failed episode is tried once more. If it
    fails again, it is dropped from its group, and an evaluation scores it 0."""
    max_failure_share: float = Field(0.1, ge=0.0, le=1.0)
    """Fraction of dropped episodes, counted over at least 16, above which the run ends with the last one's error; 1
    never ends it."""
    memory_mb: PositiveInt = 4096
    """MiB of address space of a process that runs episodes. A function that loads torch needs more."""
    programs: PositiveInt = 16
    """Number of programs of `rollout.agent` that run at a time beside an engine."""
    secrets: list[str] = Field(default_factory=list)
    """Environment variables that a program gets although their names or values look like secrets, such as
    `HF_TOKEN`."""


class SftSection(Section):
    """Supervised fine-tuning (`mugrpo sft`): your model on your rows, or a small new Qwen2 model on a bundled task."""

    paths_in_text = frozenset(("train",))

    model_config = ConfigDict(json_schema_extra=changes("work"))

    output: OwnDirectory = Path("runs/warm-start")
    """Output directory; the checkpoint is in its `hf/`."""
    train: str | None = None
    """Rows of prompts and responses on which `model.path` is fine-tuned; sources are named as in `data.train`. If
    unset, a new model is trained on the bundled task that `data.train` names."""
    epochs: PositiveInt = 1
    """Number of passes over the rows of `train`."""
    layers: PositiveInt = 2
    """Number of transformer layers of the new model."""
    hidden: int = Field(128, gt=0, multiple_of=16)
    """Hidden size of the new model, a multiple of the head dimension 16; its FFN is twice as wide."""
    batch: PositiveInt = 48
    """Number of problems of an update."""
    lr: PositiveFloat | None = None
    """Peak learning rate. If unset, it is 1e-3 for a new model and 1e-5 with `train`."""
    target_accuracy: float = Field(0.45, gt=0.0, le=1.0)
    """Held-out greedy accuracy at which training of a new model stops."""

    @property
    def peak_lr(self) -> float:
        """The peak learning rate: `lr`, or its default if it is not set."""
        return self.lr or (1e-5 if self.train else 1e-3)


AUXILIARY_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Matches the name of an auxiliary model, which is a part of file names."""


class AuxiliarySection(Section):
    """A teacher or judge, which scores each stage in its own engine, between generation and optimization
    (docs/auxiliary-models.md)."""

    model: Path
    """Hugging Face checkpoint directory, or `owner/name` on the hub."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Keys of `[engine]` that differ for this model, such as `memory_fraction`: `[auxiliary.NAME.engine]`."""

    def engine_section(self, engine: EngineSection) -> EngineSection:
        """Returns the `[engine]` section for this model: the recipe's without quantization, but with this model's own
        keys."""
        # No quantization by default, because the weight sync does it, and this model's weights come from its files
        # without a sync.
        return EngineSection.model_validate({**engine.model_dump(), "quantization": "none", **self.engine})

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        try:
            self.engine_section(EngineSection())
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(("engine", *map(str, first["loc"])))
            if first["type"] == "extra_forbidden":
                raise ValueError(f"{key} is not a key of [engine]; correct or remove it") from None
            raise ValueError(f"{key}: {first['msg'].removeprefix('Value error, ')}") from None
        return self


class AuxiliariesSection(Section):
    """Auxiliary models by name; `objective.teacher` and judges among the reward functions refer to them."""

    model_config = ConfigDict(extra="allow", json_schema_extra=changes("method"))
    entry_section = AuxiliarySection
    __pydantic_extra__: dict[str, AuxiliarySection]

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if wrong := [name for name in self.__pydantic_extra__ if not AUXILIARY_NAME.fullmatch(name)]:
            raise ValueError(f"{wrong[0]!r}: name an auxiliary model with letters, digits, - and _")
        return self

    @property
    def by_name(self) -> Mapping[str, AuxiliarySection]:
        return self.__pydantic_extra__
