"""Warns about symptoms in a run's metrics, with a sentence and a remedy for each. docs/troubleshooting.md lists them.

The bounds are wide, so that a healthy run gets no warning. Those of ESS and veto follow from docs/study/cells.csv: at
the end of the 116 runs that improved, the lowest ESS was 0.77, and at most 3.5 % of the tokens were vetoed; half of
the 62 runs that got worse ended with an ESS below 0.63.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from mugrpo_megatron.observe.metrics import Row, in_order, mean_in, values_in
from mugrpo_megatron.pages import page_address

EQUAL = 0.9
"""Fraction of groups with equal rewards from which on a warning is given."""
UNSCORED = 0.2
"""Fraction of responses without a reward from which on a warning is given."""
CUT = 0.5
"""Fraction of truncated responses from which on a warning is given."""
UNPARSED = 0.9
"""Fraction of held-out responses without an answer from which on a warning is given."""
SILENT, FALLEN = 0.003, 0.05
"""Bounds of the entropy: in nats, and as a fraction of the entropy at the start. Below the larger of the two, responses
hardly vary."""
RISEN = 2.0
"""Multiple of the entropy at the start above which a warning is given."""
ESS = 0.5
"""Effective sample size, as a fraction of the tokens, below which a warning is given."""
VETOED = 0.2
"""Fraction of tokens dropped by the veto or a mask above which a warning is given."""
MISMATCH = 0.05
"""Mean |log π_engine − log π_learner| in nats above which a warning is given; two correct implementations stay below
0.02 in bfloat16."""
CLIPPED = 0.95
"""Fraction of updates with a clipped gradient from which on a warning is given."""
MIN_UPDATES = 8
"""Fewest updates in which a trend can be seen."""
LEAP, LEAP_TOKEN = 1.0, 0.001
"""Most nats of KL, for a response and for a token, by which each of a stage's first updates may move the policy. A
policy that moves further than both is soon ruined: a Llama of 135M parameters moved 13 nats in its first update at 20
times the learning rate at which it learns."""
STEP = 0.05
"""A warning suggests a learning rate at which an update moves the policy by this share of the bound."""


@dataclass(frozen=True, slots=True)
class HealthWarning:
    """A symptom in a run's metrics, and its remedy."""

    name: str
    text: str
    remedy: str

    @property
    def sentence(self) -> str:
        return f"{self.text}; {self.remedy}"

    @property
    def address(self) -> str:
        """The address of the section of docs/troubleshooting.md that explains the warning."""
        return page_address("troubleshooting", self.name)

    @property
    def line(self) -> str:
        return f"warning: {self.sentence} ({self.address})"


def health_warnings(
    updates: Sequence[Row], stages: Sequence[Row], evals: Sequence[Row], clip_grad: float | None = None
) -> list[HealthWarning]:
    """Returns the warnings that the latest rows of a run give: the last tenth of its stages and updates, but at least
    one stage and MIN_UPDATES updates. Trends are measured against the run's first rows.

    Rows are in order, without those that a resumed run replaced; `clip_grad` is the recipe's.
    """
    last = _tail(stages, 1)
    recent = _tail(updates, MIN_UPDATES) if len(updates) >= MIN_UPDATES else []
    warnings = (
        _equal_rewards(last),
        _unscored(last),
        _truncated(last, evals[-1:]),
        _no_answer(evals[-1:]),
        _entropy(updates, recent),
        _off_policy(recent, last),
        _leap(updates),
        _clipped_gradient(recent, clip_grad),
        _fell(stages, evals),
    )
    return list(chain.from_iterable(warnings))


