"""Weights by the prefix: against a loop over the tokens of each response."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from mugrpo_megatron.algorithm.segments import make_segments
from mugrpo_megatron.algorithm.surrogates import Terms, Tokens, importance_ratio, ppo
from mugrpo_megatron.recipe.objective import ObjectiveSection
from run_scripts.study import prefix
from run_scripts.study.grid import GRID, load_grid

CONFIG = ObjectiveSection(name="mu_grpo", veto="none")
LENGTHS = [5, 0, 1, 7]
SIGNS = [-1.0, 1.0, -0.5, 2.0]


def tokens_of(seed: int) -> Tokens:
    random = torch.Generator().manual_seed(seed)
    behaviour = -torch.rand(sum(LENGTHS), generator=random, dtype=torch.float64)
    logprobs = (behaviour + torch.randn(sum(LENGTHS), generator=random, dtype=torch.float64)).requires_grad_()
    segments = make_segments(torch.tensor(LENGTHS), torch.ones(len(LENGTHS)))
    log_ratio = logprobs - behaviour
    advantage = torch.tensor(SIGNS, dtype=torch.float64)[segments.ids]
    ends = torch.tensor(CONFIG.clip_low), torch.tensor(CONFIG.clip_high)
    ratio = importance_ratio(log_ratio, segments, CONFIG)
    return Tokens(logprobs, behaviour, log_ratio, ratio, advantage, *ends, segments)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("surrogate", "of"), [(prefix.product, math.prod), (prefix.minimum, min)])
def test_a_negative_token_weighs_what_the_ratios_before_it_say(
    seed: int, surrogate: Callable[[Tokens, ObjectiveSection], Terms], of: Callable[[Sequence[float]], float]
) -> None:
    tokens = tokens_of(seed)
    ratios, weights = tokens.ratio.tolist(), []
    for place, position in enumerate(tokens.segments.positions.tolist()):
        before = [1.0, *ratios[place - position : place]]
        weights.append(min(1.0, of(before)) if tokens.advantage[place] < 0 else 1.0)
    expected = ppo(tokens, CONFIG).loss * torch.tensor(weights, dtype=torch.float64)
    loss = surrogate(tokens, CONFIG).loss
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(one.sum(), tokens.logprobs, retain_graph=True)[0] for one in (loss, expected)]
    torch.testing.assert_close(*gradients)
    assert any(weight < 1.0 for weight in weights)


def test_the_grids_cells_take_these_weights_and_no_veto() -> None:
    grid = load_grid(GRID.with_name("six_prefix.toml"))
    names = {name: one.settings["objective.surrogate"] for name, one in grid.methods.items()}
    assert names == {name: f"run_scripts.study.prefix:{name}" for name in ("product", "minimum")}
    assert {one.settings["objective.veto"] for one in grid.methods.values()} == {"none"}
    assert all(grid.shares_stage(name) for name in grid.methods)
