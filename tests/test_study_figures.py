"""README's figures of the study, computed again from docs/study/*.csv."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from statistics import fmean, median

import numpy as np
import pytest

from run_scripts.dev import objectives, part_seven
from run_scripts.dev.study import holm, interval, sign_flip, with_table
from tests.checkout import ROOT, text_of

WHEN = Path(ROOT, "docs/when.md").read_text(encoding="utf-8")
README = text_of("README.md")
PART_SIX = text_of("docs/study/part-six.md")
WAYS_OF_SIX = (("six_small", "stage"), ("six_large", "rule"), ("six_large", "eight"))
Figures = Mapping[int, float]
"""Seed -> a figure."""


def rows_of(name: str) -> list[dict[str, str]]:
    with Path(ROOT, "docs/study", name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def column(
    name: str, method: str, rate: float, key: str = "after", drawn_again: Collection[int] = (), tuning: bool = False
) -> Figures:
    """A figure of a method's cells, of tuning seeds or the others. Seeds in `drawn_again` take their second draw."""
    rows = [row for row in rows_of(name) if (row["method"], float(row["rate"])) == (method, rate)]
    draws = {(int(row["seed"]), int(row["repeat"])): float(row[key]) for row in rows}
    return {
        seed: draws[seed, draw] for seed, draw in draws if (seed >= 100) == tuning and draw == (seed in drawn_again)
    }


def minus(left: Figures, right: Figures) -> list[float]:
    return [100 * (left[seed] - right[seed]) for seed in sorted(left.keys() & right.keys())]


def last_quarter(method: str, rate: float) -> Figures:
    """Mean accuracy over the last quarter of 512 updates by seed: the curve between evaluations is a straight line."""
    curves: dict[int, list[tuple[int, float]]] = {}
    for row in rows_of("curves.csv"):
        if (row["method"], row["repeat"]) == (method, "0") and float(row["rate"] or 0) == rate and row["accuracy"]:
            curves.setdefault(int(row["seed"]), []).append((int(row["update"]), float(row["accuracy"])))
    updates = np.linspace(384, 512, 1025)
    means = {}
    for seed, curve in curves.items():
        at, accuracy = np.array(curve).T
        means[seed] = float(np.interp(updates, at, accuracy).mean())
    return {seed: mean for seed, mean in means.items() if seed < 100}


def test_one_stage_and_its_schedules() -> None:
    grpo, strict, none, veto = (
        column("cells.csv", name, rate)
        for name, rate in (("grpo", 4e-5), ("strict", 8e-5), ("none", 1e-5), ("veto", 1e-5))
    )
    start = fmean(column("cells.csv", "veto", 1e-5, "before").values())
    stage = minus(veto, grpo)
    quarters = last_quarter("mild_decay", 8e-5), last_quarter("grpo", 4e-5)
    again = {0, 3, 4}  # docs/study/plan.md, "Repeated runs"
    fifth = minus(
        *(column("cells.csv", name, rate, "after", again) for name, rate in (("grow_decay", 8e-5), ("grpo", 4e-5)))
    )
    assert f"one small task: {interval(stage)} points with one stage, {interval(fifth)} with eight" in README
    assert f"{interval(minus(grpo, strict), '')} points below GRPO" in README
    for row in (
        f"| sums, from {100 * start:.0f} % | one stage of 512 updates | {interval(stage)} | {len(stage)} |",
        f"| sums, from {100 * start:.0f} % | eight stages of doubling length, falling rate | {interval(fifth)} | "
        f"{len(fifth)} |",
    ):
        assert row in WHEN
    falling = minus(column("cells.csv", "mild_decay", 8e-5), grpo)
    most, most_falling = (
        100 * max(column("cells.csv", name, rate, "vetoed").values())
        for name, rate in (("veto", 1e-5), ("grow_decay", 8e-5))
    )
    assert f"at most {most:.3f} % of a run's tokens" in " ".join(WHEN.split())
    assert f"up to {most_falling:.1f} % of the tokens" in " ".join(WHEN.split())
    study = text_of("docs/study.md")
    assert f"| {interval(falling)} |" in study
    assert f"over the last quarter of the updates its mean is {interval(minus(*quarters))} points" in study
    assert f"relaxed clip is worth {interval(minus(none, strict))} points over GRPO's clip" in study
    assert f"The veto is worth {interval(minus(veto, none))} points more" in study
    assert study.count(f"at most {most:.3f} % of the tokens") == 2


