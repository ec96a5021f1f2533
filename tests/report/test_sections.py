"""What the page says of a run around its curves: verdicts, signs, progress, origin, and what it folds."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.observe.progress import duration
from mugrpo_megatron.observe.results import summary_of
from mugrpo_megatron.observe.rundata import RunData, read_run
from mugrpo_megatron.report.charts import SECTIONS, TABLE, VETO
from mugrpo_megatron.report.page import page, slug
from mugrpo_megatron.report.remarks import collapsed_sections, remarks
from tests.report.synthetic import recipe_of, rows_of, write_run


@pytest.fixture
def run(tmp_path: Path) -> RunData:
    return read_run(write_run(tmp_path / "run", rows_of(2, 16), recipe_of(2, 16)))


def sections_in(html: str) -> dict[str, bool]:
    """Name of each folding section -> whether it begins open."""
    return {
        name: bool(is_open) for name, is_open in re.findall(r'<details class="section" id="([\w-]+)"( open)?>', html)
    }


def words(html: str) -> str:
    return " ".join(re.sub("<[^>]*>", " ", html).split())


def test_every_section_is_in_the_list_at_the_top_and_has_a_sentence(run: RunData) -> None:
    html = page(run)
    links = re.findall(r'<a href="#([\w-]+)">', html)
    assert links == [*sections_in(html), "stages", "numbers", "recipe"]
    for name in links:
        assert html.count(f'id="{name}"') == 1
    for name in sections_in(html):
        assert re.search(rf'id="{name}-says">[^<]+<', html), name


def test_the_table_has_each_chart_once_and_its_sections_in_order() -> None:
    assert len({plan.id for plan in TABLE}) == len(TABLE)
    assert {plan.section for plan in TABLE} <= set(SECTIONS)
    assert len({slug(title) for title in SECTIONS}) == len(SECTIONS)


@pytest.mark.parametrize(("share", "opens"), [(0.0005, False), (0.05, True)])
def test_the_vetos_sections_open_where_the_veto_matters(share: float, opens: bool, run: RunData) -> None:
    run = replace(run, updates=[{**row, "vetoed_fraction": share} for row in run.updates])
    assert sections_in(page(run))["triggers-by-threshold"] == opens
    assert ("too few to matter" in remarks(run, summary_of(run))[VETO]) != opens


def test_the_papers_figures_open_in_its_recipes(run: RunData) -> None:
    assert "The paper's figures" in collapsed_sections(run)
    renamed = [row | {f"problems/{name}": 30 for name in ("aime24", "aime25", "math500")} for row in run.evals]
    assert "The paper's figures" not in collapsed_sections(replace(run, evals=renamed))


def test_a_sick_run_says_so_above_everything(run: RunData) -> None:
    assert "Health warnings" not in page(run)
    stages = [{**row, "zero_variance_fraction": 0.97} for row in run.stages]
    html = page(replace(run, stages=stages))
    assert html.index("97 % of the groups of stage 1 have equal rewards") < html.index('class="tiles')
    assert [sign["name"] for sign in summary_of(replace(run, stages=stages))["health_warnings"]] == ["equal rewards"]


def test_no_gain_without_an_evaluation_after_training(run: RunData) -> None:
    first = replace(run, evals=run.evals[:1], updates=run.updates[:3])
    text = words(page(first).split("<script")[0])
    assert "points" not in text
    assert "before training, 95 % interval" in text
    assert "has not been measured since" in text
    assert summary_of(first)["accuracy_after"] is None


def test_a_page_says_how_far_the_run_is(run: RunData) -> None:
    half = replace(run, updates=run.updates[:8])
    html = page(half)
    assert f"updates taken: 8 of 32 in {half.seconds:.1f} s, about {duration(half.seconds_left() or 0)} left" in html
    assert '<progress value="0.25" max="1"' in html
    assert '<span class="status unfinished">' in html
    assert "<progress" not in page(replace(run, summary={}))


def test_the_page_says_when_where_and_how_the_run_was_started(run: RunData) -> None:
    origin: dict[str, Any] = {"host": "node7", "commit": "abc+", "command": "mugrpo train <recipe>.toml \x1b[2J"}
    process = {**run.processes[0], "environment": origin}
    text = page(replace(run, processes=[process]))
    assert "started <bdi>2023-11-14 22:13 UTC</bdi>" in text
    assert "host <bdi>node7</bdi>" in text
    assert "command <bdi>mugrpo train &lt;recipe&gt;.toml \\x1b[2J</bdi>" in text


def test_memory_is_drawn_over_the_stages(run: RunData) -> None:
    phases = [{**row, "engine_memory": 3.0 * 2**30} if row["phase"] == "generate" else row for row in run.phases]
    assert 'id="chart-memory"' in page(replace(run, phases=phases))
    assert 'id="chart-memory"' not in page(run)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ((0.5, 0.46, 0.54), (0.7, 0.66, 0.74), "went from 50.0 % to 70.0 % (+20.0 points): a clear gain."),
        ((0.5, 0.46, 0.54), (0.3, 0.26, 0.34), "(-20.0 points): a clear loss."),
        ((0.5, 0.46, 0.54), (0.52, 0.48, 0.56), "(+2.0 points): the 95 % intervals overlap."),
        ((0.5, None, None), (0.7, None, None), "(+20.0 points), without a 95 % interval."),
    ],
)
def test_a_gain_is_clear_where_the_intervals_are_apart(
    before: tuple[float | None, ...], after: tuple[float | None, ...], says: str, run: RunData
) -> None:
    names = ("accuracy/mean", "low/mean", "high/mean")
    ends = [
        {**run.evals[place], **dict(zip(names, values, strict=True))} for place, values in ((0, before), (-1, after))
    ]
    ends_only = replace(run, evals=ends)
    assert says in remarks(ends_only, summary_of(ends_only))["Learning"]
