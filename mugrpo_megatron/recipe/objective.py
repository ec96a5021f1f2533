"""The base class of all sections, and the `[objective]` section: the loss that an update minimises."""

from __future__ import annotations

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

from mugrpo_megatron.files.home import expanded

ObjectiveName = Literal[
    "mu_grpo",
    "grpo",
    "dapo",
    "dr_grpo",
    "rloo",
    "gspo",
    "cispo",
    "topr",
    "tis",
    "icepop",
    "m2po",
    "m2po_drop",
    "off_policy_grpo",
    "decoupled_ppo",
    "dppo",
    "sapo",
    "gmpo",
    "vespo",
    "seq_mis",
]
VetoScope = Literal["none", "trigger", "suffix_non_trigger", "suffix", "response", "prefix", "prefix_min"]
KlPenalty = Literal["reward", "k2", "k3", "k1_weighted", "k2_weighted", "k3_weighted"]
Dependence = Literal["token", "prefix", "response"]

GRPO: dict[str, Any] = {"clip_low": 0.8, "clip_high": 1.2, "veto": "none", "reduction": "sequence_mean"}
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
    "tis": GRPO | {"mismatch": "truncate", "mismatch_range": (0.0, 2.0)},
    "icepop": GRPO | {"mismatch": "drop", "mismatch_range": (0.5, 5.0)},
    "m2po": GRPO | {"second_moment": "clip", "clip_low": 0.0, "clip_high": 1e9, "reduction": "token_mean"},
    "m2po_drop": GRPO | {"second_moment": "drop", "reduction": "token_mean"},
    "off_policy_grpo": GRPO | {"clip_centre": "proximal_shifted", "zero_variance": "mask"},
    "decoupled_ppo": GRPO | {"clip_centre": "proximal_scaled", "proximal_every": 4},
    "dppo": GRPO
    | {"surrogate": "dppo", "clip_low": 0.0, "clip_high": 20.0, "advantage": "group_mean", "reduction": "constant"},
    "sapo": GRPO | {"surrogate": "sapo"},
    "gmpo": GRPO | {"surrogate": "gmpo", "clip_low": 0.67032, "clip_high": 1.49182},
    "vespo": GRPO | {"surrogate": "vespo", "ratio": "sequence", "reduction": "token_mean"},
    "seq_mis": GRPO
    | {"surrogate": "cispo", "ratio": "sequence", "clip_low": 0.0, "clip_high": 2.0, "reject": "sequence"},
}
"""Objective -> the keys that it sets. A key that the recipe sets itself overrides the preset."""
ADVANTAGES = ("group_std", "group_mean", "leave_one_out")
SURROGATES: dict[str, Dependence] = {
    "ppo": "token",
    "cispo": "token",
    "topr": "token",
    "dppo": "token",
    "sapo": "token",
    "gmpo": "response",
    "vespo": "token",
}
"""Surrogate -> the tokens whose log-probabilities its formula reads for the gradient of a token: the token alone
(`token`), or all of its response (`response`). The log-probabilities from which importance ratios are computed do not
count."""


Change = Literal["work", "branch", "method"]
"""When a key may change after a run has begun; a key without such a mark never may.

work: at every resume, since the key changes how the work is done and not its result. branch: in a branch, since the key
affects neither the responses that the branch takes over nor its first weights. method: in a branch and between the
runs of a sweep, since the key changes how a stage's responses are used.
"""


def changes(when: Change) -> Any:
    """Returns a mark that says when a key may change.

    A field gets it as `Field(json_schema_extra=changes("work"))`; in a section's `ConfigDict` it holds for all fields
    without a mark of their own.
    """
    return {"changes": when}


class Section(BaseModel):
    """A frozen table of the recipe. An unknown key is an error; the docstring of a field is its documentation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    entry_section: ClassVar[type[Section] | None] = None
    """Type of the entries of a table whose keys the user names, such as `[auxiliary.NAME]`; None for other tables."""

    @classmethod
    def change_of(cls, key: str) -> Change | None:
        """Returns when the key may change after a run has begun: the key's own mark, or else the section's; None if it
        never may."""
        field = cls.model_fields.get(key)
        marks: Any = (field.json_schema_extra if field else None) or cls.model_config.get("json_schema_extra") or {}
        return marks.get("changes")  # type: ignore[no-any-return]

    paths_in_text: ClassVar[frozenset[str]] = frozenset()
    """Text keys that hold paths, such as `data.train`. A `~` in them becomes the home directory, as in every key of
    type `Path`."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_value(cls, value: Any, info: ValidationInfo) -> Any:
        types = _types(cls.model_fields[info.field_name or ""].annotation)
        items = value if isinstance(value, list) else [value]
        # A key that takes numbers refuses booleans here, since Python and pydantic would take true for 1.
        if any(isinstance(item, bool) for item in items) and bool not in types and types & {int, float}:
            raise ValueError("is true or false, but must be a number")
        if any("\0" in str(item) for item in items if isinstance(item, str | Path)):
            raise ValueError("holds a null character, which file names and programs cannot contain; remove it")
        if isinstance(value, str | Path) and (Path in types or info.field_name in cls.paths_in_text):
            return type(value)(expanded(str(value)))
        return value

    @model_validator(mode="after")
    def _check_integers(self) -> Self:
        # No key needs a larger integer, and a larger one may overflow an array's size or a C long.
        for name, value in self:
            if isinstance(value, int) and value > MAX_INTEGER:
                raise ValueError(f"{name} is above {MAX_INTEGER:,}; take a smaller number")
        return self