def six(headroom: str, method: str, key: str = "after") -> Figures:
    """A figure of part six at the method's tuned rate."""
    rate = {"six_small": 8e-5, "six_large": 4e-5}[headroom.replace("euclid_", "")] if method == "grpo" else 2e-5
    return column(f"{headroom}/cells.csv", method, rate, key)


def test_part_six() -> None:
    for grid, way in WAYS_OF_SIX:
        _, _, gap, _, phases, *_ = PART_SIX.partition(f"| `{way}` | 2·10⁻⁵ |")[2].split(" | ")
        assert gap == interval(minus(six(grid, way), six(grid, "grpo")))
        assert phases == f"{round(fmean(six(grid, way, 'stages').values()), 1):g}"


def shares(grid: str, *methods: str) -> list[tuple[float, float]]:
    """(nats of a stage, gap to GRPO as a share of the start's errors) of the methods' cells."""
    nats, before, after = ({name: six(grid, name, key) for name in methods} for key in ("nats", "before", "after"))
    grpo = six(grid, "grpo")
    return [
        (nats[name][seed], (grpo[seed] - after[name][seed]) / (1 - before[name][seed]))
        for name in methods
        for seed in after[name]
    ]


def test_the_laws_formula_predicted_four_gaps() -> None:
    """gap = errors · height · (1 − exp(−nats / scale)), fitted without `euclid`; `half` holds nine of ten cells."""
    law = [row for row in rows_of("law.csv") if row["gap"]]
    known = [(float(row["nats"]), float(row["gap"]) / (1 - float(row["start_sampled"]))) for row in law]
    known += shares("six_small", "stage") + shares("six_large", "rule", "eight")
    nats, gaps = np.array(known).T
    scales = np.geomspace(0.05, 5.0, 400)
    shapes = -np.expm1(-nats / scales[:, None])
    heights = shapes @ gaps / (shapes**2).sum(axis=1)
    residuals = np.abs(gaps - heights[:, None] * shapes)
    best = (residuals**2).sum(axis=1).argmin()
    half = np.sort(residuals[best])[math.ceil(0.9 * (len(known) + 1)) - 1]
    assert f"e · {heights[best]:.3f} · (1 - exp(-n / {scales[best]:.2f})), ± {half:.3f} of e" in PART_SIX
    predicted = [*shares("six_euclid_small", "stage", "eight"), *shares("six_euclid_large", "stage", "eight")]
    misses = [abs(gap + heights[best] * math.expm1(-moved / scales[best])) for moved, gap in predicted]
    assert [miss <= half for miss in misses] == [True] * 4
    assert math.sqrt(fmean(miss**2 for miss in misses)) == pytest.approx(0.019, abs=5e-4)


def seven(headroom: str, way: str) -> Figures:
    """Ends of part seven at the way's tuned rate."""
    rate = {"grpo": {"small": 4e-5, "large": 8e-5}[headroom], "four_product": 4e-5}.get(way, 2e-5)
    return column(f"seven_{headroom}/cells.csv", way, rate)


