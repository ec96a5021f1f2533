"""Health warnings from a run's metric rows: a sentence and the way out for each. docs/health.md lists them.

Bounds are wide, so that a healthy run has none. The bounds of ESS and veto are from docs/study.md: of 116 runs that
improved, the worst ended at an ESS of 0.77 with 3.5 % of the tokens vetoed; half of the 62 that fell ended below 0.63.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mugrpo_megatron.observe.metrics import Row, in_order, mean_in, values_in

EQUAL = 0.9
"""Share of groups with equal rewards."""
CUT = 0.5
"""Share of responses that reach the length limit."""
UNPARSED = 0.9
"""Share of held-out responses without an answer."""
SILENT, FALLEN = 0.003, 0.05
"""Entropy in nats, and as a share of what it was at the start, below which responses hardly vary."""
RISEN = 2.0
"""Entropy over what it was at the start, where it is still near its highest."""
ESS = 0.5
"""Effective sample size as a share of the tokens."""
VETOED = 0.2
"""Share of tokens that the veto or a mask drops."""
MISMATCH = 0.05
"""Mean |log π_engine − log π_learner| in nats: two correct implementations in bfloat16 stay below 0.02."""
CLIPPED = 0.95
"""Share of updates whose gradient is clipped."""
LEAST_UPDATES = 8
"""Fewer updates say nothing of a trend."""


@dataclass(frozen=True, slots=True)
class HealthWarning:
    """Something in a run's metrics that a healthy run does not have."""

    name: str
    text: str
    remedy: str

    @property
    def sentence(self) -> str:
        return f"{self.text}; {self.remedy}"

    @property
    def line(self) -> str:
        """As the console has it."""
        return f"warning: {self.sentence} (docs/health.md)"


def health_warnings(
    updates: Sequence[Row], stages: Sequence[Row], evals: Sequence[Row], clip_grad: float | None = None
) -> list[HealthWarning]:
    """Every sign in the rows of a run, which are in order and without repeated ones; `clip_grad` is the recipe's.

    Signs are of the run's last tenth: its last stage, or the last tenth of many stages or updates.
    """
    last = _tail(stages, 1)
    recent = _tail(updates, LEAST_UPDATES) if len(updates) >= LEAST_UPDATES else []
    some = (
        _equal_rewards(last),
        _truncated(last, evals[-1:]),
        _no_answer(evals[-1:]),
        _entropy(updates, recent),
        _beyond(recent, last),
        _clipped_gradient(recent, clip_grad),
        _fell(stages, evals),
    )
    return [sign for each in some for sign in each]