def _tail(rows: Sequence[Row], minimum: int) -> Sequence[Row]:
    return rows[-max(minimum, len(rows) // 10) :]


def _mean_over_sets(rows: Iterable[Row], base: str) -> float | None:
    """Returns the mean over held-out sets of a metric such as `unparsed`, in the first row; None without a row or a
    value."""
    return next((mean_in([row], *(name for name in row if name.startswith(f"{base}/"))) for row in rows), None)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _stage_names(stages: Sequence[Row]) -> str:
    first, last = stages[0]["stage"], stages[-1]["stage"]
    return f"stage {last}" if first == last else f"stages {first} to {last}"


def _equal_rewards(stages: Sequence[Row]) -> Iterator[HealthWarning]:
    share = mean_in(stages, "zero_variance_fraction")
    if share is not None and share >= EQUAL:
        reward = mean_in(stages, "reward_mean")
        yield HealthWarning(
            "equal rewards",
            f"{_percent(share)} of the groups of {_stage_names(stages)} have equal rewards, {reward or 0.0:.3g} on "
            "average: they have no gradient, and nothing is learned from them",
            "read some with `mugrpo rollouts`: if all are wrong, the reward or the gold answers are broken or the "
            "problems too hard; if all are right, too easy",
        )


def _unscored(stages: Sequence[Row]) -> Iterator[HealthWarning]:
    share = mean_in(stages, "unscored_fraction")
    if share is not None and share >= UNSCORED:
        yield HealthWarning(
            "no reward",
            f"{_percent(share)} of the responses of {_stage_names(stages)} have no reward and are left out",
            f"find out where the reward function returns None, fails or runs into a limit ({page_address('rewards')})",
        )


def _truncated(stages: Sequence[Row], evals: Sequence[Row]) -> Iterator[HealthWarning]:
    training, held_out = mean_in(stages, "truncated_fraction"), _mean_over_sets(evals, "truncated")
    for share, responses, key in (
        (training, f"the responses of {_stage_names(stages)}" if stages else "", "rollout.max_response_tokens"),
        (held_out, "the last evaluation's responses", "eval.max_tokens"),
    ):
        if share is not None and share >= CUT:
            yield HealthWarning(
                "truncated",
                f"{_percent(share)} of {responses} are cut off at the length limit",
                f"raise {key}, or find out why the model does not stop: its chat template, its end token, a collapse",
            )
            return


def _no_answer(evals: Sequence[Row]) -> Iterator[HealthWarning]:
    share = _mean_over_sets(evals, "unparsed")
    if share is not None and share >= UNPARSED:
        yield HealthWarning(
            "no answer",
            f"no answer is found in {_percent(share)} of the held-out responses",
            "read some in the report; ask in data.system_prompt for the form that the reward reads, such as \\boxed{}",
        )


def _entropy(updates: Sequence[Row], recent: Sequence[Row]) -> Iterator[HealthWarning]:
    """Warns about an entropy that has fallen or risen since the run's first updates.

    The entropy counts as risen only while its recent mean is at least 0.9 of the highest mean that the run has had.
    """
    first, last = mean_in(updates[: len(recent)], "entropy"), mean_in(recent, "entropy")
    if first is None or last is None:
        return
    change = f"entropy has gone from {first:.3g} to {last:.3g} nats"
    if last < max(SILENT, FALLEN * first):
        yield HealthWarning(
            "entropy near zero",
            f"{change}: responses to one prompt hardly differ, so groups have no signal",
            "lower optimizer.lr, raise objective.clip_high, or go back to an earlier checkpoint",
        )
    means = [mean_in(updates[i : i + len(recent)], "entropy") for i in range(0, len(updates), len(recent))]
    if last > RISEN * first and last >= 0.9 * max(mean for mean in means if mean is not None):
        yield HealthWarning(
            "entropy rising",
            f"{change} and does not fall again: responses become random",
            "lower optimizer.lr, or shorten the stages (schedule.updates_per_stage)",
        )


def _off_policy(recent: Sequence[Row], stages: Sequence[Row]) -> Iterator[HealthWarning]:
    ess, vetoed, distance = mean_in(recent, "ess"), mean_in(recent, "vetoed_fraction"), mean_in(stages, "mismatch_mean")
    if ess is not None and ess < ESS:
        yield HealthWarning(
            "low ESS",
            f"the effective sample size is {_percent(ess)} of the tokens: a few of them decide each update",
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
            f"engine and learner differ by {distance:.3g} nats a token on equal weights ({_stage_names(stages)})",
            'set rollout.behaviour = "learner", give both the same dtype, and see `mugrpo doctor`',
        )


def _leap(updates: Sequence[Row]) -> Iterator[HealthWarning]:
    """Warns if the first updates of the newest stage have moved the policy too far from the one that sampled the
    stage."""
    rows = [row for row in updates if row.get("kl_response") is not None and row["stage"] == updates[-1]["stage"]]
    for row in rows[1:MIN_UPDATES]:
        # At age 0 the KL was measured before the stage's first update: it is the mismatch of engine and learner.
        taken, nats = row["age"] - rows[0]["age"], row["kl_response"] - rows[0]["kl_response"]
        bound = taken * max(LEAP, LEAP_TOKEN * row["kl_response"] / (row.get("kl_k3") or row["kl_response"] or 1.0))
        if rows[0]["age"] or nats <= bound:
            continue
        rates = values_in(rows[: rows.index(row)], "lr")
        # KL grows with the square of a small step. One measurement is no reason to divide the rate by more than 100.
        rate = f" near {max(rates) * max(0.01, (STEP * bound / nats) ** 0.5):.1g}" if rates else ""
        yield HealthWarning(
            "leap",
            f"the first {'update' if taken == 1 else f'{taken} updates'} of stage {row['stage']} moved the policy "
            f"{nats:.3g} nats a response{f' at a rate of {max(rates):.2g}' if rates else ''}: this ruins a model",
            f"start again from before it with optimizer.lr{rate or ' lower'}",
        )
        return


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
    """Warns if a held-out mean has fallen: its 95 % interval at the last evaluation is below that at the first."""
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
            "read responses with a high reward: they get it by a trick, or the training problems are learned by heart",
        )
    else:
        yield HealthWarning(
            "evaluation down",
            text,
            "go back to an earlier checkpoint; lower optimizer.lr, or shorten the stages (schedule.updates_per_stage)",
        )


@dataclass(slots=True)
class HealthMonitor:
    """A sink of the metric log that prints health warnings: each once, and again only after it has ceased to apply.

    Rows are examined before and after the updates of a stage; a policy that moves too far (LEAP) is reported at once.
    """

    say: Callable[[str], None]
    clip_grad: float | None
    rows: list[Row] = field(default_factory=list)
    """The run's rows of updates, stages and evaluations; rows of earlier processes are included."""
    present: set[str] = field(default_factory=set)
    """Names of the warnings that were printed and still apply."""

    def __call__(self, row: Row) -> None:
        self.take(row)
        if row["kind"] == "stage" or (row["kind"] == "phase" and row["phase"] == "optimize"):
            rows = self.rows
            updates, stages, evals = in_order(rows, "update"), in_order(rows, "stage"), in_order(rows, "eval")
            current = health_warnings(updates, stages, evals, self.clip_grad)
            self._say_new(current)
            self.present = {warning.name for warning in current}
        elif row["kind"] == "update" and 0 < row["age"] < MIN_UPDATES:
            self._say_new(list(_leap(in_order(self.rows[-2 * MIN_UPDATES :], "update"))))

    def _say_new(self, warnings: Iterable[HealthWarning]) -> None:
        for warning in warnings:
            if warning.name not in self.present:
                self.say(warning.line)
                self.present.add(warning.name)

    def take(self, row: Row) -> None:
        if row["kind"] in ("update", "stage", "eval"):
            self.rows.append(row)