MAX_INTEGER = 2**53
"""Largest integer that a recipe may have."""


def _types(annotation: Any) -> set[Any]:
    """Returns the plain types of an annotation: int and NoneType for `int | None`."""
    arguments = get_args(annotation)
    return set().union(*map(_types, arguments)) if arguments else {annotation}


USER_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""Matches a function as a recipe names it, `module:function`."""


class ObjectiveSection(Section):
    """Loss of an update: advantage, importance ratio, clip, veto, and further terms."""

    paths_in_text = frozenset(("kl_ref",))

    model_config = ConfigDict(json_schema_extra=changes("method"))

    name: ObjectiveName = "mu_grpo"
    """Preset of all keys below that the recipe does not set. A new name, by `--set` or over a `base`, drops the keys
    that were set with the old one."""
    advantage: str = "group_std"
    """Baseline and scale of the advantage within a group: `group_std`, (R - mean) / std; `group_mean`, R - mean;
    `leave_one_out`, R - mean of the others; or your `module:function`."""
    zero_variance: Literal["count", "mask", "leave_out"] = "count"
    """What happens to groups whose rewards are all equal before the overlong penalty: `count` keeps their tokens in the
    loss's denominators, `mask` removes them, `leave_out` fills updates with other groups."""
    truncated: Literal["count", "mask"] = "count"
    """What happens to responses that were cut at the length limit: `count` trains on them; `mask` takes their tokens
    out of the loss and of its denominators, while their rewards stay in the group's baseline (DAPO's overlong
    filtering, arXiv 2503.14476; TRL's `mask_truncated_completions`). `mask` is for tasks where a cut response may have
    been right; no shipped recipe sets it."""
    reduction: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """How token losses become one loss: the mean over all tokens, the mean over responses of each response's token
    mean, or their sum divided by a constant (Dr. GRPO)."""
    ratio: Literal["token", "sequence_mean", "sequence"] = "token"
    """What has an importance ratio: each token; a response, as the geometric mean of its tokens' ratios (GSPO); or a
    response, as their product."""
    surrogate: str = "ppo"
    """Policy loss: `ppo`, `cispo`, `topr`, `dppo`, `sapo`, `gmpo`, `vespo`, or your `module:function`."""
    diagnostics: str | None = None
    """Your own `module:function`, which makes named numbers of an update's tokens. They are logged with every
    update."""
    clip_low: float = Field(0.0, ge=0.0, le=1.0)
    """Lower bound of the clip range of the importance ratio: 1 - epsilon_low."""
    clip_high: float = Field(5.0, ge=1.0)
    """Upper bound of the clip range of the importance ratio: 1 + epsilon_high."""
    clip_centre: Literal["one", "proximal_shifted", "proximal_scaled"] = "one"
    """Centre of the clip range: 1, or the proximal policy's importance ratio, to which the range is shifted or by which
    it is multiplied. The proximal policy is the learner at its last refresh."""
    proximal_every: PositiveInt = 1
    """Number of updates between refreshes of the proximal policy, from a stage's start. With 1 a clip around the
    proximal policy has no effect."""
    dual_clip: float | None = Field(None, gt=1.0)
    """Dual clip of `ppo`: the importance ratio above which a token with negative advantage has no gradient (verl's is
    3). If unset, there is no dual clip."""
    veto: VetoScope = "suffix_non_trigger"
    """Tokens dropped from a response with negative advantage and triggers T, the first at κ: `none`, `trigger` T,
    `suffix_non_trigger` H_κ = S_κ − T, `suffix` S_κ = {t > κ}, or `response` all. `prefix` and `prefix_min` weigh its
    tokens instead, without triggers: by min(1, product) or min(1, minimum) of the importance ratios of the tokens
    before."""
    trigger_ratio: float = Field(1e-4, ge=0.0, le=1.0)
    """Importance ratio below which a token with negative advantage is a trigger. The paper illustrates
    the rule with 1e-4, which is the default, and does not say what its runs used."""
    veto_reach: Literal["turn", "response"] = "response"
    """How far a trigger, or the ratios of a prefix, reach in an episode: to the end of the turn, or of the response."""
    prefix_signs: Literal["negative", "both"] = "negative"
    """Signs of the advantages whose tokens `prefix` and `prefix_min` weigh. The papers weigh `both`."""
    reject: Literal["none", "sequence"] = "none"
    """Whether responses are dropped by the importance ratio of the whole response (`sequence`)."""
    reject_range: tuple[NonNegativeFloat, PositiveFloat] = (0.5, 2.0)
    """Range of importance ratios; with `reject`, responses whose ratio is outside it are dropped."""
    second_moment: Literal["none", "clip", "drop"] = "none"
    """Keep the second moment of the log-ratios below 0.04 (M2PO): `clip` narrows the clip range, `drop` drops
    tokens."""
    mismatch: Literal["none", "truncate", "drop"] = "none"
    """Correction of the mismatch between engine and learner by a weight for each token: `truncate` clamps the weight to
    `mismatch_range` (TIS), `drop` drops tokens whose weight is outside it (IcePop). It needs `rollout.behaviour =
    "learner"`."""
    mismatch_range: tuple[NonNegativeFloat, PositiveFloat] = (0.0, 2.0)
    """Range of the mismatch weight, which is a token's probability under the learner divided by that under the
    engine."""
    kl_ref: str | None = Field(None, min_length=1)
    """Reference policy of the KL penalty: `start` (the run's first weights), `stage` (the weights that sampled the
    stage), or a checkpoint directory."""
    kl_coef: float = Field(0.0, ge=0.0)
    """Weight of the KL penalty; 0 only measures the KL to `kl_ref`."""
    kl_penalty: KlPenalty = "k2"
    """`reward` subtracts a response's KL from its reward before the advantage (InstructGPT). Others add an estimator to
    each token's loss: k2 has the gradient of KL(policy | ref), k3 of KL(ref | policy). Those that end in `_weighted`
    multiply it by the importance ratio, which gives the gradient of KL(policy | ref) on stale tokens too."""
    teacher: str | None = Field(None, min_length=1)
    """`[auxiliary.NAME]` whose log-probabilities of the sampled tokens enter the advantages
    (docs/auxiliary-models.md)."""
    teacher_coef: float = Field(0.0, ge=0.0)
    """Weight with which log pi - log teacher is subtracted from each token's advantage; 0 only measures it."""
    teacher_policy: Literal["behaviour", "current"] = "current"
    """Which policy is the pi of `teacher_coef`: the behaviour policy, which is fixed during a stage, or the current
    policy."""
    entropy_coef: float = Field(0.0, ge=0.0)
    """Weight of the entropy bonus. The entropy is that of the policy's next-token distribution."""

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

    @field_validator("prefix_signs")
    @classmethod
    def _check_prefix_is_weighed(cls, value: str, info: ValidationInfo) -> str:
        if value == "both" and info.data.get("veto") not in ("prefix", "prefix_min"):
            raise ValueError(
                '"both" needs veto = "prefix" or "prefix_min"; other vetoes apply to negative advantages only'
            )
        return value

    @field_validator("mismatch_range", "reject_range")
    @classmethod
    def _check_the_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if value[1] <= value[0]:
            raise ValueError("its second number must be above its first: take a range that is not empty")
        return value

    @field_validator("surrogate", "advantage")
    @classmethod
    def _check_it_exists(cls, value: str, info: ValidationInfo) -> str:
        names = SURROGATES if info.field_name == "surrogate" else ADVANTAGES
        if value not in names and not USER_FUNCTION.fullmatch(value):
            raise ValueError(f"take one of {', '.join(names)}, or your own function as module:function")
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
            raise ValueError("needs a teacher; name an [auxiliary.NAME] with objective.teacher")
        return value

    @model_validator(mode="after")
    def _check_kl(self) -> Self:
        if self.kl_coef > 0 and self.kl_ref is None:
            raise ValueError('kl_coef needs a reference policy; set kl_ref = "start", "stage" or a directory')
        if self.kl_penalty == "reward" and self.kl_ref == "stage":
            raise ValueError(
                'kl_penalty = "reward" with kl_ref = "stage" is always 0: the policy that sampled is the reference '
                'policy; take kl_ref = "start" or a directory, or a penalty in the loss, such as "k2"'
            )
        return self

    @property
    def dependence(self) -> Dependence:
        """The tokens whose log-probabilities decide a token's gradient. The fused loss chooses its passes accordingly.

        `token` (the token itself) and `prefix` (its response up to it) need one pass in the order of tokens. `response`
        first needs the log-probabilities of whole responses, which a user's surrogate may read.
        """
        # Whether a token is a trigger (veto scope T) depends on that token alone; whether it comes after the first
        # trigger κ (S_κ, H_κ) depends on its prefix.
        surrogate = SURROGATES.get(self.surrogate, "response")
        whole_ratio = self.ratio != "token" or self.reject != "none"
        if whole_ratio or surrogate == "response" or self.veto == "response":
            return "response"
        return "token" if self.veto in ("none", "trigger") else "prefix"

    @property
    def has_user_advantage(self) -> bool:
        """Whether advantages come from a user's function, which may read the problems' rows."""
        return self.advantage not in ADVANTAGES

    @property
    def needs_statistics(self) -> bool:
        """Whether the loss needs numbers about the whole update (`update_statistics`), which a forward pass computes
        before the passes with gradients."""
        return self.second_moment != "none"
