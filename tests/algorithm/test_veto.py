"""The five scopes of the veto against their definitions, as sets of positions, on random responses and turns."""

from __future__ import annotations

import math
from itertools import chain, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.algorithm.segments import Segments, make_segments, with_turns
from mugrpo_megatron.algorithm.veto import NEVER, initial_state, veto
from mugrpo_megatron.recipe import ObjectiveSection

RATIOS = st.sampled_from([1.0, 1.0, 1.0, 0.7, 1.3, 4.0, 9e3, 1.01e-4, 0.99e-4, 3e-5, 1e-12, 1e-30])
"""Nearly every token of a stale response is as likely as it was; a few are all but impossible."""
Turns = list[list[float]]
TURNS = st.lists(st.lists(RATIOS, max_size=6), max_size=4)
EPISODES = st.lists(st.tuples(TURNS, st.sampled_from([-1.5, -0.1, 0.0, 2.0])), max_size=6)
SCOPES = ("none", "trigger", "suffix", "suffix_non_trigger", "response")


def packed(episodes: list[tuple[Turns, float]]) -> tuple[torch.Tensor, torch.Tensor, Segments]:
    """Log-ratios and advantages of all tokens of the episodes, with their segments."""
    lengths = torch.tensor([sum(map(len, turns)) for turns, _ in episodes], dtype=torch.int64)
    numbers = [np.repeat(np.arange(len(turns)), [len(turn) for turn in turns]) for turns, _ in episodes]
    segments = with_turns(make_segments(lengths, torch.ones(len(episodes))), numbers)
    log_ratio = torch.tensor([r for turns, _ in episodes for turn in turns for r in turn], dtype=torch.float64).log()
    return log_ratio, torch.tensor([a for _, a in episodes], dtype=torch.float64)[segments.ids], segments


def dropped_by_definition(ratios: list[float], advantage: float, threshold: float = 1e-4) -> dict[str, set[int]]:
    """What each scope drops of one response. Only A < 0 has triggers; κ is where the first of them stands."""
    y = set(range(len(ratios)))
    T = {t for t in y if advantage < 0 and ratios[t] < threshold}
    S = {t for t in y if T and t > min(T)}
    return {"none": set(), "trigger": T, "suffix": S, "suffix_non_trigger": S - T, "response": y if T else set()}


@settings(max_examples=100)
@given(EPISODES, st.sampled_from(["response", "turn"]))
def test_every_scope_drops_what_its_definition_says(episodes: list[tuple[Turns, float]], reach: str) -> None:
    """A response, or each of its turns by itself; a turn may be empty: of a mask without a token trained on."""
    log_ratio, advantage, segments = packed(episodes)
    units = [(unit, a) for turns, a in episodes for unit in (turns if reach == "turn" else [list(chain(*turns))])]
    expected = [(dropped_by_definition(unit, a), len(unit)) for unit, a in units]
    for scope in SCOPES:
        section = ObjectiveSection(veto=scope, veto_reach=reach)
        mask = veto(log_ratio, advantage, segments, section, initial_state(segments, section))
        assert mask.keep.tolist() == [t not in sets[scope] for sets, length in expected for t in range(length)]
        if reach == "response":
            first = [min(sets["trigger"], default=NEVER) for sets, _ in expected]
            assert mask.state.first_trigger.tolist() == first


def weights_by_definition(ratios: list[float], weighed: bool) -> dict[str, list[float]]:
    """Weights of one response's tokens by the ratios before each, in Python floats."""
    prefixes = [ratios[:t] if weighed else [] for t in range(len(ratios))]
    return {
        "prefix": [min(1.0, math.prod(prefix)) for prefix in prefixes],
        "prefix_min": [min([1.0, *prefix]) for prefix in prefixes],
    }


@settings(max_examples=100)
@given(EPISODES, st.sampled_from(["response", "turn"]), st.integers(1, 9))
def test_weights_by_the_prefix_are_what_their_definition_says(
    episodes: list[tuple[Turns, float]], reach: str, chunk: int
) -> None:
    """A response, or each of its turns by itself, in chunks that carry the state."""
    log_ratio, advantage, segments = packed(episodes)
    units = [(unit, a) for turns, a in episodes for unit in (turns if reach == "turn" else [list(chain(*turns))])]
    for scope, signs in product(("prefix", "prefix_min"), ("negative", "both")):
        section = ObjectiveSection.model_validate({"veto": scope, "veto_reach": reach, "prefix_signs": signs})
        state, weights = initial_state(segments, section), torch.zeros(0, dtype=torch.float64)
        for start in range(0, len(log_ratio), chunk):
            tokens = slice(start, start + chunk)
            mask = veto(log_ratio[tokens], advantage[tokens], segments.chunk(tokens), section, state)
            state = mask.state
            assert mask.weight is not None
            weights = torch.cat([weights, mask.weight])
        expected = [
            weight for unit, a in units for weight in weights_by_definition(unit, a < 0 or signs == "both")[scope]
        ]
        # 1e-30 to the power of a response leaves the floats' range: the sum of logs then holds what the product cannot.
        torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-250)


def test_weights_by_the_prefix_are_bitwise_the_same_however_responses_are_packed() -> None:
    lengths = torch.tensor([1, 300, 0, 77])
    config = ObjectiveSection(veto="prefix")
    log_ratio = torch.randn(378, generator=torch.Generator().manual_seed(0)) / 10 - 0.01

    def weights(tokens: slice, sizes: torch.Tensor) -> torch.Tensor:
        segments = make_segments(sizes, torch.ones(len(sizes)))
        row = log_ratio[tokens]
        weight = veto(row, -torch.ones_like(row), segments, config, initial_state(segments, config)).weight
        assert weight is not None
        return weight

    together = weights(slice(None), lengths)
    assert together[1:301].equal(weights(slice(1, 301), lengths[1:2]))
    assert together[301:].equal(weights(slice(301, None), lengths[3:]))


@pytest.mark.parametrize(
    ("threshold", "log_ratio", "kept"),
    [(1e-4, math.log(1e-4), True), (1e-9, -21.0, False), (1e-9, -50.0, False), (1e-9, -800.0, False)],
)
def test_ratios_are_compared_as_they_are_and_one_at_the_threshold_is_no_trigger(
    threshold: float, log_ratio: float, kept: bool
) -> None:
    """Losses hold log-ratios within 20 nats, and e^-20 is 2e-9."""
    segments = make_segments(torch.tensor([3]), torch.ones(1))
    row = torch.tensor([0.0, log_ratio, 0.0], dtype=torch.float64)
    config = ObjectiveSection(veto="trigger", trigger_ratio=threshold)
    result = veto(row, -torch.ones(3), segments, config, initial_state(segments, config))
    assert result.keep.tolist() == [True, kept, True]
