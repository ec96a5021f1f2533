"""The base class of all sections, and the `[objective]` section: the loss and its numbers."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

ObjectiveName = Literal[
    "mu_grpo",
    "grpo",
    "dapo",
    "dr_grpo",
    "rloo",
    "gspo",
    "cispo",
    "topr",
    "opsm",
    "tis",
    "icepop",
    "m2po",
    "m2po_drop",
    "off_policy_grpo",
    "decoupled_ppo",
    "dppo",
    "dppo_kl",
    "sapo",
    "gmpo",
    "vespo",
    "seq_mis",
    "geo_rs",
]
VetoScope = Literal["none", "trigger", "suffix_non_trigger", "suffix", "response"]
KlPenalty = Literal["reward", "k2", "k3", "k1_weighted", "k2_weighted", "k3_weighted"]
Dependence = Literal["token", "prefix", "response"]

GRPO: dict[str, Any] = {"clip_low": 0.8, "clip_high": 1.2, "veto": "none", "reduction": "sequence_mean"}
DPPO = GRPO | {
    "surrogate": "dppo", "clip_low": 0.0, "clip_high": 20.0, "advantage": "group_mean", "reduction": "constant",
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "mu_grpo": {"clip_low": 0.0, "clip_high": 5.0, "veto": "suffix_non_trigger"},
    "grpo": GRPO,
    "dapo": GRPO | {"clip_high": 1.28, "reduction": "token_mean", "zero_variance": "mask"},
    "dr_grpo": GRPO | {"advantage": "group_mean", "reduction": "constant"},
    "rloo": GRPO | {"ratio": "sequence", "advantage": "leave_one_out"},
    "gspo": GRPO | {"ratio": "sequence_mean", "clip_low": 1 - 3e-4, "clip_high": 1 + 4e-4},
    "cispo": GRPO | {"surrogate": "cispo", "clip_low": 0.0, "clip_high": 5.0, "reduction": "token_mean"},
    "topr": GRPO
    | {"surrogate": "topr", "ratio": "sequence", "clip_low": 0.0, "clip_high": 1.0, "reduction": "constant"},
    "opsm": GRPO | {"reject": "negative_mean", "reject_range": (math.exp(-1e-4), 1e9)},
    "tis": GRPO | {"mismatch": "truncate", "mismatch_range": (0.0, 2.0)},
    "icepop": GRPO | {"mismatch": "drop", "mismatch_range": (0.5, 5.0)},
    "m2po": GRPO | {"second_moment": "clip", "clip_low": 0.0, "clip_high": 1e9, "reduction": "token_mean"},
    "m2po_drop": GRPO | {"second_moment": "drop", "reduction": "token_mean"},
    "off_policy_grpo": GRPO | {"clip_centre": "proximal_shifted", "zero_variance": "mask"},
    "decoupled_ppo": GRPO | {"clip_centre": "proximal_scaled", "proximal_every": 4},
    "dppo": DPPO,
    "dppo_kl": DPPO | {"surrogate": "dppo_kl"},
    "sapo": GRPO | {"surrogate": "sapo"},
    "gmpo": GRPO | {"surrogate": "gmpo", "clip_low": 0.67032, "clip_high": 1.49182},
    "vespo": GRPO | {"surrogate": "vespo", "ratio": "sequence", "reduction": "token_mean"},
    "seq_mis": GRPO
    | {"surrogate": "cispo", "ratio": "sequence", "clip_low": 0.0, "clip_high": 2.0, "reject": "sequence"},
    "geo_rs": GRPO | {"reject": "sequence_mean", "reject_range": (0.999, 1.001)},
}
"""Defaults of each objective name; a field set in the recipe wins over its preset."""
SURROGATES: dict[str, Dependence] = {
    "ppo": "token",
    "cispo": "token",
    "topr": "token",
    "dppo": "token",
    "dppo_kl": "token",
    "sapo": "token",
    "gmpo": "response",
    "vespo": "token",
}
"""What decides a token's gradient in each surrogate, beyond its importance ratio and its own log-probability."""


Change = Literal["work", "branch", "method"]
"""When a key may change after a run has begun; a key without a mark never does.

work: whenever the run resumes, for it says how the work is done and not what is computed. branch: in a branch, whose
responses and first weights it does not affect. method: in a branch too, and between the cells of a sweep, for it says
what is done with a stage's responses."""


def changes(when: Change) -> Any:
    """The mark of a field, or of a section for all fields without one: `Field(json_schema_extra=changes("work"))`."""
    return {"changes": when}


