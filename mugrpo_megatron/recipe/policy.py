"""The recipe's sections of models: the policy that a run starts from and how it samples, `mugrpo sft`, and auxiliary
models."""

from __future__ import annotations

import os
import re
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

from mugrpo_megatron.files.hub import REPOSITORY
from mugrpo_megatron.recipe.objective import USER_FUNCTION, Section, changes
from mugrpo_megatron.recipe.systems import EngineSection


def _own_directory(path: Path) -> Path:
    """A directory that a command fills; ValueError for one that cannot be its own."""
    whole = Path(os.path.abspath(path))
    if whole == whole.parent or "\0" in str(path):
        raise ValueError("name a directory of its own")
    return path


def _named(value: object) -> object:
    if isinstance(value, str) and not value.strip():
        raise ValueError("name a directory of its own; empty text would be the current one")
    return value


OwnDirectory = Annotated[Path, BeforeValidator(_named), AfterValidator(_own_directory)]


class ModelSection(Section):
    """The policy that is trained."""

    path: Path = Path("runs/warm-start/hf")
    """Hugging Face checkpoint directory (config.json, safetensors, tokenizer) that training starts from, or the name of
    a model on the hub, `owner/name`."""
    revision: str | None = Field(None, json_schema_extra=changes("branch"))
    """Commit, tag or branch of a model on the hub; run.json records the commit."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Parameter and activation type of learner and engine; float16 scales the loss. Masters and moments are float32."""
    _snapshot: Path | None = PrivateAttr(None)
    """Where the files of a model of the hub lie on this machine; no part of the recipe."""

    @property
    def directory(self) -> Path:
        """The directory to read the model from: `path`, but for a model of the hub its snapshot (`at`)."""
        return self._snapshot or self.path

    @property
    def commit(self) -> str | None:
        """The commit of a model of the hub; None for a directory, and before `at`."""
        return self._snapshot.name if self._snapshot else None

    def at(self, snapshot: Path) -> ModelSection:
        """The section with its model in `snapshot`, a directory that is called as the commit is."""
        placed = self.model_copy()
        placed._snapshot = snapshot
        return placed

    @field_validator("revision")
    @classmethod
    def _check_on_the_hub(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and not REPOSITORY.fullmatch(str(info.data.get("path", ""))):
            raise ValueError("a directory has no revisions; give it with a model of the hub, `owner/name`")
        return value


class LoraSection(Section):
    """Low-rank adapters (arXiv 2106.09685) that RL trains in place of the weights: W + alpha / rank B A."""

    rank: PositiveInt | None = Field(None, json_schema_extra=changes("method"))
    """Rows of A and columns of B; unset, all weights are trained."""
    alpha: PositiveFloat = Field(32.0, json_schema_extra=changes("method"))
    """The product B A counts alpha / rank times."""
    targets: Literal["all-linear"] | list[str] = Field("all-linear", json_schema_extra=changes("method"))
    """Layers with an adapter, by the last part of their Hugging Face name, as in `["q_proj", "v_proj"]`; the experts of
    a mixture are `gate_up_proj` and `down_proj`."""
    start: Path | None = None
    """Directory of an adapter in PEFT's format that training starts from; unset, A is random and B is 0."""

    @model_validator(mode="after")
    def _check_there_is_a_rank(self) -> Self:
        fields = type(self).model_fields.items()
        if self.rank is None and any(getattr(self, name) != field.default for name, field in fields):
            raise ValueError("without a rank all weights are trained, and its other keys mean nothing; set lora.rank")
        return self


class RolloutSection(Section):
    """How the responses of an update are sampled."""

    prompts_per_update: PositiveInt = 32
    """Problems whose responses make up one optimizer update."""
    responses_per_prompt: int = Field(8, ge=2)
    """G: responses sampled for each problem; the group that the advantage is relative to."""
    max_response_tokens: PositiveInt = 1024
    """A longer response is cut and finishes with reason `length`."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the learner divides its logits by it too, so that ratios compare the same policies."""
    top_k: NonNegativeInt = 0
    """Sample only from this many most likely tokens; 0 is all. Up to 64, with SGLang 0.5.23 4,096, the stage stores
    them, and ratios are exact."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling: below 1, ratios are exact with a `top_k` that the stage stores, otherwise biased."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a response, besides the end-of-sequence token, for base models; the response includes them."""
    function: str | None = Field(None, pattern=USER_FUNCTION.pattern + "$")
    """Your own `module:function` (or class) that makes a response of several turns, with tools; its parameters say how
    (docs/episodes.md)."""
    behaviour: Literal["engine", "learner"] = Field("engine", json_schema_extra=changes("method"))
    """Source of the behaviour logprobs: the engine (free) or a learner pass at the stage's start (ratio exactly 1)."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be sampled."""
        return self.top_k > 0 or self.top_p < 1

    @field_validator("stop")
    @classmethod
    def _check_stops(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("an empty text would end every response at once")
        return value


class EpisodesSection(Section):
    """Limits of the episodes of `rollout.function`; all their tokens together are at most
    `rollout.max_response_tokens`."""

    model_config = ConfigDict(json_schema_extra=changes("branch"))

    turns: PositiveInt = 16
    """A longer episode is cut, like one with too many tokens, and finishes with reason `length`."""
    seconds: float = Field(300.0, gt=0.0, le=86_400.0)
    """Wall-clock of an episode; a longer one fails, and what hangs in it is killed. A failed episode is begun again
    once, then dropped from its group; an evaluation scores it 0."""
    max_failure_share: float = Field(0.1, ge=0.0, le=1.0)
    """More dropped episodes than this share (of at least 16) end the run with the last one's error; 1 lets them
    fail."""
    memory_mb: PositiveInt = 4096
    """Address space of a process that runs the function, so that a tool cannot take the machine's memory; one that
    loads torch needs more."""


class SftSection(Section):
    """Supervised fine-tuning: your model on your rows, or a small new Qwen2 model on a bundled task."""

    model_config = ConfigDict(json_schema_extra=changes("work"))

    output: OwnDirectory = Path("runs/warm-start")
    """Run directory of the warm start; the checkpoint is in its `hf/`."""
    train: str | None = None
    """Rows of prompts and responses on which `model.path` is fine-tuned, sources as for `data.train`; unset: a new
    model learns the bundled task of `data.train`."""
    epochs: PositiveInt = 1
    """Passes over the rows of `train`."""
    layers: PositiveInt = 2
    """Transformer layers of the new model."""
    hidden: int = Field(128, gt=0, multiple_of=16)
    """Width of the residual stream, a multiple of 16; heads have 16 each, the feed-forward layer is twice as wide."""
    batch: PositiveInt = 48
    """Problems in one update."""
    lr: PositiveFloat | None = None
    """Peak learning rate; unset: 1e-3 for a new model, 1e-5 with `train`."""
    target_accuracy: float = Field(0.45, gt=0.0, le=1.0)
    """Held-out greedy accuracy at which the warm start stops."""

    @property
    def peak_lr(self) -> float:
        """The learning rate, also where it is not set."""
        return self.lr or (1e-5 if self.train else 1e-3)


AUXILIARY_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""An auxiliary model's name: it is part of files' names."""


class AuxiliarySection(Section):
    """A model that scores each stage in an engine of its own, between generation and optimization
    (docs/auxiliary-models.md)."""

    model: Path
    """Hugging Face checkpoint directory, or the name of a model on the hub, `owner/name`."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """`[auxiliary.NAME.engine]`: keys of `[engine]` that are different for this model, such as `memory_fraction`."""

    def engine_section(self, engine: EngineSection) -> EngineSection:
        """`[engine]` with this auxiliary model's keys; its weights come from its files and not from a sync."""
        own = {"quantization": "none", **self.engine}
        return EngineSection.model_validate({**engine.model_dump(), **own})

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        try:
            self.engine_section(EngineSection())
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"engine.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        return self


class AuxiliariesSection(Section):
    """Tables whose names the recipe chooses: `objective.teacher` and reward functions that are judges refer to them."""

    model_config = ConfigDict(extra="allow", json_schema_extra=changes("method"))
    named = AuxiliarySection
    __pydantic_extra__: dict[str, AuxiliarySection]

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if wrong := [name for name in self.__pydantic_extra__ if not AUXILIARY_NAME.fullmatch(name)]:
            raise ValueError(f"{wrong[0]!r}: name an auxiliary model with letters, digits, - and _")
        return self

    @property
    def by_name(self) -> Mapping[str, AuxiliarySection]:
        return self.__pydantic_extra__
