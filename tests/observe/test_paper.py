"""The paper's names and times for what a run measures."""

from __future__ import annotations

import re
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.observe.metrics import NAMES as METRIC_NAMES
from mugrpo_megatron.observe.metrics import PHASES
from mugrpo_megatron.observe.rundata import ROLLOUT_PHASES, TRAINING_PHASES, paper_seconds
from mugrpo_megatron.recipe.objective import VetoScope
from mugrpo_megatron.report.triggers import SCOPES
from tests.checkout import ROOT

Phase = dict[str, Any]
LETTERS = dict(
    zip(
        ("start", "sync", "generate", "score", "logprobs", "optimize", "save", "eval", "probe", "auxiliary"),
        "sygclovepu",
        strict=True,
    )
)


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
def test_seconds_are_those_in_which_only_phases_of_the_list_run(rows: list[Phase]) -> None:
    def counted(row: Phase) -> int:
        ticks = range(int(row["start"]), int(row["end"]))
        running = ({other["phase"] for other in rows if other["start"] <= tick < other["end"]} for tick in ticks)
        return sum(names <= {*TRAINING_PHASES} for names in running)

    def is_outer(row: Phase) -> bool:
        return not any(
            other is not row and other["start"] <= row["start"] and row["end"] <= other["end"] for other in rows
        )

    outer = sorted((row for row in rows if is_outer(row)), key=itemgetter("start"))
    letters = "".join(LETTERS[row["phase"]] for row in outer)
    rollout = {match.start() for match in re.finditer("y(?=e*g)|g|c", letters)}
    training = rollout | {match.start() for match in re.finditer("l|o", letters)}
    assert paper_seconds(rows) == pytest.approx(
        {
            "T_rollout": sum(counted(outer[place]) for place in rollout),
            "T_total": sum(counted(outer[place]) for place in training),
        }
    )


def test_phases_and_scopes_exist() -> None:
    assert set(ROLLOUT_PHASES) < set(TRAINING_PHASES) < set(PHASES)
    assert set(SCOPES) == set(get_args(VetoScope))


def test_update_metrics_that_have_a_name_in_the_paper_exist() -> None:
    table = Path(ROOT, "docs/paper.md").read_text(encoding="utf-8").split("## The paper's names")[1].split("\n## ")[0]
    own = {name for line in table.splitlines() if line.startswith("|") for name in re.findall(r"`(\w+)`", line)}
    assert {"clipped_fraction", "ratio_neg_mean", "vetoed_fraction", "reward_mean"} <= own & METRIC_NAMES["update"]