class Section(BaseModel):
    """A frozen table of the recipe: an unknown key is an error, a field's docstring is its documentation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    named: ClassVar[type[Section] | None] = None
    """Of a section whose tables the recipe names, as `[auxiliary.NAME]`: the section that each of them is."""

    @classmethod
    def change_of(cls, key: str) -> Change | None:
        """When the key may change after a run has begun: its own mark, else the section's."""
        field = cls.model_fields.get(key)
        marks: Any = (field.json_schema_extra if field else None) or cls.model_config.get("json_schema_extra") or {}
        return marks.get("changes")  # type: ignore[no-any-return]

    @field_validator("*", mode="before")
    @classmethod
    def _check_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Python counts true as 1, a recipe does not; and the operating system takes no null character."""
        kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
        items = value if isinstance(value, list) else [value]
        if any(isinstance(one, bool) for one in items) and bool not in kinds and kinds & {int, float}:
            raise ValueError("is true or false, where a number belongs")
        if any("\0" in str(one) for one in items if isinstance(one, str | Path)):
            raise ValueError("holds a null character, which no file name and no program takes")
        return value

    @model_validator(mode="after")
    def _check_integers(self) -> Self:
        """No key needs a larger integer, and beyond it an array's size or a C long overflows."""
        for name, value in self:
            if isinstance(value, int) and value > MAX_INTEGER:
                raise ValueError(f"{name} is above {MAX_INTEGER:,}")
        return self


MAX_INTEGER = 2**53
"""Largest integer of a recipe."""


def _kinds(annotation: Any) -> set[Any]:
    """The plain types in an annotation: `int | None` has int and NoneType."""
    parts = get_args(annotation)
    return set().union(*map(_kinds, parts)) if parts else {annotation}


