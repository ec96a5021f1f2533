"""The records between data and learner: problems, prompts, responses, scored samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.recipe.scoring import OVERLONG

if TYPE_CHECKING:  # tests check what the types say (tests/shapes.py); a run does without the package
    from jaxtyping import Bool, Float32, Int32, UInt8, UInt16

UNSCORED = "group.unscored"
"""Key in a sample's `components`: the share of its group's responses that got no reward, and so are no samples."""
Message = Mapping[str, Any]
"""A chat message: `role`, `content` (text, or null beside other fields), and what else its row has for a template."""


class Routes(Protocol):
    """Experts that the routers of a mixture of experts chose for a prompt and its response, in memory or on disk."""

    def read(self, layers: Sequence[int]) -> np.ndarray:
        """uint8 or uint16 [len(layers), P + R - 1, k]: the experts of these layers, counted from 0.

        The last token has none: nothing is sampled after it.
        """
        ...


@dataclass(frozen=True, slots=True)
class InMemoryRoutes:
    """Routes in memory, uint8 or uint16 [layers, P + R - 1, k]."""

    experts: np.ndarray

    def read(self, layers: Sequence[int]) -> np.ndarray:
        return self.experts[list(layers)]


def expert_type(experts: int) -> type[np.uint8] | type[np.uint16]:
    """The smallest type that counts a layer's experts from 0."""
    return np.uint8 if experts <= 256 else np.uint16


@dataclass(frozen=True, slots=True)
class Problem:
    """One verifiable problem."""

    id: str
    """Id that is unique within the data set: `source:line`."""
    question: str
    answer: str
    """The right answer as text, which the reward function `math` compares with. Of a worked
    solution it is the last answer; of a gold that is not text it is the JSON text."""
    source: str = ""
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
    """A problem rendered to token ids; `index` is its place in the stage (update * prompts_per_update + position)."""

    index: int
    problem: Problem
    ids: list[int]
    logprob_tokens: int = 0
    """Tokens at the end of `ids` whose logprobs the engine returns instead of sampling; 0 to sample a response."""
    support_ids: Int32[np.ndarray, "logprob_tokens k"] | None = field(default=None, hash=False)
    """Support ids of the tokens that `logprob_tokens` counts, as in `Sample.support_ids`."""


