"""The paper's names and times for what a run measures."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.observe.metrics import PHASES, names
from mugrpo_megatron.observe.paper import NAMES, ROLLOUT_PHASES, SCOPES, TRAINING_PHASES, paper_seconds
from mugrpo_megatron.recipe.objective import VetoScope

Phase = dict[str, object]


@st.composite
def phases(draw: st.DrawFn) -> list[Phase]:
    """Phases on whole seconds, one after the other, some with others inside, two deep; in the order they end."""
    rows: list[Phase] = []

    def fill(start: int, depth: int, most: int) -> int:
        for _ in range(draw(st.integers(0, most))):
            start += draw(st.integers(0, 2))
            name = draw(st.sampled_from(sorted(PHASES)))
            inner_end = fill(start + draw(st.integers(0, 1)), depth + 1, 2) if depth < 2 else start
            end = inner_end + draw(st.integers(1, 4))
            rows.append({"phase": name, "start": float(start), "end": float(end)})
            start = end
        return start

    fill(0, 0, 6)
    return rows


@given(rows=phases())
def test_seconds_are_those_in_which_a_phase_of_the_list_runs_alone(rows: list[Phase]) -> None:
    ticks = range(int(max((row["end"] for row in rows), default=0.0)))  # type: ignore[type-var, call-overload]
    running = [[row["phase"] for row in rows if row["start"] <= t < row["end"]] for t in ticks]  # type: ignore[operator]
    alone = [active[0] for active in running if len(active) == 1]
    times = paper_seconds(rows)
    assert times["T_rollout"] == pytest.approx(sum(name in ("sync", "generate", "score") for name in alone))
    training = ("sync", "generate", "score", "logprobs", "optimize")
    assert times["T_total"] == pytest.approx(sum(name in training for name in alone))


def test_the_weights_that_an_evaluation_inside_a_stage_takes_to_the_engine_are_no_rollout() -> None:
    rows = [
        {"phase": "sync", "start": 0.0, "end": 1.0},
        {"phase": "generate", "start": 1.0, "end": 5.0},
        {"phase": "sync", "start": 7.0, "end": 8.0},
        {"phase": "eval", "start": 8.0, "end": 10.0},
        {"phase": "optimize", "start": 5.0, "end": 15.0},
    ]
    assert paper_seconds(rows) == {"T_rollout": 5.0, "T_total": 5.0 + 10.0 - 3.0}


def test_phases_and_scopes_exist() -> None:
    assert set(ROLLOUT_PHASES) < set(TRAINING_PHASES) < set(PHASES)
    assert set(SCOPES) == set(get_args(VetoScope))


def test_update_metrics_that_have_a_name_in_the_paper_exist() -> None:
    own = {ours.strip("`") for _, ours, _ in NAMES}
    assert {"clipped_fraction", "ratio_neg_mean", "vetoed_fraction", "reward_mean"} <= own & names("update")