def _tail(rows: Sequence[Row], least: int) -> Sequence[Row]:
    return rows[-max(least, len(rows) // 10) :]


def _of_sets(rows: Iterable[Row], base: str) -> float | None:
    """The mean over held-out sets of a metric such as `unparsed`."""
    return next((mean_in([row], *(name for name in row if name.startswith(f"{base}/"))) for row in rows), None)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _named(stages: Sequence[Row]) -> str:
    first, last = stages[0]["stage"], stages[-1]["stage"]
    return f"stage {last}" if first == last else f"stages {first} to {last}"


def _equal_rewards(stages: Sequence[Row]) -> Iterator[HealthWarning]:
    share = mean_in(stages, "zero_variance_fraction")
    if share is not None and share >= EQUAL:
        reward = mean_in(stages, "reward_mean")
        yield HealthWarning(
            "equal rewards",
            f"{_percent(share)} of the groups of {_named(stages)} have equal rewards, {reward or 0.0:.3g} on average: "
            "they have no gradient, and nothing is learned from them",
            "read some with `mugrpo rollouts`: if all are wrong, the reward or the gold answers are broken or the "
            "problems too hard; if all are right, too easy",
        )


def _truncated(stages: Sequence[Row], evals: Sequence[Row]) -> Iterator[HealthWarning]:
    training, held_out = mean_in(stages, "truncated_fraction"), _of_sets(evals, "truncated")
    for share, whose, key in (
        (training, f"the responses of {_named(stages)}" if stages else "", "rollout.max_response_tokens"),
        (held_out, "the last evaluation's responses", "eval.max_tokens"),
    ):
        if share is not None and share >= CUT:
            yield HealthWarning(
                "truncated",
                f"{_percent(share)} of {whose} are cut off at the length limit",
                f"raise {key}, or find out why the model does not stop: its chat template, its end token, a collapse",
            )
            return


def _no_answer(evals: Sequence[Row]) -> Iterator[HealthWarning]:
    share = _of_sets(evals, "unparsed")
    if share is not None and share >= UNPARSED:
        yield HealthWarning(
            "no answer",
            f"no answer is found in {_percent(share)} of the held-out responses",
            "read some in the report; ask in data.system_prompt for the form that the reward reads, such as \\boxed{}",
        )


def _entropy(updates: Sequence[Row], recent: Sequence[Row]) -> Iterator[HealthWarning]:
    """Against the first tenth of the run; rising means that it is still within a tenth of its highest."""
    first, now = mean_in(updates[: len(recent)], "entropy"), mean_in(recent, "entropy")
    if first is None or now is None:
        return
    change = f"entropy has gone from {first:.3g} to {now:.3g} nats"
    if now < max(SILENT, FALLEN * first):
        yield HealthWarning(
            "entropy near zero",
            f"{change}: responses to one prompt hardly differ, so groups stop to have a signal",
            "lower optimizer.lr, raise objective.clip_high, or go back to an earlier checkpoint",
        )
    parts = [mean_in(updates[at : at + len(recent)], "entropy") for at in range(0, len(updates), len(recent))]
    highest = max(part for part in parts if part is not None)
    if now > RISEN * first and now >= 0.9 * highest:
        yield HealthWarning(
            "entropy rising",
            f"{change} and does not come back: the policy dissolves",
            "lower optimizer.lr, or shorten the stages (schedule.updates_per_stage)",
        )


def _beyond(recent: Sequence[Row], stages: Sequence[Row]) -> Iterator[HealthWarning]:
    ess, vetoed, distance = mean_in(recent, "ess"), mean_in(recent, "vetoed_fraction"), mean_in(stages, "mismatch_mean")
    if ess is not None and ess < ESS:
        yield HealthWarning(
            "low ESS",
            f"the effective sample size is {_percent(ess)} of the tokens: a few of them carry each update",
            "lower optimizer.lr, or shorten the stages (schedule.updates_per_stage)",
        )
    if vetoed is not None and vetoed > VETOED:
        yield HealthWarning(
            "much vetoed",
            f"{_percent(vetoed)} of the tokens are dropped by the veto or a mask",
            "lower optimizer.lr, shorten the stages, or lower objective.trigger_ratio",
        )
    if distance is not None and distance > MISMATCH:
        yield HealthWarning(
            "mismatch",
            f"engine and learner differ by {distance:.3g} nats a token on the same weights ({_named(stages)})",
            'set rollout.behaviour = "learner", give both the same dtype, and see `mugrpo doctor`',
        )


def _clipped_gradient(recent: Sequence[Row], clip_grad: float | None) -> Iterator[HealthWarning]:
    norms = values_in(recent, "grad_norm")
    clipped = sum(norm > clip_grad for norm in norms) if clip_grad else 0
    if norms and clipped >= CLIPPED * len(norms):
        yield HealthWarning(
            "gradient always clipped",
            f"{clipped} of the last {len(norms)} gradients were clipped to {clip_grad:g}, their median norm is "
            f"{statistics.median(norms):.3g}: every update has the same size, whatever its data say",
            "raise optimizer.clip_grad above the usual norm, or lower optimizer.lr if the norm keeps growing",
        )


def _fell(stages: Sequence[Row], evals: Sequence[Row]) -> Iterator[HealthWarning]:
    """The held-out mean's 95 % intervals, at the first and the last evaluation, do not touch."""
    if len(evals) < 2:
        return
    measure = "reward" if "reward/mean" in evals[-1] else "accuracy"
    before, after = (row.get(f"{measure}/mean") for row in (evals[0], evals[-1]))
    low, high = evals[0].get("low/mean"), evals[-1].get("high/mean")
    if before is None or after is None or low is None or high is None or high >= low:
        return
    rewards = values_in(stages, "reward_mean")
    text = f"held-out {measure} has fallen from {before:.3g} to {after:.3g}"
    if len(rewards) > 1 and rewards[-1] > rewards[0]:
        yield HealthWarning(
            "reward up, evaluation down",
            f"{text} while the training reward rose from {rewards[0]:.3g} to {rewards[-1]:.3g}",
            "read responses with a high reward: the reward is gamed, or the training problems are learned by heart",
        )
    else:
        yield HealthWarning(
            "evaluation down",
            text,
            "go back to an earlier checkpoint; lower optimizer.lr, or shorten the stages (schedule.updates_per_stage)",
        )


@dataclass(slots=True)
class HealthMonitor:
    """A sink of the metric log that says each sign when it appears: before a stage's updates, and after them."""

    say: Callable[[str], None]
    clip_grad: float | None
    rows: list[Row] = field(default_factory=list)
    """The updates, stages and evaluations that the run has logged, earlier processes included."""
    present: set[str] = field(default_factory=set)
    """Names of the signs that have been said and are still there."""

    def __call__(self, row: Row) -> None:
        self.take(row)
        if row["kind"] == "stage" or (row["kind"] == "phase" and row["phase"] == "optimize"):
            rows = self.rows
            updates, stages, evals = in_order(rows, "update"), in_order(rows, "stage"), in_order(rows, "eval")
            current = health_warnings(updates, stages, evals, self.clip_grad)
            for sign in current:
                if sign.name not in self.present:
                    self.say(sign.line)
            self.present = {sign.name for sign in current}

    def take(self, row: Row) -> None:
        """Remember a row."""
        if row["kind"] in ("update", "stage", "eval"):
            self.rows.append(row)
