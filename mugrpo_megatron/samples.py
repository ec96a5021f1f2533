"""The records between data and learner: problems, prompts, responses, scored samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.recipe.scoring import OVERLONG

if TYPE_CHECKING:  # only tests need jaxtyping: they check the shapes that the types give (tests/shapes.py)
    from jaxtyping import Bool, Float32, Int32, UInt8, UInt16

UNSCORED = "group.unscored"
"""Key in a sample's `components` of the share of its group's responses that got no reward and became no samples."""
Message = Mapping[str, Any]
"""A chat message: `role`, `content` (text, or null beside other fields), and its other fields for the chat template."""


class Routes(Protocol):
    """The experts that a model's routers chose for the tokens of a prompt and its response, in memory or on disk.

    The prompt has P tokens, the response R, and each layer with a router sends a token to k experts.
    """

    def read(self, layers: Sequence[int]) -> np.ndarray:
        """uint8 or uint16 [len(layers), P + R - 1, k]: the experts in the layers with the numbers `layers`, from 0.

        The last token has no experts, because nothing is sampled after it.
        """
        ...


@dataclass(frozen=True, slots=True)
class InMemoryRoutes:
    """Routes that are held in memory."""

    experts: np.ndarray
    """uint8 or uint16 [layers, P + R - 1, k], of all layers of the model."""

    def read(self, layers: Sequence[int]) -> np.ndarray:
        return self.experts[list(layers)]


def expert_type(experts: int) -> type[np.uint8] | type[np.uint16]:
    """The smallest type with which the `experts` experts of a layer can be numbered from 0."""
    return np.uint8 if experts <= 256 else np.uint16


@dataclass(frozen=True, slots=True)
class Problem:
    """One verifiable problem."""

    id: str
    """Id that is unique within the data set: `source:line`."""
    question: str
    """The question as text."""
    answer: str
    """The right answer as text, which the reward function `math` compares with. If the gold
    is a worked solution, it is the solution's last answer; if the gold is not text, it is its JSON text."""
    source: str = ""
    """Name of the data set."""
    messages: tuple[Message, ...] = field(default=(), hash=False)
    """The question as a chat: system turn, history, the user's last turn; empty for a bare question."""
    gold: Any = field(default=None, hash=False)
    """The gold as the row has it, any JSON value, for a user's function; the answer where the problem has no row."""
    data_source: str = ""
    """verl's column `data_source`, else `source`; it selects the reward functions."""
    row: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The whole row as JSON values; empty for a bundled task."""

    def __post_init__(self) -> None:
        if self.gold is None:
            object.__setattr__(self, "gold", self.answer)
        if not self.data_source:
            object.__setattr__(self, "data_source", self.source)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem as token ids; `index` is its place in the stage, update * prompts_per_update + position."""

    index: int
    problem: Problem
    ids: list[int]
    logprob_tokens: int = 0
    """If not 0, the engine samples nothing, and returns the log-probabilities of so many tokens at the end of `ids`."""
    support_ids: Int32[np.ndarray, "logprob_tokens k"] | None = field(default=None, hash=False)
    """The support ids of the tokens that `logprob_tokens` counts; see `Sample.support_ids`."""


