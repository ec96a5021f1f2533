"""Part eight of the study: its search for rates, the order of its cells, their ends, its loss."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.algorithm.policy_loss import policy_loss
from mugrpo_megatron.algorithm.surrogates import LOG_RATIO_LIMIT
from mugrpo_megatron.evaluation.estimators import mean_interval
from mugrpo_megatron.recipe import ObjectiveSection, load_recipe
from run_scripts.dev.part_eight import results
from run_scripts.dev.part_eight.cells import Cell, Grid, best_way, load_grid, settings, tuned_rate, wanted
from run_scripts.dev.part_eight.explored import below_mean
from run_scripts.dev.part_eight.rows import add_rows, mean_of_last_quarter, read_rows
from run_scripts.dev.part_eight.run import BASE
from run_scripts.dev.study import holm, interval, sign_flip, with_cells
from tests.algorithm.batches import Batch, batches, random_batch
from tests.checkout import ROOT, text_of

GRID = load_grid(Path(ROOT, "docs/study/eight_large/grid.toml"))
EXPLORED = load_grid(Path(ROOT, "docs/study/eight_explored/grid.toml"))


def end(cell: Cell, peak: float) -> float:
    """A made-up end: highest at the rate `peak`, the same at every seed."""
    return 0.5 - 0.01 * abs(GRID.ladder.index(cell.rate) - GRID.ladder.index(peak))


def run_all(grid: Grid, peak: float) -> list[Cell]:
    """The cells in the order in which they would run."""
    ends: dict[Cell, float] = {}
    while cell := next((one for one in wanted(grid, ends) if one not in ends), None):
        ends[cell] = end(cell, peak)
    return list(ends)


@pytest.mark.parametrize("peak", GRID.ladder)
def test_a_search_brackets_the_best_rate(peak: float) -> None:
    ends: dict[Cell, float] = {}
    while True:
        cells, rate = tuned_rate(GRID, ends, "veto_4")
        if rate is not None:
            break
        ends |= {cell: end(cell, peak) for cell in cells}
    place = GRID.ladder.index(peak)
    assert rate == peak
    assert {cell.rate for cell in ends} >= set(GRID.ladder[max(0, place - 1) : place + 2])
    assert {cell.seed for cell in ends} == set(GRID.tuning_seeds)


def test_the_order_is_the_plans() -> None:
    cells = run_all(GRID, 8e-5)
    tests = [cell for cell in cells if cell.seed in GRID.test_seeds]
    first = {name: next(k for k, cell in enumerate(cells) if cell.way == name) for name in {c.way for c in cells}}
    tuned = max(k for k, cell in enumerate(cells) if cell.way in ("veto_4", "prefix_4") and cell not in tests)
    assert tuned < first["grpo_4"] < first["grpo_16"] < first["grpo_64"] < first["grpo_falling_4"]
    assert cells[0].way == "veto_4"
    assert [cell.way for cell in tests[:4]] == ["grpo_4", "veto_4", "prefix_4", "prefix_64"]
    assert len({cell.seed for cell in tests[:4]}) == 1
    assert len(cells) == len(set(cells)) == 182  # what the page says
    decoupled = {cell.way for cell in tests if cell.way.startswith("decoupled")}
    assert decoupled == {"decoupled_16", "decoupled_64"}  # the first in a tie, and the same form at µ=64


def test_the_form_that_tuning_chose_goes_on() -> None:
    forms = ("decoupled_16", "decoupled_prefix_16", "decoupled_truncated_16")
    ends = {
        Cell(name, rate, seed): 0.6 - 0.1 * (rate != 8e-5) + 0.01 * (name == "decoupled_prefix_16")
        for name in GRID.ways
        for rate in (4e-5, 8e-5, 1.6e-4)
        for seed in GRID.tuning_seeds
    }
    assert best_way(GRID, {}, forms) is None
    assert best_way(GRID, ends, forms) == "decoupled_prefix_16"
    ran = {cell.way for cell in wanted(GRID, ends) if cell.seed in GRID.test_seeds}
    assert ran & {name for name in GRID.ways if name.startswith("decoupled")} == {
        "decoupled_prefix_16",
        "decoupled_prefix_64",
    }


def test_every_cell_is_a_recipe_evaluated_as_planned() -> None:
    for name, way in GRID.ways.items():
        for seed in (100, 28):
            keys = {**GRID.shared, **settings(GRID, Cell(name, 8e-5, seed))}
            recipe = load_recipe(BASE, [f"{key}={value}" for key, value in keys.items()])
            schedule = recipe.schedule
            assert schedule.total_updates == 256
            assert schedule.updates_per_stage == way.mu
            assert recipe.objective.reduction == "token_mean"
            starts = recipe.eval.every_stages * way.mu
            assert starts == 32 or (way.mu > 32 and starts == way.mu and recipe.eval.every_updates == 32)
            assert recipe.data.eval == ("chain_validation" if seed == 100 else "chain")


def test_every_explored_way_takes_as_many_responses() -> None:
    """On the same four stages as µ=64, with an evaluation at every eighth of the run."""
    for name in EXPLORED.ways:
        keys = {**EXPLORED.shared, **settings(EXPLORED, Cell(name, 8e-5, 100))}
        recipe = load_recipe(BASE, [f"{key}={value}" for key, value in keys.items()])
        assert recipe.schedule.stages == 4
        assert recipe.schedule.total_updates * recipe.rollout.prompts_per_update == 256 * 8
        assert recipe.schedule.total_updates == 8 * recipe.eval.every_updates
        assert recipe.data.eval == "chain_validation"
    assert {step.kind for step in EXPLORED.order} == {"tune"}
    assert {name for step in EXPLORED.order for name in step.ways} == set(EXPLORED.ways)


curves = st.lists(st.floats(0, 1), min_size=9, max_size=9).map(lambda ys: dict(zip(range(0, 257, 32), ys, strict=True)))


@given(curves, st.floats(32, 256))
def test_an_end_is_the_mean_of_the_last_quarter(curve: dict[int, float], updates: float) -> None:
    def at(update: float) -> float:
        low = min(int(update // 32) * 32, 224)
        return curve[low] + (curve[low + 32] - curve[low]) * (update - low) / 32

    steps = 4000
    width = updates / 4 / steps
    middle = fmean(at(0.75 * updates + (k + 0.5) * width) for k in range(steps))
    assert mean_of_last_quarter(curve, updates) == pytest.approx(middle, abs=1e-4)


def test_no_curve_is_extrapolated() -> None:
    for updates in (257, 8):
        with pytest.raises(ValueError, match="do not cover"):
            mean_of_last_quarter({16: 0.1, 256: 0.5}, updates)


def test_rows_of_a_cell_are_replaced_and_others_kept(tmp_path: Path) -> None:
    path, columns = tmp_path / "cells.csv", ("way", "rate", "seed", "warm_start", "end")
    row = {"way": "a", "rate": 4e-5, "seed": 28, "warm_start": "x", "end": 0.1}
    add_rows(path, columns, [row, row | {"seed": 100}])
    add_rows(path, columns, [row | {"end": 0.2}, row | {"warm_start": "y"}])
    assert [(r["seed"], r["warm_start"], r["end"]) for r in read_rows(path)] == [
        ("28", "x", "0.2"),
        ("28", "y", "0.1"),
        ("100", "x", "0.1"),
    ]


def decoupled(**keys: object) -> ObjectiveSection:
    return ObjectiveSection(name="decoupled_ppo", reduction="token_mean", **keys)


TRUNCATED = decoupled(surrogate="run_scripts.dev.part_eight.surrogates:decoupled_truncated")


@given(batches())
def test_within_four_updates_a_clip_that_follows_is_grpos(batch: Batch) -> None:
    """Until the first refresh the proximal policy is the one that sampled."""
    fresh = replace(batch, proximal=batch.behaviour)
    grpo = ObjectiveSection(name="grpo", reduction="token_mean")
    expected = policy_loss(fresh.leaf(), fresh.inputs(grpo))[0]
    for config in (decoupled(), TRUNCATED):
        torch.testing.assert_close(policy_loss(fresh.leaf(), fresh.inputs(config))[0], expected)


def test_the_truncated_weight() -> None:
    """min(1, p) min(r/p A, clip(r/p, 0.8, 1.2) A), token by token, and its gradient."""
    batch = random_batch(3, [5, 4, 6])
    logprobs = batch.leaf()
    policy_loss(logprobs, batch.inputs(TRUNCATED))[0].backward()
    leaf = batch.leaf()
    tokens = batch.lengths.sum()
    behaviour, proximal = (
        torch.tensor([x for row in rows for x in row]).double() for rows in (batch.behaviour, batch.proximal)
    )
    advantage = torch.tensor(batch.advantages).double().repeat_interleave(batch.lengths)
    step, age = (leaf - proximal).exp(), (proximal - behaviour).exp()
    gain = torch.minimum(step * advantage, step.clamp(0.8, 1.2) * advantage) * age.clamp(max=1)
    (-gain.sum() / tokens).backward()
    torch.testing.assert_close(logprobs.grad, leaf.grad, rtol=1e-5, atol=1e-7)
    assert (age > 1).any()


def explored(name: str, **keys: object) -> ObjectiveSection:
    function = f"run_scripts.dev.part_eight.explored:{name}"
    return ObjectiveSection(name="grpo", reduction="token_mean", surrogate=function, **keys)


def test_cppo_token_by_token() -> None:
    """Equations 8 to 11 in a loop over tokens: what leads back to the policy that sampled stays, the rest stays while
    its weighted distance is within the limit and within what the prefix has left."""
    batch = random_batch(5, [7, 1, 9, 6])
    leaf = batch.leaf()
    policy_loss(leaf, batch.inputs(explored("cppo")))[0].backward()
    now = iter(batch.leaf().detach().exp().tolist())
    expected, outside = [], 0
    for rows, advantage in zip(batch.behaviour, batch.advantages, strict=True):
        before = [math.exp(value) for value in rows]
        pairs = [(next(now), chance) for chance in before]
        distances = [abs(p - m) for p, m in pairs]
        budget = min(max(float(np.quantile(distances, 0.9)), 0.02), 0.04)
        weights_so_far = spent_so_far = 0.0
        for t, (p, m) in enumerate(pairs):
            weight = 0.8 + 0.2 * (len(pairs) - 1 - t) / max(len(pairs) - 1, 1)
            limit = min(0.15, 0.15 + budget * weights_so_far - spent_so_far)
            kept = advantage * (p / m - 1) <= 0 or weight * abs(p - m) <= limit
            outside += not kept
            expected.append(-advantage * p / m * kept)
            weights_so_far, spent_so_far = weights_so_far + weight, spent_so_far + weight * abs(p - m)
    gradient = torch.tensor(expected, dtype=leaf.dtype) / batch.lengths.sum()  # d(r A) / d log p = r A
    torch.testing.assert_close(leaf.grad, gradient, rtol=1e-5, atol=1e-7)
    assert 0 < outside < len(expected)


@given(batches())
def test_an_interpolated_centre_clips_half_of_the_way(batch: Batch) -> None:
    """c min(r/c A, clip(r/c) A) with c = sqrt(r): the gradient of r A where sqrt(r) is in the clip range, or leads
    back to it, and none elsewhere."""
    leaf = batch.leaf()
    policy_loss(leaf, batch.inputs(explored("interpolated")))[0].backward()
    behaviour = torch.tensor([value for row in batch.behaviour for value in row], dtype=leaf.dtype)
    advantage = torch.tensor(batch.advantages, dtype=leaf.dtype).repeat_interleave(batch.lengths)
    log_ratio = leaf.detach() - behaviour
    ratio, step = log_ratio.exp(), (log_ratio / 2).exp()
    kept = torch.where(advantage > 0, step <= 1.2, step >= 0.8) & (log_ratio.abs() <= LOG_RATIO_LIMIT)
    torch.testing.assert_close(leaf.grad, -ratio * advantage * kept / batch.lengths.sum(), rtol=1e-4, atol=1e-6)


def test_a_baseline_below_the_mean_shifts_every_advantage() -> None:
    rewards, groups = np.array([1.0, 0.0, 0.0, 1.0, 1.0]), np.array([3, 3, 7, 3, 7])
    assert below_mean(rewards, groups) == pytest.approx([1 / 3 + 0.1, -2 / 3 + 0.1, -0.4, 1 / 3 + 0.1, 0.6])


def test_the_results_on_the_page_are_of_its_cells() -> None:
    page = results.PAGE.read_text(encoding="utf-8")
    assert with_cells(page, results.text(results.read_results(), results.read_results(results.EXPLORED))) == page, (
        results.__doc__
    )


def test_the_pages_have_todays_figures() -> None:
    page, ran = text_of("docs/study/equal-time.md"), results.read_results()
    assert results.chosen(ran) == "grpo_16"
    k = GRID.ways["grpo_16"].k
    equal, timed = ran.gaps("grpo_16", "grpo_4"), ran.gaps("grpo_16", "grpo_4", k)
    corrected = holm([sign_flip(claim.margins) for claim in results.claims(ran)])
    assert len(corrected) == 3
    assert len({f"{p:.3f}" for p in corrected}) == 1
    above = f"ended {interval(timed, '')} points above GRPO"
    below = ran.gaps("grpo_4", "grpo_16")
    third = re.search(r"8 nodes\): k is (\S+) at µ=16", page)
    assert third
    near = mean_interval(ran.gaps("grpo_16", "grpo_4", float(third[1])))
    assert near.low < 0 < near.high
    for figure in (
        f"{above}, with p = {sign_flip(timed):.3f}, and {corrected[2]:.3f} after Holm's correction",
        f"ended {interval(below, '')} points below GRPO after equal updates, and {interval(timed, '')} points above it",
        f"ended {interval(ran.gaps('grpo_4', 'veto_4'), '')} points below GRPO's clip",
        f"and prefix weights {interval(ran.gaps('grpo_4', 'prefix_4'), '')} points below it",
        f"GRPO's clip lost {interval(below, '')} points from µ=4 to µ=16",
        f"lost another {interval(ran.gaps('prefix_4', 'prefix_64'), '')} points",
        f"prefix weights at µ=64 lost {interval(ran.gaps('grpo_4', 'prefix_64'), '')} points after equal updates",
        f"p is {corrected[0]:.3f} for each of the three claims",
        f"GRPO's clip ended {interval(ran.gaps('grpo_16', 'veto_16'), '')} points above the relaxed clip with the veto",
        f"the veto, {interval(ran.gaps('grpo_16', 'prefix_16'), '')} points above prefix weights, and "
        f"{interval(ran.gaps('grpo_16', 'decoupled_16'), '')} points above a narrow clip that follows the policy",
        f"prefix weights ended {interval(ran.gaps('grpo_4', 'prefix_64'), '')} points below GRPO with µ=4",
        f"the relaxed clip with the veto {interval(ran.gaps('grpo_4', 'veto_64'), '')} points, and GRPO's clip "
        f"{interval(ran.gaps('grpo_4', 'grpo_64'), '')} points.",
        f"its planned k is {GRID.ways['decoupled_16'].k:.2f} where the others have {k:.2f}",
    ):
        assert figure in page, figure
    assert f"{above} at the speed-up that is planned" in text_of("README.md")
    before = 100 * fmean(curve[0] for curve in ran.tests("grpo_16").values())
    prefix, veto = (ran.gaps(name, "grpo_4", GRID.ways[name].k) for name in ("prefix_64", "veto_16"))
    row = (
        f"{interval(timed)} points with µ=16 and GRPO's clip, {interval(veto)} with µ=16, the relaxed clip and "
        f"the veto, {interval(prefix)} with µ=64 and prefix weights"
    )
    assert row in text_of("README.md")
    assert f"It ended {interval(below, '')} points below GRPO after as many updates" in text_of("docs/when.md")
    for figure in (
        f"ended {interval(ran.gaps('grpo_4', 'veto_4'), '')} points above the relaxed clip with the veto at µ=4",
        f"and {interval(ran.gaps('grpo_16', 'veto_16'), '')} points above it at µ=16",
        f"`mu_grpo` with the veto ended {interval(ran.gaps('veto_64', 'grpo_64'), '')} points above GRPO's clip",
        f'(`objective.veto = "prefix"`) {interval(ran.gaps("prefix_64", "grpo_64"), "")} points above it',
        f"from {before:.0f} % (sampled) | 16 stages of 16 updates, GRPO's clip | {interval(equal)} | 8 |",
        f"four stages of 64 updates, prefix weights | {interval(ran.gaps('prefix_64', 'grpo_4'))} | 8 |",
    ):
        assert figure in text_of("docs/when.md"), figure
    assert f"stages of 16 updates ended {interval(below, '')} points below GRPO" in text_of("docs/first-run.md")


def made_up(ran: Sequence[int], cost: float, age: float) -> results.Results:
    """Flat curves: GRPO ends at 0.6, the relaxed clip `cost` below it, prefix weights lose `age` from µ=4 to 64; each
    seed has its own level, and the second draw of seed 28 is of another warm start."""
    tuned = {
        Cell(way, rate, seed): end(Cell(way, rate, seed), 4e-5)
        for way in GRID.ways
        for rate in GRID.ladder[2:6]
        for seed in GRID.tuning_seeds
    }
    heights = {
        ("grpo_4", 8e-5): 0.6,
        ("veto_4", 4e-5): 0.6 - cost,
        ("prefix_4", 4e-5): 0.55,
        ("prefix_64", 4e-5): 0.55 - age,
    }
    curves = {
        key: {(seed, "warm"): dict.fromkeys(range(0, 257, 32), height + 0.01 * (seed - 30)) for seed in ran}
        | {(28, f"only {key[0]}"): dict.fromkeys(range(0, 257, 32), 0.9)}
        for key, height in heights.items()
    }
    tests = {Cell(way, rate, seed): height for (way, rate), height in heights.items() for seed in ran}
    return results.Results(GRID, tuned | tests, curves)


@pytest.mark.parametrize(
    ("cost", "age", "verdicts"), [(0.02, 0.0, (True, True)), (-0.01, 0.03, (False, False)), (0.01, 0.03, (True, False))]
)
def test_claims(cost: float, age: float, verdicts: tuple[bool, bool]) -> None:
    """All seeds on one side: p = 1/256, and Holm's factor of three holds; a cell of another warm start never counts."""
    claims = list(results.claims(made_up(GRID.test_seeds, cost, age)))
    assert [claim.number for claim in claims] == [12, 13]
    assert claims[0].margins == pytest.approx([100 * cost] * 8)
    assert claims[1].margins == pytest.approx([2 - 100 * age] * 8)
    lines = results.claim_lines(made_up(GRID.test_seeds, cost, age)).split("\n")
    assert tuple("**shown**" in line for line in lines) == verdicts
    assert ["p = 0.004" in line for line in lines] == list(verdicts)