USER_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""`module:function`"""


class ObjectiveSection(Section):
    """The surrogate that one update minimises."""

    model_config = ConfigDict(json_schema_extra=changes("method"))

    name: ObjectiveName = "mu_grpo"
    """Preset for the fields below that the recipe does not set. If `--set` or a recipe with a `base` sets another name,
    only the new preset counts: the fields set with the replaced name are dropped."""
    advantage: Literal["group_std", "group_mean", "leave_one_out"] = "group_std"
    """Baseline and scale of the advantage inside a group of responses to one prompt."""
    zero_variance: Literal["count", "mask", "leave_out"] = "count"
    """Groups with equal rewards: `count` keeps their tokens in the denominators, `mask` removes them, and `leave_out`
    builds updates from the other groups."""
    reduction: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """How token losses are averaged to the loss of an update."""
    ratio: Literal["token", "sequence_mean", "sequence"] = "token"
    """Importance ratio: of each token, of the response normalised by its length, or of the whole response."""
    surrogate: str = "ppo"
    """Token loss: `ppo`, `cispo`, `topr`, `dppo`, `dppo_kl`, `sapo`, `gmpo`, `vespo`, or your own `module:function`."""
    diagnostics: str | None = None
    """Your own `module:function` that gets the update's tokens and returns numbers by name, logged with every
    update."""
    clip_low: float = Field(0.0, ge=0.0, le=1.0)
    """Lower bound of the importance ratio's clip range (1 - epsilon_low)."""
    clip_high: float = Field(5.0, ge=1.0)
    """Upper bound of the importance ratio's clip range (1 + epsilon_high)."""
    clip_centre: Literal["one", "proximal_shifted", "proximal_scaled"] = "one"
    """Clip range around 1, shifted to the proximal policy's ratio (`proximal_shifted`) or multiplied by it
    (`proximal_scaled`); the
    proximal policy is the learner at the last refresh."""
    proximal_every: PositiveInt = 1
    """Updates between refreshes of the proximal policy that `clip_centre` names, from a stage's start; with 1 such a
    clip has no effect."""
    dual_clip: float | None = Field(None, gt=1.0)
    """Ratio above which a negative token of the `ppo` surrogate has no gradient; unset turns it off (verl: 3)."""
    veto: VetoScope = "suffix_non_trigger"
    """Tokens dropped from a negative response with triggers T, the first at κ: ∅, T, H_κ = S_κ − T, S_κ = {t > κ}, or
    all."""
    trigger_ratio: float = Field(1e-4, ge=0.0, le=1.0)
    """A token of a negative response whose ratio is below this is a trigger; 1e-4, the paper's illustration, is
    our reading of its runs."""
    veto_reach: Literal["turn", "response"] = "response"
    """How far a trigger acts in an episode of several turns: to the end of its turn, or of the response."""
    reject: Literal["none", "sequence", "sequence_mean", "negative_mean"] = "none"
    """Drop responses by the ratio of the whole response, or by its geometric mean per token, of all responses or of
    negative ones alone."""
    reject_range: tuple[NonNegativeFloat, PositiveFloat] = (0.5, 2.0)
    """A response whose ratio is outside is dropped."""
    second_moment: Literal["none", "clip", "drop"] = "none"
    """Keep the second moment of the log-ratios below 0.04 by a data-dependent clip range, or by dropping tokens."""
    mismatch: Literal["none", "truncate", "drop"] = "none"
    """Correct for the mismatch of engine and learner: truncated weights or dropped tokens; needs `rollout.behaviour =
    "learner"`."""
    mismatch_range: tuple[NonNegativeFloat, PositiveFloat] = (0.0, 2.0)
    """Bounds of the learner/engine probability ratio."""
    kl_ref: str | None = Field(None, min_length=1)
    """Policy of the KL penalty: `start` (the run's first weights), `stage` (the stage's), or a checkpoint directory."""
    kl_coef: float = Field(0.0, ge=0.0)
    """Weight of the KL to the reference policy; 0 with a reference policy only measures it."""
    kl_penalty: KlPenalty = "k2"
    """`reward`: the response's sum is subtracted from its reward before the advantage (InstructGPT). Else an estimate
    from each token is a term of its loss: k2 has the gradient of KL(policy | ref), k3 of KL(ref | policy), and
    times the token's importance ratio (`_weighted`) each has that of KL(policy | ref) for stale tokens too."""
    teacher: str | None = Field(None, min_length=1)
    """The `[auxiliary.NAME]` whose log-probabilities of the sampled tokens enter their advantages
    (docs/auxiliary-models.md)."""
    teacher_coef: float = Field(0.0, ge=0.0)
    """Subtract this many times log pi - log teacher from each token's advantage; 0 with a teacher only measures it."""
    teacher_policy: Literal["behaviour", "current"] = "current"
    """pi in that difference: the policy that sampled, so that it stays fixed, or the current one."""
    entropy_coef: float = Field(0.0, ge=0.0)
    """Weight of the entropy of the policy's next-token distribution, which the loss rewards."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        name = given.get("name", "mu_grpo")
        return {**(PRESETS.get(name, {}) if isinstance(name, str) else {}), **given}

    @field_validator("proximal_every")
    @classmethod
    def _check_proximal_is_used(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("clip_centre") == "one":
            raise ValueError(
                'the clip range is centred at 1, without a proximal policy; set clip_centre = "proximal_shifted" '
                "or leave the key out"
            )
        return value

    @field_validator("mismatch_range", "reject_range")
    @classmethod
    def _check_the_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if value[1] <= value[0]:
            raise ValueError("its second number must be above its first, or nothing would be kept")
        return value

    @field_validator("surrogate")
    @classmethod
    def _check_surrogate_exists(cls, value: str) -> str:
        if value not in SURROGATES and not USER_FUNCTION.fullmatch(value):
            raise ValueError(f"there are {', '.join(SURROGATES)}, or your own function as module:function")
        return value

    @field_validator("diagnostics")
    @classmethod
    def _check_diagnostics_are_named(cls, value: str | None) -> str | None:
        if value is not None and not USER_FUNCTION.fullmatch(value):
            raise ValueError("name your own function as module:function")
        return value

    @field_validator("teacher_coef")
    @classmethod
    def _check_there_is_a_teacher(cls, value: float, info: ValidationInfo) -> float:
        if value > 0 and info.data.get("teacher") is None:
            raise ValueError("it needs a teacher; name a [auxiliary.NAME] with objective.teacher")
        return value

    @model_validator(mode="after")
    def _check_kl(self) -> Self:
        if self.kl_coef > 0 and self.kl_ref is None:
            raise ValueError('kl_coef needs a policy to stay near; set kl_ref = "start", "stage" or a directory')
        if self.kl_penalty == "reward" and self.kl_ref == "stage":
            raise ValueError(
                'kl_penalty = "reward" compares the policy that sampled with the reference policy, and with '
                'kl_ref = "stage" both are the same; take kl_ref = "start" or a directory, or a penalty in the loss, '
                'such as "k2"'
            )
        return self

    @property
    def dependence(self) -> Dependence:
        """What decides a token's gradient, besides numbers known before the update; the loss path is fused accordingly.

        `token` (its own log-probability) and `prefix` (its response's tokens so far) need one pass in token order;
        `response` needs the log-probabilities of whole responses first, which a surrogate of the user's own may read.
        A trigger (scope T) depends on the token itself, a place after κ (S_κ, H_κ) on the prefix; S_seq on the whole.
        """
        of_loss = SURROGATES.get(self.surrogate, "response")
        whole = self.ratio != "token" or self.reject != "none"
        if whole or of_loss == "response" or self.veto == "response":
            return "response"
        return "token" if self.veto in ("none", "trigger") else "prefix"

    @property
    def needs_statistics(self) -> bool:
        """Whether `update_statistics` needs a forward pass over the whole update before its first gradient."""
        return self.second_moment != "none"
