"""Figures of docs/study/equal-time.md and of part eight's plan, computed again from csv files, planner and Table 1."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from mugrpo_megatron.extras.plan.hardware import make_cluster
from mugrpo_megatron.extras.plan.memory import engine_memory, memory
from mugrpo_megatron.extras.plan.plan import make_plan
from mugrpo_megatron.extras.plan.schedules import grpo_seconds, schedule_of
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.recipe.objective import ObjectiveSection
from run_scripts.dev import equal_time
from run_scripts.dev.part_eight.cells import load_grid
from run_scripts.dev.study import with_cells
from tests.checkout import ROOT, text_of
from tests.extras.plan.published import PUBLISHED, bundled_case, case_of, published
from tests.test_study_figures import minus, rows_of, seven, six

PAGE = Path(ROOT, "docs/study/equal-time.md").read_text(encoding="utf-8")
PLAN = Path(ROOT, "docs/study/part-eight.md").read_text(encoding="utf-8")
RECIPES = Path(ROOT, "run_scripts/recipes")
UPDATES = 4096


def test_the_cells_table_and_picture(tmp_path: Path) -> None:
    assert with_cells(PAGE, equal_time.table()) == PAGE, "python -m run_scripts.dev.equal_time"
    drawn = equal_time.draw(tmp_path / "picture.svg").read_text(encoding="utf-8")
    assert "µ=64: 4 stages, prefix" in drawn
    assert drawn == Path(ROOT, "docs/study/equal-time.svg").read_text(encoding="utf-8")


def test_no_schedule_is_above_grpo_at_its_planned_speed_up() -> None:
    """The page's first sentence: no interval at a planned speed-up is above 0; four prefix stages are level at 1.53."""
    for one in equal_time.compared():
        if one.planned:
            assert equal_time.mean_interval(equal_time.gaps(one.own, one.grpo, one.planned)).low < 0
            if one.title == "4 stages, prefix":
                level = equal_time.mean_interval(equal_time.gaps(one.own, one.grpo, 1.53))
                assert level.low < 0 < level.high
                assert fmean(equal_time.gaps(one.own, one.grpo, one.planned)) < 0


def test_the_break_evens_that_the_text_repeats() -> None:
    text = " ".join(PAGE.split())
    rows = {(row[1], row[2]): row[7] for row in rows_below(PAGE, "| Setting | Method") if row[0] == equal_time.EIGHT}
    clip, prefix = rows["GRPO's clip", "16"], rows["prefix weights", "64"]
    assert f"Its mean broke even with GRPO at a speed-up of {clip}." in text
    assert f"it broke even at k = {clip}, so" in text
    assert f"prefix weights, broke even at k = {prefix}, and" in text
    older = {tuple(row[:2]): row[4] for row in rows_below(PAGE, "| Setting | Method") if row[4:]}
    veto = older[equal_time.LARGE, "4 stages, veto"].removeprefix("-")
    first_run = text_of("docs/first-run.md")
    assert f"four stages of 64 updates with the veto ended {veto} points below it" in first_run
    assert f"[{clip.split()[0]} times as fast]" in Path(ROOT, "docs/when.md").read_text(encoding="utf-8")


def test_equal_updates_are_a_speed_up_of_one() -> None:
    """Against the ends in part seven's cells.csv: means of three evaluations, not of the curve's last quarter."""
    for headroom, way in (("large", "four_product"), ("small", "stage_veto")):
        found = next(w for w in equal_time.WAYS if w.cells[:2] == (f"seven_{headroom}", way))
        gaps = equal_time.gaps(equal_time.curves_of(*found.cells), equal_time.curves_of(*found.grpo), 1.0)
        assert fmean(gaps) == pytest.approx(fmean(minus(seven(headroom, way), seven(headroom, "grpo"))), abs=0.15)