@dataclass(frozen=True, slots=True)
class Episode:
    """A response of several turns, between which text comes from an environment: the user's `rollout.function` or
    `rollout.agent`."""

    prompt_ids: Int32[np.ndarray, " prompt"]
    """The ids of the tokens before the first one that the model sampled."""
    mask: Bool[np.ndarray, " response"]
    """Which tokens the model sampled; the others are the environment's, and their log-probabilities are set to 0."""
    reward: float | None = None
    """The reward that the user's function returned; None if the verifier scores the last turn."""
    why: str = ""
    """Why it got its reward, or why it failed."""
    failed: bool = False
    """Whether the episode failed, so that none of its turns counts: an evaluation scores it 0, and training leaves it
    out."""
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Numbers about the episode by name: turns, calls, seconds, and what else the user's function returned."""
    answer: str | None = None
    """Text that the verifier scores instead of the last turn."""
    scored_with_previous: bool = False
    """Whether this is a part of the same episode as the response before it in the group, and gets that one's score."""

    @property
    def settled(self) -> bool:
        """Whether the verifier has nothing left to score."""
        return self.failed or self.reward is not None or self.scored_with_previous

    @property
    def last_turn(self) -> int:
        """Index in the response of the first token of its last turn."""
        others = np.flatnonzero(~self.mask)
        return int(others[-1]) + 1 if len(others) else 0


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled continuation of a prompt, as the engine returned it."""

    ids: Int32[np.ndarray, " response"]
    """Response tokens, the end-of-sequence token included when it was sampled."""
    logprobs: Float32[np.ndarray, " response"]
    """Log-probabilities under the behaviour policy at the sampling temperature."""
    finish_reason: str
    """Why the response ends: `stop` (end of sequence) or `length`."""
    weight_version: int
    """Number of optimizer updates after which the learner had the weights that sampled the response."""
    routes: UInt8[np.ndarray, "layers tokens k"] | UInt16[np.ndarray, "layers tokens k"] | None = None
    """The experts of all tokens of prompt and response but the last; None if the engine was not asked for them."""
    support_ids: Int32[np.ndarray, "response k"] | None = None
    """The tokens that could be sampled at each position, padded with -1; None if the engine was not asked for them."""
    episode: Episode | None = None
    """What an episode has beyond a response; None for a plain response of one turn."""

    def __post_init__(self) -> None:
        # A missing log-probability would shift all later ones by a token, and training would go on without an error.
        if len(self.ids) != len(self.logprobs):
            raise EngineFailure(
                f"the engine returned {len(self.ids)} token ids and {len(self.logprobs)} log-probabilities for one "
                "response; both must be equally many"
            )


def turns_in(mask: np.ndarray) -> np.ndarray:
    """The turn, from 0, of each of the n tokens that `mask` bool [R] selects, int64 [n].

    A turn is a run of selected tokens without a gap.
    """
    begins = mask & ~np.concatenate([[False], mask[:-1]])
    return np.cumsum(begins)[mask] - 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One scored response, a row of a stage.

    The texts are empty if `StageStore.read_update` has read the sample without them, as training mostly does.
    """

    group: int
    """The prompt's index in the stage; samples of one group share prompt and baseline."""
    problem: str
    """Id of the problem."""
    prompt_ids: Int32[np.ndarray, " prompt"]
    """Token ids of the prompt."""
    response_ids: Int32[np.ndarray, " response"]
    """Token ids of the response."""
    # They are float32, as SGLang computes them; in bfloat16 the ratio of a long response would be noise.
    engine_logprobs: Float32[np.ndarray, " response"]
    """The engine's log-probabilities, at the sampling temperature; NaN in a stage that was imported without any."""
    reward: float
    """The reward; NaN if the response has none."""
    weight_version: int
    """Number of updates that the weights that sampled the response have had."""
    finish_reason: str
    """Why the response ended: `stop`, or `length` if a limit cut it."""
    loss_mask: Bool[np.ndarray, " response"] | None = None
    """The tokens that are trained on; None for all."""
    support_ids: Int32[np.ndarray, "response k"] | None = None
    """The tokens that could be sampled at each position, padded with -1; None for the whole vocabulary."""
    text: str = ""
    """The response's text, as the verifier read it."""
    gold: str = ""
    """The right answer, as text."""
    extracted: str = ""
    """The answer that was found in the text."""
    why: str = ""
    """Why it got its score, in the reward function's words."""
    components: Mapping[str, float] = field(default_factory=dict, hash=False)
    """The score's parts by name, before their weights."""
    advantage: float | None = None
    """The advantage under the recipe that generated the response, for people to read. Training computes its own."""
    row: str = ""
    """The problem's row in its data set, as JSON; empty if the problem has none."""
    behaviour_logprobs: Float32[np.ndarray, " response"] | None = None
    """Log-probabilities under the behaviour policy, which importance ratios divide by: the engine's, or with
    `rollout.behaviour = "learner"` the learner's under the same weights. They are added when an update is read, not
    stored."""
    routes: Routes | None = None
    """Experts that the learner replays (`learner.routing_replay`); None lets the routers choose."""
    proximal_logprobs: Float32[np.ndarray, " response"] | None = None
    """Log-probabilities under the policy at the centre of the clip range, unless that is the current policy; not
    stored."""
    ref_logprobs: Float32[np.ndarray, " response"] | None = None
    """Log-probabilities under the reference policy, near which the KL penalty keeps the policy. They are not stored."""
    teacher_logprobs: Float32[np.ndarray, " response"] | None = None
    """Log-probabilities under the teacher, whose log-ratios are part of the tokens' advantages; not stored."""

    def __post_init__(self) -> None:
        columns = (self.behaviour_logprobs, self.proximal_logprobs, self.ref_logprobs, self.teacher_logprobs)
        arrays = [("logprobs", logprobs) for logprobs in (self.engine_logprobs, *columns)]
        # A mask or a column of another length would broadcast or shift in the packed row without an error.
        for what, values in (*arrays, ("a loss mask", self.loss_mask), ("support ids", self.support_ids)):
            if values is not None and len(values) != len(self.response_ids):
                tokens = len(self.response_ids)
                raise ValueError(f"group {self.group}: a response has {tokens} token ids, but {what} for {len(values)}")

    def trained(self, values: np.ndarray) -> np.ndarray:
        """Select the values of the T tokens that are trained on, [T, ...], from `values` [R, ...] of all tokens."""
        return values if self.loss_mask is None else values[self.loss_mask]

    def scattered(self, values: np.ndarray) -> np.ndarray:
        """Spread `values` [T] of the tokens that are trained on over all response tokens, [R]; the others get 0."""
        if self.loss_mask is None:
            return values
        row = np.zeros(len(self.loss_mask), dtype=values.dtype)
        row[self.loss_mask] = values
        return row

    @property
    def turns(self) -> np.ndarray:
        """int64 [T]: the turn, from 0, of each token that is trained on; a turn is a run of such tokens."""
        mask = np.ones(len(self.response_ids), dtype=bool) if self.loss_mask is None else self.loss_mask
        return turns_in(mask)

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def rewards_and_groups(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """The rewards, float64 [N], and the groups, int64 [N], of the samples."""
    return np.array([sample.reward for sample in samples]), np.array([sample.group for sample in samples])


def penalties(samples: Sequence[Sample]) -> np.ndarray:
    """float64 [N]: the overlong penalty that each sample's reward contains."""
    return np.array([sample.components.get(OVERLONG, 0.0) for sample in samples])


def trained_lengths(samples: Sequence[Sample]) -> list[int]:
    """The number of tokens of each response that are trained on."""
    return [len(sample.trained(sample.response_ids)) for sample in samples]
