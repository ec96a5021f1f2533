"""The table of all metrics: name, unit and meaning. A metric that is not in it cannot be logged; docs/metrics.md is
made from it."""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from mugrpo_megatron.algorithm import diagnostics
from mugrpo_megatron.recipe.scoring import MEAN

Row = dict[str, Any]
Kind = Literal["update", "stage", "eval", "phase", "engine", "event", "process"]

KINDS: dict[Kind, str] = {
    "update": "A row for each optimizer update. `update` counts from 0 over the run, and `age` from 0 inside the "
    "stage.",
    "stage": "A row for the responses of each stage, written before its first update.",
    "eval": "A row for each evaluation on the held-out sets. `update` counts the optimizer updates before it (0: "
    "before "
    "training), and `age` those of them that belong to the stage (0: at a stage's start, or after the last stage). "
    "SET is a set's short name, such as math500, or a file's name without its ending. "
    "Results are named `accuracy` if `reward.function` is `math`, or `code` with "
    '`reward.code.reward = "all"`; otherwise `reward`.',
    "phase": "A row for each [phase](#phases): it ran from `start` to `end` (Unix seconds) as part of `stage`.",
    "engine": "A row for the load of engine number `engine` at one time while it generated `stage`; at most 241 rows "
    "a phase.",
    "event": "A row for each event of the run, such as a resume or an engine restart.",
    "process": "A row for each start of the run's process. `environment` holds the versions and the machine.",
}
"""`kind` of a row of metrics.jsonl -> its meaning."""

ROW_KEYS: dict[Kind, tuple[str, ...]] = {
    "update": ("time", "stage", "update", "age"),
    "stage": ("time", "stage"),
    "eval": ("time", "stage", "update", "age"),
    "phase": ("phase", "stage", "start", "end"),
    "engine": ("time", "stage", "engine"),
    "event": ("time", "event", "text"),
    "process": ("time", "environment"),
}
"""Kind of a row -> its keys that are not metrics, such as its time and its position in the run."""

PHASES: dict[str, str] = {
    "start": "Learner and engine start.",
    "sync": "The learner's weights are sent to the engine.",
    "generate": "The engine samples the stage's responses; scoring overlaps with it.",
    "score": "The verifier scores the responses that are left after generation has ended.",
    "logprobs": "The learner computes logprobs of new responses: of a few, to measure the engine's mismatch; of "
    'all, if `rollout.behaviour = "learner"` or `objective.kl_ref` is set. Inside `optimize`, it computes those of '
    "the proximal policy if `objective.proximal_every` is above 1.",
    "auxiliary": "A model of `[auxiliary.NAME]` starts, scores the stage, and ends.",
    "probe": "The learner computes logprobs of 32 responses, for the report's heat map.",
    "optimize": "The learner takes the stage's updates.",
    "save": "The learner's state is written to disk.",
    "eval": "Held-out problems are sampled and scored.",
}
"""Phases of a run's wall-clock."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: a number in rows of `kind`."""

    kind: Kind
    name: str
    """SET in it stands for the name of a held-out set; NAME for that of a component of the reward, of a judge, or of a
    value that `objective.diagnostics` returns."""
    unit: str
    meaning: str


MISMATCH_RESPONSES = 64
"""Number of a stage's responses on which engine and learner are compared: enough tokens for a 99th percentile, and
cheap even in a stage of four updates."""

LARGEST_TIME = 1e11
"""Largest Unix time in seconds that a row may have; a larger number means that the file is damaged."""
LARGEST_COUNT = 10**7
"""Largest number of a stage, an update or an engine that a row may have; a larger one means that the file is
damaged."""

COMPONENT = re.compile(r"[A-Za-z0-9_.-]+")
"""Matches the name of a component of the reward: `function`, or `function.component`."""