def test_part_seven(tmp_path: Path) -> None:
    page = Path(ROOT, "docs/study/part-seven.md").read_text(encoding="utf-8")
    cells = {headroom: part_seven.read_cells(headroom) for headroom in ("small", "large")}
    assert with_table(page, part_seven.table(cells)) == page, "python -m run_scripts.dev.part_seven"
    assert "4 stages, product" in part_seven.draw(cells, tmp_path / "seven.svg").read_text(encoding="utf-8")
    product_minus_veto = [minus(seven(headroom, "stage_product"), seven(headroom, "stage_veto")) for headroom in cells]
    four = minus(seven("small", "four_product"), seven("small", "grpo"))
    left, lost = (minus(seven("large", "grpo"), seven("large", way)) for way in ("four_product", "stage_veto"))
    spared = [half / 2 - rest for half, rest in zip(lost, left, strict=True)]
    chances = holm([max(map(sign_flip, product_minus_veto)), sign_flip([gap + 1 for gap in four]), sign_flip(spared)])
    small, large = (interval(values, "") for values in product_minus_veto)
    more = [interval(minus(seven(size, "four_product"), seven(size, "stage_product")), "") for size in cells]
    over = [interval(minus(seven("large", way), seven("large", "four_veto")), "") for way in ("grpo", "four_product")]
    tuned = [
        [100 * fmean(column(f"seven_{headroom}/cells.csv", "grpo", rate, tuning=True).values()) for rate in rates]
        for headroom, rates in (("small", (2e-5, 4e-5, 8e-5)), ("large", (4e-5, 8e-5, 1.6e-4)))
    ]
    for sentence in (
        f"Of at least 280 planned runs {sum(map(len, cells.values()))} have run",
        f"{small} points above the veto with small headroom and {large} points above it with large",
        f"{interval([-points for points in four], '')} points below GRPO",
        f"with the product end {more[0]} points above one stage with small headroom, and {more[1]} points above it",
        f"with the veto end {over[0]} points below GRPO. Four stages with the product end {over[1]} points above them",
        f"lose {fmean(left):.1f} points, one stage with the veto {fmean(lost):.1f} points",
        f"The loss is {interval(spared, '')} points less than half",
        "**No claim is shown**: p = {:.2f} for claim 9, {:.2f} for claim 10 and {:.2f} for claim 11".format(*chances),
        "| small | {:.1f} % | {:.1f} % | {:.1f} % | – | 4·10⁻⁵ |".format(*tuned[0]),
        "| large | – | {:.1f} % | {:.1f} % | {:.1f} % | 8·10⁻⁵ |".format(*tuned[1]),
    ):
        assert sentence in " ".join(page.split())


def test_part_six_against_the_rate_of_part_seven() -> None:
    below = [minus(seven(grid.removeprefix("six_"), "grpo"), six(grid, way)) for grid, way in WAYS_OF_SIX]
    stage, rule, eight = (interval(values, "") for values in below)
    corrected = f"`stage` ends {stage} points lower, `rule` {rule} points lower, and `eight` {eight} points lower"
    assert corrected in PART_SIX
    assert [round(sign_flip([1 - points for points in values]), 3) for values in below] == [1.0] * 3
    start, low, _ = (100 * fmean(six(*cell, "before").values()) for cell in WAYS_OF_SIX)
    assert f"| sums, from {start:.0f} % (sampled) | one stage of 256 updates | -{stage} | 8 |" in WHEN
    assert f"| sums, from {low:.0f} % (sampled) | eight equal stages | -{eight} | 8 |" in WHEN
    own = interval(minus(seven("small", "grpo"), seven("small", "stage_veto")), "")
    assert f"these runs ended [{own} points below GRPO]" in " ".join(WHEN.split())
    part_seven_page = text_of("docs/study/part-seven.md")
    assert f"where the table has -{own.split()[0]} points" in part_seven_page
    assert f"[Part six](part-six.md#results) has -{stage.split()[0]} points" in part_seven_page


def real_model() -> dict[str, list[dict[str, str]]]:
    """Way -> cells; the tuning seed is left out."""
    rows = [row for row in rows_of("real_model.csv") if int(row["seed"]) < 100]
    return {way: [row for row in rows if row["way"] == way] for way in {row["way"] for row in rows}}


def test_the_table_of_the_real_model() -> None:
    section = (
        Path(ROOT, "docs/study.md").read_text(encoding="utf-8").split("\n## On a real model\n")[1].split("\n## ")[0]
    )
    cells = real_model()
    ends = {way: {int(row["seed"]): float(row["end"]) for row in own} for way, own in cells.items()}
    ways = {
        "GRPO, µ=4": "grpo",
        **{f"{n} stages, {veto}": f"{n}-{veto}" for n in (4, 8) for veto in ("veto", "prefix")},
    }
    for title, way in ways.items():
        [line] = [line for line in section.splitlines() if line.startswith(f"| {title} |")]
        shown, gap, _, nats, *seconds = (cell.strip() for cell in line.strip("|").split("|")[1:])
        assert shown == ", ".join(f"{100 * ends[way][seed]:.1f}" for seed in (0, 1, 2))
        assert gap == ("–" if way == "grpo" else interval(minus(ends[way], ends["grpo"])))
        assert nats == f"{fmean(float(row['nats_a_stage']) for row in cells[way]):.2f}"
        phases = [median(float(row[f"s_{phase}"]) for row in cells[way]) for phase in ("sync", "generate", "optimize")]
        assert seconds == list(map(str, phases))
    four, eight = (interval(minus(ends[way], ends["grpo"])) for way in ("4-veto", "8-veto"))
    assert f"| SmolLM2-135M on one H200 | four stages of 12 updates | {four} | 3 |" in WHEN
    assert f"| SmolLM2-135M on one H200 | eight stages of 6 updates | {eight} | 3 |" in WHEN
    assert f"SmolLM2-135M: {four} with four" in README