def test_what_has_not_run() -> None:
    explored = results.Results(EXPLORED, {Cell("any", 1e-5, 100): 0.5}, {})
    ends = {cell: end(cell, 8e-5) for cell in run_all(GRID, 8e-5)}
    assert results.missing(results.Results(GRID, ends, {}), explored) == ""
    some = {cell: value for cell, value in ends.items() if (cell.way, cell.seed) != ("veto_16", 35)}
    assert results.missing(results.Results(GRID, some, {}), explored) == f"1 test cells of {GRID.ways['veto_16'].title}"
    first = results.missing(results.Results(GRID, {}, {}), results.Results(EXPLORED, {}, {}))
    assert f"4 tuning cells of {GRID.ways['veto_4'].title}" in first
    assert first.endswith("; the exploration")


def with_tuning_curves(ran: results.Results, best: str) -> results.Results:
    """Flat tuning curves at every way's rate, GRPO's at 0.6: those of `best` at 0.62, of other ways at 0.59."""
    curves = dict(ran.curves)
    for name in GRID.ways:
        rate = tuned_rate(GRID, ran.ends, name)[1]
        assert rate is not None
        height = 0.6 if name == "grpo_4" else 0.62 if name == best else 0.59
        own = {(seed, "warm"): dict.fromkeys(range(0, 257, 32), height) for seed in GRID.tuning_seeds}
        curves[name, rate] = {**curves.get((name, rate), {}), **own}
    return replace(ran, curves=curves)