def rows_below(text: str, head: str) -> list[list[str]]:
    """Cells of a table's rows, by the beginning of its head."""
    lines = text[text.index(head) :].split("\n\n")[0].split("\n")
    return [[" ".join(cell.strip(" *").split()) for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_plans_speed_ups() -> None:
    """Part eight's table of k, its means in the grid, and those that the picture marks."""
    rows = rows_below(PLAN, "| Recipe | µ=8")
    found: dict[str, list[float]] = {}
    for model in PUBLISHED:
        case = bundled_case(model, "grpo")
        need = memory(case, engine_memory(case))
        baseline = grpo_seconds(case, need)
        decoupled = ObjectiveSection(name="decoupled_ppo")
        other = case.with_recipe(case.recipe.model_copy(update={"objective": decoupled}))
        plain = [schedule_of(case, need, UPDATES, size) for size in (8, 16, 32, 64, 128, 256, 1024)]
        passes = [schedule_of(other, need, UPDATES, size) for size in (16, 64)]
        found[model] = [baseline / cost.without_evaluations for cost in (*plain, *passes)]
    for name, *cells in rows[:-1]:
        assert [float(cell) for cell in cells] == pytest.approx(found[name.lower()], abs=6e-4), name
    means = [fmean(column) for column in zip(*found.values(), strict=True)]
    assert [float(cell) for cell in rows[-1][1:]] == pytest.approx(means, abs=6e-4)
    grid = load_grid(Path(ROOT, "docs/study/eight_large/grid.toml"))
    expected = {
        (4, False): 1.0,
        (16, False): means[1],
        (64, False): means[3],
        (16, True): means[7],
        (64, True): means[8],
    }
    for name, way in grid.ways.items():
        assert way.k == pytest.approx(expected[way.mu, name.startswith("decoupled")], abs=6e-4), name
    marked = dict(zip((8, 16, 32, 64, 128, 256), means, strict=False))
    assert {mu: marked[mu] for mu in equal_time.PLANNED} == pytest.approx(equal_time.PLANNED, abs=6e-4)


def speed_ups(name: str, nodes: int, per_node: int, device: str, sizes: tuple[int, ...]) -> list[str]:
    """k of the recipe's updates in stages of each size, as a page has it."""
    case = case_of(RECIPES / f"{name}.toml", make_cluster(nodes, per_node, device))
    need = memory(case, engine_memory(case))
    baseline, updates = grpo_seconds(case, need), case.recipe.schedule.total_updates
    return [f"{baseline / schedule_of(case, need, updates, size).without_evaluations:.2f}" for size in sizes]


def test_the_speed_ups_of_three_machines_and_at_16_nodes() -> None:
    text = " ".join(PAGE.split())
    small = speed_ups("one_gpu/80gb", 1, 1, "h100", (16, 64, 256))
    paper = speed_ups("paper/qwen2.5-math-7b.grpo", 1, 4, "h200", (16, 64, 1024))
    large = speed_ups("multi_node/llama-3.3-70b", 8, 8, "h200", (16, 1024))
    assert f"(`one_gpu/80gb.toml`): k is {small[0]} at µ=16, and {small[2]} at most." in text
    assert f"and the plan has {small[1]}." in text
    assert f"k is {paper[0]} at µ=16, {paper[1]} at µ=64, and {paper[2]} at most." in text
    assert f"8 nodes): k is {large[0]} at µ=16, and {large[1]} at most." in text
    plan = text_of("docs/plan.md")
    assert f"speed-up is {small[0]} at µ=16 and {small[2]} at most." in plan
    rows = rows_below(PAGE, "| Model | k of µ=16")
    for name, *cells, _ in rows:
        assert cells == speed_ups(f"multi_node/{name.lower()}", 16, 8, "h200", (16, 1024)), name
    least, most = min(row[1] for row in rows), max(row[1] for row in rows)
    assert f"GRPO takes {least} to {most} times as long as µ=16" in plan


def test_the_hours_of_the_recipes_for_several_nodes() -> None:
    page = Path(ROOT, "docs/plan.md").read_text(encoding="utf-8")
    for name, machine, *_, grpo, short, long in rows_below(page, "| Recipe in `multi_node/`"):
        nodes, per_node = map(int, machine.split(" x "))
        recipe = load_recipe(RECIPES / "multi_node" / name.strip("`"))
        ours, baseline, four = make_plan(recipe, nodes, per_node, "h200").schedules
        assert [f"{one.total / 3600:.0f}" for one in (baseline, ours, four)] == [grpo, short, long], name


def test_the_papers_table_at_equal_time() -> None:
    rows = rows_below(PAGE, "| Model | GRPO, %")
    ratios, equal = [], []
    for name, _, _, hours, ratio, optimize, same, updates in rows[:-1]:
        grpo, ours = (published(name.lower(), method) for method in ("grpo", "mu_grpo"))
        assert [float(h) for h in hours.split(", ")] == [grpo.total, ours.total]
        assert optimize == f"{grpo.total - grpo.rollout:.1f}, {ours.total - ours.rollout:.1f}"
        ratios.append(grpo.total / ours.total)
        equal.append((grpo.rollout + ours.total - ours.rollout) / ours.total)
        assert (ratio, same) == (f"{ratios[-1]:.2f}", f"{equal[-1]:.2f}")
        assert updates == f"{UPDATES / ratios[-1]:,.0f}"
    _, grpo_mean, our_mean, _, ratio, _, same, _ = rows[-1]
    assert (ratio, same) == (f"{fmean(ratios):.2f}", f"{fmean(equal):.2f}")
    accuracies = [[float(row[k]) for row in rows[:-1]] for k in (1, 2)]
    assert [grpo_mean, our_mean] == [f"{fmean(column):.1f}" for column in accuracies]
    assert f"the mean would be {fmean(equal):.2f}" in " ".join(PAGE.split())
    taken = [UPDATES / ratio for ratio in ratios]
    assert f"{min(taken):,.0f} to {max(taken):,.0f} of its 4,096 updates" in " ".join(PAGE.split())


def test_the_law_refitted_against_bracketed_rates_is_no_better_than_a_constant() -> None:
    law = [row for row in rows_of("law.csv") if row["gap"]]
    cells = [(float(row["nats"]), float(row["gap"]) / (1 - float(row["start_sampled"]))) for row in law]
    for headroom, ways in (("small", ["stage"]), ("large", ["rule", "eight"])):
        grpo = seven(headroom, "grpo")
        for way in ways:
            nats, before, after = (six(f"six_{headroom}", way, key) for key in ("nats", "before", "after"))
            cells += [(nats[seed], (grpo[seed] - after[seed]) / (1 - before[seed])) for seed in after]
    assert len(cells) == 32
    nats, gaps = np.array(cells).T
    scales = np.geomspace(0.05, 5.0, 400)
    shapes = -np.expm1(-nats / scales[:, None])

    def fit(kept: np.ndarray) -> tuple[float, float]:
        heights = shapes[:, kept] @ gaps[kept] / (shapes[:, kept] ** 2).sum(axis=1)
        best = ((gaps[kept] - heights[:, None] * shapes[:, kept]) ** 2).sum(axis=1).argmin()
        return float(heights[best]), float(scales[best])

    everything = np.ones(32, dtype=bool)
    height, scale = fit(everything)
    errors = gaps + height * np.expm1(-nats / scale)
    left_out, constant = [], []
    for k in range(32):
        kept = everything.copy()
        kept[k] = False
        height_k, scale_k = fit(kept)
        left_out.append(gaps[k] + height_k * np.expm1(-nats[k] / scale_k))
        constant.append(gaps[k] - gaps[kept].mean())
    page = text_of("docs/study/law.md")
    rms = [
        100 * float(np.sqrt(np.mean(np.square(values)))) for values in (errors, gaps - gaps.mean(), left_out, constant)
    ]
    assert f"{height:.3f} · (1 - exp(-n / {scale:.2f}))" in page
    assert f"| the formula | {rms[0]:.1f} % of e | {rms[2]:.1f} % of e |" in page
    share = f"one constant share, {100 * gaps.mean():.1f} %"
    assert f"| {share} | {rms[1]:.1f} % of e | {rms[3]:.1f} % of e |" in page


def test_the_best_falling_rate_over_its_last_quarter() -> None:
    falling, grpo = (equal_time.curves_of("", name, rate) for name, rate in (("mild_decay", 8e-5), ("grpo", 4e-5)))
    said = equal_time.interval(equal_time.gaps(falling, grpo, 1.0))
    page = Path(ROOT, "docs/study.md").read_text(encoding="utf-8")
    assert f"its mean is {said} points" in " ".join(page.split())


def test_when_to_use_it_has_the_break_evens_of_short_stages() -> None:
    """docs/when.md: how much faster than GRPO the study's stages of 32 to 64 updates have to be."""
    rows = rows_below(PAGE, "| Setting | Method")
    found = sorted(float(row[7].split()[0]) for row in rows if row[7:] and row[2] in ("32", "64"))
    page = text_of("docs/when.md")
    assert f"stages of 32 to 64 updates had to be {found[0]} to {found[-1]} times as fast as GRPO" in page