SET_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Matches the short name of a held-out set (`data.problems.named_sources`)."""

METRICS_OF: dict[Kind, tuple[tuple[str, str, str], ...]] = {
    "update": (
        *((name, unit or "1", f"{meaning[0].upper()}{meaning[1:]}.") for name, unit, meaning in diagnostics.METRICS),
        ("staleness", "updates",
         "Number of updates since the weights that sampled the responses: the age."),
        ("entropy", "nats", "Mean entropy of the policy's next-token distribution at response tokens."),
        ("user/NAME", "any", "What `objective.diagnostics` returns under NAME."),
        ("kl_response", "nats",
         "`kl_k3` times the tokens of a response: how far the policy has moved from the one that sampled the stage."),
        ("grad_norm", "1", "Global gradient norm before clipping."),
        ("lr", "1", "Learning rate that the update used."),
        ("skipped", "0 or 1", "1 if the update was skipped because its gradient was not finite."),
        ("overflowed", "0 or 1", "1 if a float16 gradient overflowed: then no step is taken, and the loss scale is "
         "halved."),
        ("loss_scale", "1", "Factor by which the loss is scaled in float16."),
        ("reward_mean", "reward", "Mean reward of the update's responses."),
        ("reward/NAME", "reward", "Mean of the reward's component NAME, before its weight."),
        ("zero_variance_fraction", "fraction", "Share of groups whose rewards are all equal, before the overlong "
         "penalty."),
        ("tokens", "tokens", "Response tokens that the update trained on."),
        ("packed_efficiency", "fraction", "Useful tokens divided by computed tokens, which include padding."),
        ("seconds", "s", "Wall-clock seconds of the update."),
        ("tflops", "10^12 FLOP/s",
         "The model's FLOP of the update, per second and device. The forward pass counts once and the backward pass "
         "twice; "
         "attention is causal. Padding and recomputed layers do not count."),
        ("mfu", "fraction",
         "`tflops` divided by the device's dense bfloat16 peak in its data sheet. It is missing for devices whose "
         "peak is "
         "not known here, such as a CPU."),
        ("routes_flipped_tokens", "fraction",
         "With `learner.routing_replay`: share of tokens, prompts included, that the current router would send to "
         "other "
         "experts than the replayed ones in some layer."),
        ("routes_flipped", "fraction", "The same share of the routers' choices, one for each token and layer."),
    ),
    "stage": (
        ("reward_mean", "reward", "Mean reward of the stage's responses."),
        ("reward/NAME", "reward", "Mean of the reward function or term NAME over the responses to which it applies, "
         "before its weight."),
        ("response_length_mean", "tokens", "Mean response length."),
        ("response_length_max", "tokens", "Tokens of the longest response."),
        ("truncated_fraction", "fraction", "Share of responses that were truncated at `rollout.max_response_tokens`."),
        ("zero_variance_fraction", "fraction", "Share of the stage's groups whose rewards are all equal, before the "
         "overlong penalty."),
        ("unscored_fraction", "fraction", "Share of sampled responses that have no reward and are therefore left out."),
        ("generated_tokens", "tokens", "Number of response tokens that were sampled."),
        ("responses", "responses", "Number of responses that the stage keeps."),
        ("mismatch_mean", "nats",
         "Mean |log π_engine − log π_learner| over response tokens, with the same weights."),
        ("mismatch_p99", "nats", "99th percentile of |log π_engine − log π_learner|."),
        ("mismatch_max", "nats", "Largest |log π_engine − log π_learner|."),
    ),
    "eval": (
        ("accuracy/SET", "fraction", "Share of the set's responses that are right (mean@k)."),
        ("accuracy/mean", "fraction", "Unweighted mean of the sets' accuracies."),
        ("reward/SET", "reward", "Mean reward of the set's responses."),
        ("reward/mean", "reward", "Unweighted mean of the sets' mean rewards."),
        ("low/SET", "as above", "Lower end of the 95 % interval, clustered by problem."),
        ("low/mean", "as above", "Lower end of the 95 % interval, clustered by problem."),
        ("high/SET", "as above", "Upper end of the 95 % interval, clustered by problem."),
        ("high/mean", "as above", "Upper end of the 95 % interval, clustered by problem."),
        ("problems/SET", "problems", "Number of problems that were evaluated."),
        ("samples/SET", "responses", "Number of responses to each problem: the k of mean@k."),
        ("truncated/SET", "fraction", "Share of responses that were cut off at `eval.max_tokens`."),
        ("unparsed/SET", "fraction", "Share of responses in which `math` found no answer."),
        ("called/SET", "fraction", "Share of episodes (`rollout.function`) in which the model called a tool."),
        ("failed/SET", "fraction", "Share of episodes that failed; they score 0."),
        ("passed/SET", "fraction", "Share of problems with a right response among the k: pass@k."),
        ("tokens", "tokens", "Number of response tokens that were sampled, over all sets."),
    ),
    "phase": (
        ("tokens", "tokens", "Number of tokens that the phase generated or trained on."),
        ("tokens_per_second", "tokens/s", "`tokens` divided by the phase's seconds."),
        ("tokens_per_second_per_device", "tokens/s", "`tokens_per_second` divided by the ranks of the run."),
        ("learner_memory_peak", "bytes",
         "Peak device memory that a rank's learner reserved during the phase, the largest over ranks. On a CPU: the "
         "largest "
         "resident memory of a rank's process so far."),
        ("engine_memory", "bytes",
         "Resident host memory of the largest engine's processes at the end of the phase. On CUDA: the memory in use "
         "on its leader's device, all processes together."),
        ("memory_before", "bytes",
         "Memory in use on a rank's device before an auxiliary model starts, all processes together, the largest over "
         "ranks. On a CPU: resident memory of a rank's process."),
        ("memory_after", "bytes", "The same as `memory_before`, after the auxiliary model has ended."),
        ("kl_teacher", "nats",
         "Mean of log π − log π_teacher over the stage, where π is the policy that sampled it: an unbiased estimate of "
         "KL(π | teacher) per token."),
        ("reward/NAME", "reward", "Mean of the scores that the judge NAME gave to responses of the stage."),
        ("unparsed/NAME", "responses", "Number of responses for which the answer of the judge NAME had no score."),
        ("bytes", "bytes", "Number of bytes that the phase moved."),
        ("texts_mismatch", "nats",
         "Mean |log π_engine − log π_learner| over a few texts, before a run generates for the first time since its "
         "start."),
        ("checked", "tensors", "Number of the engine's tensors that were compared with the learner's, bit by bit."),
    ),
    "engine": (
        ("tokens", "tokens", "Number of tokens that were sampled since generation began, those of unfinished "
         "responses included."),
        ("running", "requests", "Number of requests that are decoded together."),
        ("queued", "requests", "Number of requests that wait in the engine."),
        ("kv_use", "fraction", "Share of the KV cache that holds tokens."),
    ),
}  # fmt: skip
"""Kind of a row -> (name, unit, meaning) of its metrics; see `Metric`."""

METRICS = tuple(Metric(kind, *row) for kind, rows in METRICS_OF.items() for row in rows)
"""All metrics; a name may appear for rows of several kinds."""

NAMES = {kind: frozenset(name for name, *_ in METRICS_OF.get(kind, ())) for kind in KINDS}
"""Kind of a row -> its metric names."""


def is_defined(kind: Kind, name: str) -> bool:
    """Whether a row of `kind` may have this metric."""
    base, slash, label = name.partition("/")
    if not slash or label == MEAN:
        return name in NAMES[kind]
    forms = (("SET", SET_NAME), ("NAME", COMPONENT))
    return any(f"{base}/{form}" in NAMES[kind] and pattern.fullmatch(label) for form, pattern in forms)


def check_metrics(kind: Kind, names: Iterable[str]) -> None:
    """Raise ValueError if rows of `kind` cannot have one of these metrics."""
    if unknown := sorted(name for name in names if not is_defined(kind, name)):
        raise ValueError(f"{kind} row with undefined metrics {', '.join(unknown)}; define them in observe/metrics.py")


def check_row(row: Any) -> None:
    """Raise ValueError unless `row`, a value from metrics.jsonl, is an object with the keys of its kind (`ROW_KEYS`).

    Its metrics have to be finite numbers; outside phases they may be null, except `problems/SET` and `samples/SET`. The
    names of metrics are not checked, since versions differ in them.
    """
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str) or row["kind"] not in ROW_KEYS:
        raise ValueError("it is not an object with a known `kind`")
    kind: Kind = row["kind"]
    wrong = [key for key in ROW_KEYS[kind] if key not in row or not _has_type(key, row[key])]
    counts = [key for key in row if key.startswith(("problems/", "samples/"))]
    wrong += [key for key in counts if not _number(row[key])]
    metrics = row.keys() - {"kind", "not_finite", *ROW_KEYS[kind], *counts}
    wrong += [key for key in sorted(metrics) if not (_number(row[key]) or (row[key] is None and kind != "phase"))]
    if not isinstance(row.get("not_finite", {}), dict):
        wrong.append("not_finite")
    if wrong:
        raise ValueError(f"kind {kind}: {', '.join(wrong)} missing or of the wrong type")
    if kind == "phase" and row["end"] < row["start"]:
        raise ValueError("its phase ends before it starts")


def in_order(rows: Iterable[Row], kind: Kind) -> list[Row]:
    """Returns the rows of `kind` in order, without those that a resumed run replaced.

    A row whose update (or stage) was logged before replaces that earlier row and all rows after it.
    """
    key = "stage" if kind == "stage" else "update"
    ordered: list[Row] = []
    for row in rows:
        if row["kind"] == kind:
            while ordered and ordered[-1][key] >= row[key]:
                ordered.pop()
            ordered.append(row)
    return ordered


def values_in(rows: Iterable[Row], *names: str) -> list[float]:
    """Returns the values that the rows have for these metrics."""
    return [row[name] for row in rows for name in names if row.get(name) is not None]


def mean_in(rows: Iterable[Row], *names: str) -> float | None:
    """Returns the mean of these metrics in the rows; None if no row has one of them."""
    values = values_in(rows, *names)
    return statistics.fmean(values) if values else None


def _has_type(key: str, value: Any) -> bool:
    """Whether a value has the type of its key, one of those in `ROW_KEYS`."""
    if key in ("time", "start", "end"):
        return _number(value) and 0 <= value < LARGEST_TIME
    if key in ("stage", "update", "age", "engine"):
        return type(value) is int and 0 <= value < LARGEST_COUNT
    if key == "environment":
        return isinstance(value, dict)
    return isinstance(value, str) and (key != "phase" or value in PHASES)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # NaN fails the comparison, too