@pytest.mark.parametrize("best", ["veto_16", "prefix_64", "decoupled_16", "decoupled_64"])
def test_claim_14_takes_the_way_that_tuning_chose(best: str) -> None:
    """Tuning seeds alone choose, at each way's own k; the claim's margins are of test seeds alone."""
    ran = made_up(GRID.test_seeds, 0.02, 0.0)
    assert results.chosen(ran) is None
    tuned = with_tuning_curves(ran, best)
    assert tuned.merit(best) == pytest.approx(2.0)
    assert results.chosen(tuned) == best
    first = results.choice_table(tuned).split("\n")[2]
    assert first == f"| {GRID.ways[best].title} | {GRID.ways[best].k:.3f} | **+2.0** |"
    assert results.choice_table(ran) == ""
    rate = tuned_rate(GRID, tuned.ends, best)[1]
    assert rate is not None
    own = {(seed, "warm"): dict.fromkeys(range(0, 257, 32), 0.59 + 0.01 * (seed - 30)) for seed in GRID.test_seeds}
    curves = {**tuned.curves, (best, rate): {**tuned.curves[best, rate], **own}}
    [*_, claim] = results.claims(replace(tuned, curves=curves))
    assert claim.number == 14
    assert claim.margins == pytest.approx([-1.0] * 8)
    assert GRID.ways[best].title in claim.found


