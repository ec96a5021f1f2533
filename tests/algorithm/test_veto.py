"""The five scopes of the veto against their definitions, as sets of positions, on random responses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.algorithm.segments import make_segments, with_turns
from mugrpo_megatron.algorithm.veto import NEVER, initial_state, veto
from mugrpo_megatron.recipe import ObjectiveSection

RATIOS = st.sampled_from([1.0, 1.0, 1.0, 0.7, 1.3, 4.0, 9e3, 1.01e-4, 0.99e-4, 3e-5, 1e-12, 1e-30])
"""Nearly every token of a stale response is as likely as it was; a few are all but impossible."""
RESPONSES = st.lists(st.tuples(st.lists(RATIOS, max_size=12), st.sampled_from([-1.5, -0.1, 0.0, 2.0])), max_size=8)
SCOPES = ("none", "trigger", "suffix", "suffix_non_trigger", "response")


def dropped_by_definition(ratios: list[float], advantage: float) -> dict[str, set[int]]:
    """What each scope drops of one response. Only A < 0 has triggers; κ is where the first of them stands."""
    y = set(range(len(ratios)))
    T = {t for t in y if advantage < 0 and ratios[t] < 1e-4}
    S = {t for t in y if T and t > min(T)}
    return {"none": set(), "trigger": T, "suffix": S, "suffix_non_trigger": S - T, "response": y if T else set()}


@settings(max_examples=300, deadline=None)
@given(RESPONSES, st.sampled_from([torch.float32, torch.float64]))
def test_every_scope_drops_what_its_definition_says(
    responses: list[tuple[list[float], float]], dtype: torch.dtype
) -> None:
    segments = make_segments(
        torch.tensor([len(ratios) for ratios, _ in responses], dtype=torch.int64), torch.ones(len(responses))
    )
    log_ratio = torch.tensor([r for ratios, _ in responses for r in ratios], dtype=dtype).log()
    advantage = torch.tensor([a for _, a in responses], dtype=dtype)[segments.ids]
    expected = [dropped_by_definition(*response) for response in responses]
    for scope in SCOPES:
        section = ObjectiveSection(veto=scope)
        verdict = veto(log_ratio, advantage, segments, section, initial_state(segments, section))
        parts = (~verdict.keep).split(segments.lengths.tolist())
        assert [set(part.nonzero()[:, 0].tolist()) for part in parts] == [sets[scope] for sets in expected]
        first = [min(sets["trigger"], default=NEVER) for sets in expected]
        assert verdict.first_trigger.tolist() == first


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.lists(RATIOS, max_size=5), max_size=4), st.sampled_from([-1.0, 2.0])), max_size=5)
)
def test_a_turn_is_judged_like_a_response_of_its_own(episodes: list[tuple[list[list[float]], float]]) -> None:
    """Turns may be empty: of a mask without a token trained on."""
    rows = [[ratio for turn in turns for ratio in turn] for turns, _ in episodes]
    segments = make_segments(torch.tensor([len(row) for row in rows], dtype=torch.int64), torch.ones(len(rows)))
    numbers = [np.repeat(np.arange(len(turns)), [len(turn) for turn in turns]) for turns, _ in episodes]
    segments = with_turns(segments, numbers)
    log_ratio = torch.tensor([ratio for row in rows for ratio in row], dtype=torch.float64).log()
    advantage = torch.tensor([a for _, a in episodes], dtype=torch.float64)[segments.ids]
    for scope in SCOPES:
        config = ObjectiveSection(veto=scope, veto_reach="turn")
        keep = veto(log_ratio, advantage, segments, config, initial_state(segments, config)).keep.tolist()
        expected = [
            place not in dropped_by_definition(turn, a)[scope]
            for turns, a in episodes
            for turn in turns
            for place in range(len(turn))
        ]
        assert keep == expected


def test_the_scopes_differ_where_there_is_more_than_one_trigger() -> None:
    sets = dropped_by_definition([1.0, 1e-5, 1.0, 1e-5, 1.0], -1.0)
    assert sets == {
        "none": set(),
        "trigger": {1, 3},
        "suffix": {2, 3, 4},
        "suffix_non_trigger": {2, 4},
        "response": {0, 1, 2, 3, 4},
    }


def test_a_ratio_of_the_threshold_itself_is_not_a_trigger() -> None:
    segments = make_segments(torch.tensor([2]), torch.ones(1))
    log_ratio = torch.tensor([math.log(1e-4), 0.0], dtype=torch.float64)
    config = ObjectiveSection(veto="response")
    found = veto(log_ratio, -torch.ones(2), segments, config, initial_state(segments, config))
    assert found.keep.all()


@pytest.mark.parametrize("log_ratio", [-21.0, -50.0, -800.0])
def test_a_threshold_below_the_clamp_of_the_losses_still_has_its_say(log_ratio: float) -> None:
    """Losses hold log-ratios within 20 nats; the veto compares them as they are: e^-20 is 2e-9."""
    segments = make_segments(torch.tensor([3]), torch.ones(1))
    row = torch.tensor([0.0, log_ratio, 0.0], dtype=torch.float64)
    config = ObjectiveSection(veto="trigger", trigger_ratio=1e-9)
    found = veto(row, -torch.ones(3), segments, config, initial_state(segments, config))
    assert found.keep.tolist() == [True, False, True]