def test_the_page_of_all_objectives_is_that_of_its_cells(tmp_path: Path) -> None:
    cells, chain = objectives.read_cells(objectives.REAL), objectives.read_cells(objectives.CHAIN, "after_8")
    page = objectives.PAGE.read_text(encoding="utf-8")
    assert with_table(page, objectives.table(cells, chain)) == page, "python -m run_scripts.dev.objectives"
    assert objectives.draw(cells, chain, tmp_path / "all.svg").read_text(encoding="utf-8").count("mu_grpo") == 6

    def gain(left: tuple[str, float], right: tuple[str, float]) -> float:
        one, other = (cells[f"`mu_grpo`{name}" if "," in name else f"`{name}`", rate] for name, rate in (left, right))
        return fmean(one[seed].end - other[seed].end for seed in one.keys() & other.keys())

    narrow = ("grpo", "dapo", "dr_grpo", "rloo", "gspo", "opsm", "m2po_drop")
    doubled = [gain((name, 2e-5), (name, 1e-5)) for name in narrow]
    nats = {name: median(cell.nats for cell in cells[f"`{name}`", 1e-5].values()) for name in (*narrow, "mu_grpo")}
    furthest = max(nats[name] for name in narrow) / nats["mu_grpo"]
    prefixes = [
        f"{fmean(objectives.gaps(cells, name, objectives.better_rate(cells, name))):.1f}"
        for name in ("`mu_grpo`, `prefix`", "`mu_grpo`, `prefix_min`")
    ]
    vetoes = [gain(("mu_grpo", rate), (", no veto", rate)) for rate in (1e-5, 2e-5)]
    penalties = [gain((", KL to the stage 0.01", rate), ("mu_grpo", rate)) for rate in (1e-5, 2e-5)]
    ends = {name: chain[name, objectives.better_rate(chain, name)][100].end for name, _ in chain}
    lowest = [ends.pop(f"`{name}`") for name in narrow]
    first_13 = sorted(ends.values())[-13:]
    same = [chain[name, 2e-5][100].end for name in ("`mu_grpo`", "`mu_grpo`, no veto")]
    [again] = objectives.read_cells(objectives.REAL, repeat=1).values()
    first, second, third = (again[seed].end - cells["`mu_grpo`", 1e-5][seed].end for seed in range(3))
    for sentence in (
        f"thirteen objectives end at {first_13[0]:.1f} to {first_13[-1]:.1f} %",
        f"and the narrow clips at {min(lowest):.0f} to {max(lowest):.0f} %",
        f"They measured {same[0]:.1f} % and {same[1]:.1f} %",
        f"moves the policy at most {'a fifth' if furthest <= 0.2 else furthest} as far as the veto",
        f"gains {min(doubled):.0f} to {max(doubled):.0f} points from the doubled rate",
        f"worth {vetoes[0]:.1f} points at 10⁻⁵ and {vetoes[1]:.1f} points at 2·10⁻⁵",
        f"changes mu-GRPO by {penalties[0]:+.1f} points at 10⁻⁵ and by {penalties[1]:+.1f} points at 2·10⁻⁵",
        f"ended {prefixes[0]} and {prefixes[1]} points above the veto",
        f"{first:+.1f}, {second:+.1f} and {third:.1f} points",
        f"µ=4](../study.md#on-a-real-model) had {100 * fmean(float(row['end']) for row in real_model()['grpo']):.1f} %",
    ):
        assert sentence in " ".join(page.split())