def test_a_way_that_is_not_tuned_is_waited_for() -> None:
    tuned = with_tuning_curves(made_up(GRID.test_seeds, 0.02, 0.0), "veto_16")
    rate = tuned_rate(GRID, tuned.ends, "prefix_64")[1]
    assert rate is not None
    lacking = {key: curve for key, curve in tuned.curves["prefix_64", rate].items() if key[0] != 101}
    assert results.chosen(replace(tuned, curves={**tuned.curves, ("prefix_64", rate): lacking})) is None


def test_only_runs_from_one_warm_start_choose() -> None:
    tuned = with_tuning_curves(made_up(GRID.test_seeds, 0.02, 0.0), "veto_16")
    rate = tuned_rate(GRID, tuned.ends, "prefix_64")[1]
    assert rate is not None
    own = {(seed, "another"): curve for (seed, _), curve in tuned.curves["prefix_64", rate].items()}
    elsewhere = replace(tuned, curves={**tuned.curves, ("prefix_64", rate): own})
    assert elsewhere.merit("prefix_64") is results.chosen(elsewhere) is None
    assert "**" not in results.choice_table(elsewhere)


def test_no_claim_is_tested_before_its_last_seed() -> None:
    some = made_up(GRID.test_seeds[:5], 0.02, 0.0)
    assert "5 of 8 seeds have run" in results.claim_lines(some)
    assert "p =" not in results.claim_lines(some)
    assert results.claim_lines(made_up([], 0.02, 0.0)) == ""
    assert "| GRPO's clip, µ=4 | 8 | 6 |" in results.tests_table(some)  # of two warm starts of seed 28