@dataclass(frozen=True, slots=True)
class Episode:
    """A response of several turns with text of its environment, by `rollout.function` or a program, `rollout.agent`."""

    prompt_ids: Int32[np.ndarray, " prompt"]
    """Ids of the tokens before the first one that the model sampled."""
    mask: Bool[np.ndarray, " response"]
    """The tokens that the model sampled; the others are its environment's, with logprobs of 0."""
    reward: float | None = None
    """The function's reward; None if the verifier scores the last turn."""
    why: str = ""
    """Reason of the reward or of the failure."""
    failed: bool = False
    """Whether the episode failed, so that none of its turns counts: an evaluation scores it 0, and training leaves it
    out."""
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Numbers by name: turns, calls, seconds, and what else the function returned."""
    answer: str | None = None
    """Text that the verifier scores instead of the last turn."""
    scored_with_previous: bool = False
    """Whether this is a further response of the same episode as the one before it in the group, and has that one's
    score."""

    @property
    def settled(self) -> bool:
        """Whether the verifier has nothing left to score."""
        return self.failed or self.reward is not None or self.scored_with_previous

    @property
    def last_turn(self) -> int:
        """Index of the first token of the last turn."""
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
    """Reason for the end of the response: `stop` (end-of-sequence) or `length`."""
    weight_version: int
    """Number of optimizer updates after which the learner had the weights that sampled the response."""
    routes: UInt8[np.ndarray, "layers tokens k"] | UInt16[np.ndarray, "layers tokens k"] | None = None
    """Experts of the prompt's and the response's tokens but the last, if they were asked for."""
    support_ids: Int32[np.ndarray, "response k"] | None = None
    """The tokens that could be sampled at each place, -1 where fewer than k, if the engine was asked."""
    episode: Episode | None = None
    """The episode that the response is; None for a plain response of one turn."""

    def __post_init__(self) -> None:
        # A missing logprob would shift all later ones by a token and train silently.
        if len(self.ids) != len(self.logprobs):
            raise EngineFailure(f"the engine returned {len(self.ids)} token ids and {len(self.logprobs)} logprobs")


def turns_in(mask: np.ndarray) -> np.ndarray:
    """int64 [tokens inside]: the number, from 0, of the run of tokens inside the mask that each of them is in."""
    begins = mask & ~np.concatenate([[False], mask[:-1]])
    return np.cumsum(begins)[mask] - 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One scored response, a row of the stage store.

    What training does not read is empty where training has read it.
    """

    group: int
    """The prompt's index in the stage; samples of one group share prompt and baseline."""
    problem: str
    prompt_ids: Int32[np.ndarray, " prompt"]
    response_ids: Int32[np.ndarray, " response"]
    # float32 as SGLang computes them: in bfloat16 a ratio of long responses would be noise.
    engine_logprobs: Float32[np.ndarray, " response"]
    """The engine's log-probabilities, at the sampling temperature; NaN in a stage that was imported without any."""
    reward: float
    weight_version: int
    finish_reason: str
    loss_mask: Bool[np.ndarray, " response"] | None = None
    """The tokens that are trained on; None for all."""
    support_ids: Int32[np.ndarray, "response k"] | None = None
    """The tokens that could be sampled at each place, -1 where fewer than k; None for the vocabulary."""
    text: str = ""
    """The response's text, as the verifier read it."""
    gold: str = ""
    extracted: str = ""
    """The answer that was found in the text."""
    why: str = ""
    """Reason of the score."""
    components: Mapping[str, float] = field(default_factory=dict, hash=False)
    """The score's parts by name, before their weights."""
    advantage: float | None = None
    """The advantage by the recipe that generated the response, written for readers. Training computes its own."""
    row: str = ""
    """The problem's row in its data set, as JSON; empty where it has none."""
    behaviour_logprobs: Float32[np.ndarray, " response"] | None = None
    """Log-probabilities that importance ratios are taken against: the engine's, or with `rollout.behaviour = "learner"`
    the learner's under the same weights. They are added when an update is read, not stored."""
    routes: Routes | None = None
    """Experts to replay (`learner.routing_replay`); None lets the routers choose."""
    proximal_logprobs: Float32[np.ndarray, " response"] | None = None
    """Log-probabilities under the policy at the centre of the clip range, unless that is the current policy; not
    stored."""
    ref_logprobs: Float32[np.ndarray, " response"] | None = None
    """Log-probabilities under the reference policy, which the KL penalty keeps the policy near; not stored."""
    teacher_logprobs: Float32[np.ndarray, " response"] | None = None
    """Log-probabilities under the teacher, whose log-ratios are part of the tokens' advantages; not stored."""

    def __post_init__(self) -> None:
        columns = (self.behaviour_logprobs, self.proximal_logprobs, self.ref_logprobs, self.teacher_logprobs)
        arrays = [("logprobs", logprobs) for logprobs in (self.engine_logprobs, *columns)]
        # A mask or a column of another length would broadcast or shift in the packed row without an error.
        for what, values in (*arrays, ("a loss mask", self.loss_mask), ("support ids", self.support_ids)):
            if values is not None and len(values) != len(self.response_ids):
                raise ValueError(f"group {self.group}: {len(self.response_ids)} token ids, {what} of {len(values)}")

    def trained(self, values: np.ndarray) -> np.ndarray:
        """Selects the tokens trained on from values [R, ...] of all response tokens."""
        return values if self.loss_mask is None else values[self.loss_mask]

    def scattered(self, values: np.ndarray) -> np.ndarray:
        """Puts values of the tokens trained on in their places among all response tokens [R]; others get 0."""
        if self.loss_mask is None:
            return values
        row = np.zeros(len(self.loss_mask), dtype=values.dtype)
        row[self.loss_mask] = values
        return row

    @property
    def turns(self) -> np.ndarray:
        """int64 [T]: the turn of each token trained on, from 0; a turn is a run of them in the loss mask."""
        mask = np.ones(len(self.response_ids), dtype=bool) if self.loss_mask is None else self.loss_mask
        return turns_in(mask)

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def rewards_and_groups(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Rewards, float64 [N], and groups, int64 [N], of the samples."""
    return np.array([sample.reward for sample in samples]), np.array([sample.group for sample in samples])


def penalties(samples: Sequence[Sample]) -> np.ndarray:
    """float64 [N]: the overlong penalty in each reward."""
    return np.array([sample.components.get(OVERLONG, 0.0) for sample in samples])


def trained_lengths(samples: Sequence[Sample]) -> list[int]:
    """Tokens of each response that are trained on."""
    return [len(sample.trained(sample.response_ids)) for sample in samples]
