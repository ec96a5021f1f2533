"""Signs that a run is sick: each is there in a run made so, and in no healthy one."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.evaluation.estimators import SetFigures, clustered_interval, figures_of
from mugrpo_megatron.observe.health import MIN_UPDATES, HealthMonitor, health_warnings

Row = dict[str, Any]
CURVES = Path(__file__).parents[2] / "docs" / "study" / "curves.csv"
UPDATES = 80


def healthy() -> dict[str, list[Row]]:
    """Rows of a run of four stages that learns."""
    return {
        "update": [
            {"update": at, "entropy": 0.7 - at / 400, "ess": 0.9, "vetoed_fraction": 0.01, "grad_norm": 0.5 + (at % 3)}
            for at in range(UPDATES)
        ],
        "stage": [
            {
                "stage": stage,
                "reward_mean": 0.2 + 0.1 * stage,
                "zero_variance_fraction": 0.3,
                "truncated_fraction": 0.02,
                "mismatch_mean": 0.01,
            }
            for stage in range(4)
        ],
        "eval": [
            {
                "update": 20 * at,
                "accuracy/mean": 0.5 + 0.05 * at,
                "low/mean": 0.46 + 0.05 * at,
                "high/mean": 0.54 + 0.05 * at,
                "truncated/math500": 0.02,
                "unparsed/math500": 0.03,
            }
            for at in range(5)
        ],
    }


def names_of(rows: dict[str, list[Row]]) -> list[str]:
    return [sign.name for sign in health_warnings(rows["update"], rows["stage"], rows["eval"], clip_grad=1.0)]


def late(kind: str, **values: float) -> Callable[[dict[str, list[Row]]], None]:
    """Give the last rows of a kind other values: the last stage or evaluation, the last eight updates."""

    def change(rows: dict[str, list[Row]]) -> None:
        for row in rows[kind][-MIN_UPDATES if kind == "update" else -1 :]:
            row |= values

    return change


FALLEN = {"accuracy/mean": 0.2, "low/mean": 0.17, "high/mean": 0.24}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("equal rewards", late("stage", zero_variance_fraction=0.95)),
        ("no reward", late("stage", unscored_fraction=0.5)),
        ("truncated", late("stage", truncated_fraction=0.6)),
        ("truncated", late("eval", **{"truncated/math500": 0.9})),
        ("no answer", late("eval", **{"unparsed/math500": 0.97})),
        ("entropy near zero", late("update", entropy=0.01)),
        ("entropy rising", late("update", entropy=1.6)),
        ("low ESS", late("update", ess=0.3)),
        ("much vetoed", late("update", vetoed_fraction=0.4)),
        ("mismatch", late("stage", mismatch_mean=0.2)),
        ("gradient always clipped", late("update", grad_norm=7.0)),
        ("reward up, evaluation down", late("eval", **FALLEN)),
    ],
)
def test_a_run_made_sick_has_the_one_sign(name: str, change: Callable[[dict[str, list[Row]]], None]) -> None:
    rows = healthy()
    assert names_of(rows) == []
    change(rows)
    assert names_of(rows) == [name]


def test_every_sign_says_what_and_the_way_out() -> None:
    rows = healthy()
    for kind, values in (("update", {"ess": 0.1}), ("stage", {"zero_variance_fraction": 1.0}), ("eval", FALLEN)):
        late(kind, **values)(rows)
    some = health_warnings(rows["update"], rows["stage"], rows["eval"], clip_grad=1.0)
    assert len(some) == 3
    for sign in some:
        assert sign.sentence == f"{sign.text}; {sign.remedy}"
        assert sign.remedy
    assert "100 % of the groups of stage 3 have equal rewards, 0.5 on average" in some[0].text


def test_a_fall_without_a_rising_reward_is_called_so() -> None:
    rows = healthy()
    late("eval", **FALLEN)(rows)
    late("stage", reward_mean=0.1)(rows)
    assert names_of(rows) == ["evaluation down"]


def test_entropy_that_comes_back_down_does_not_rise_without_end() -> None:
    rows = healthy()
    for row in rows["update"][40:60]:
        row["entropy"] = 5.0
    late("update", entropy=1.6)(rows)
    assert names_of(rows) == []


def stage_updates(stage: int, nats: list[float], tokens: int = 10, lr: float = 2e-4) -> list[Row]:
    """Update rows of a stage whose policy is `nats` a response away before each update."""
    return [
        {"kind": "update", "update": 100 * stage + age, "stage": stage, "age": age, "lr": lr, "kl_response": moved}
        | {"kl_k3": moved / tokens}
        for age, moved in enumerate(nats)
    ]


@pytest.mark.parametrize(
    ("nats", "tokens", "said"),
    [
        ([0.0, 13.0, 14.0], 10, "the first update of stage 1 moved the policy 13 nats a response at a rate of 0.0002"),
        ([0.0, 0.4, 2.5, 9.0], 10, "the first 2 updates of stage 1 moved the policy 2.5 nats a response"),
        ([0.0, 13.0], 9_000, "the first update of stage 1 moved the policy 13 nats"),
        ([0.0, 0.03, 0.06, 0.19], 10, None),
        ([0.0, 8.0], 9_000, None),  # below 0.001 a token
        ([12.0, 12.5], 10, None),  # the engine's mismatch
        ([0.0] + [0.5 * age for age in range(1, 64)], 10, None),
        ([13.0], 10, None),
    ],
)
def test_a_rate_that_ruins_is_said_after_the_update_that_shows_it(
    nats: list[float], tokens: int, said: str | None
) -> None:
    lines: list[str] = []
    watch = HealthMonitor(lines.append, clip_grad=1.0)
    for row in [*stage_updates(0, [0.0, 0.1]), *stage_updates(1, nats, tokens)]:
        watch(row)
    watch({"kind": "phase", "phase": "optimize"})
    assert len(lines) == (said is not None)
    assert said is None or lines[0].startswith(f"warning: {said}")


def test_the_rate_to_try_would_move_a_twentieth_of_the_bound_if_kl_grows_with_its_square() -> None:
    """13 nats at 2e-4 on SmolLM2-135M, which then learned at 1e-5 and moved 0.2 nats in 12 updates."""
    for nats, rate in ((13.0, "1e-05"), (1.3, "4e-05"), (1e9, "2e-06")):
        (sign,) = health_warnings(stage_updates(0, [0.0, nats]), [], [])
        assert sign.remedy == f"start again from before it with optimizer.lr near {rate}"


def test_a_leap_is_said_once_and_again_by_a_later_stage_after_a_calm_one() -> None:
    lines: list[str] = []
    watch = HealthMonitor(lines.append, clip_grad=1.0)
    for stage, moved in enumerate([13.0, 5.0, 0.1, 2.0]):
        watch({"kind": "stage", "stage": stage})
        for row in stage_updates(stage, [0.0, moved, moved]):
            watch(row)
        watch({"kind": "phase", "phase": "optimize"})
    assert [line.partition(" moved")[0][-7:] for line in lines] == ["stage 0", "stage 3"]


@settings(max_examples=30)
@given(cut=st.integers(0, UPDATES), stages=st.integers(0, 4), evals=st.integers(0, 5), holes=st.booleans())
def test_a_healthy_run_has_no_sign_at_any_time(cut: int, stages: int, evals: int, holes: bool) -> None:
    rows = healthy()
    if holes:
        rows = {
            kind: [{key: row[key] for key in ("update", "stage") if key in row} for row in rows[kind]] for kind in rows
        }
    assert health_warnings(rows["update"][:cut], rows["stage"][:stages], rows["eval"][:evals], clip_grad=1.0) == []


def test_no_false_alarm_in_the_studys_runs_and_most_that_fell_are_noticed() -> None:
    """Quickstart and GRPO runs of docs/study.md: every one that improved is healthy, 9 of 10 that fell have a sign."""
    runs: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    with CURVES.open(newline="") as file:
        for row in csv.DictReader(file):
            runs[tuple(row[key] for key in ("method", "rate", "seed", "repeat"))].append(row)
    sick, fell = [], []
    for key, rows in runs.items():
        updates = [
            {name: float(row[name]) for name in ("entropy", "ess", "vetoed_fraction")} for row in rows if row["entropy"]
        ]
        evals = [evaluation(row) for row in rows if row["accuracy"]]
        if health_warnings(updates, [], evals):
            sick.append(key)
        if evals[-1]["accuracy/mean"] <= evals[0]["accuracy/mean"]:
            fell.append(key)
    assert len(runs) > 150
    assert set(sick) <= set(fell), "a run that improved is no false alarm"
    assert len(sick) > 0.85 * len(fell)


def evaluation(row: Row) -> Row:
    """The evaluation row of 500 problems with this accuracy."""
    right = round(500 * float(row["accuracy"]))
    mean = clustered_interval([1.0] * right + [0.0] * (500 - right))
    figures = figures_of("accuracy", {"arithmetic": SetFigures(mean, 500, 1)})
    return {"update": int(row["update"]), **figures, "truncated/arithmetic": float(row["truncated"])}


def test_a_sign_is_said_once_while_it_lasts_and_again_when_it_comes_back() -> None:
    lines: list[str] = []
    watch = HealthMonitor(lines.append, clip_grad=1.0)
    shares = [0.95, 1.0, 0.2, 0.95]
    for stage, share in enumerate(shares):
        watch({"kind": "stage", "stage": stage, "zero_variance_fraction": share, "reward_mean": 0.0})
        watch({"kind": "phase", "phase": "optimize"})
    assert [line.split(" % ")[0] for line in lines] == ["warning: 95", "warning: 95"]
    assert lines[0].endswith("docs/troubleshooting.md#equal-rewards)")
