"""The report: every state of a run gives a page, and the page is self-contained."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from mugrpo_megatron.evaluation.estimators import SetFigures, figures_of, mean_interval
from mugrpo_megatron.observe.results import summarize, summary_table
from mugrpo_megatron.observe.rundata import read_run, seconds_by_phase
from mugrpo_megatron.report.drawing import MAX_POINTS, SLICES, draw
from mugrpo_megatron.report.page import write_report
from mugrpo_megatron.report.tables import stage_table
from tests.refusals import refuses
from tests.report.synthetic import charts_of, drawing_in, recipe_of, rows_of, write_run


@given(cut=st.integers(min_value=1, max_value=10_000))
@settings(max_examples=8, deadline=None)
def test_a_run_interrupted_anywhere_gives_a_page(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    rows = rows_of(3, 5)
    directory = write_run(tmp_path_factory.mktemp("run"), rows[: 1 + cut % len(rows)], recipe_of(3, 5))
    html = write_report(directory).read_text()
    assert "unfinished" in html
    data = drawing_in(html)
    for chart in data["charts"]:
        for series in chart["series"]:
            assert len(series["y"]) == len(data["axes"][series["axis"]]["u"])


def test_page_is_self_contained_and_names_run_recipe_and_events(tmp_path: Path) -> None:
    rows = rows_of(2, 4)
    event = {"kind": "event", "time": rows[0]["time"] + 7.5, "event": "engine_failure", "text": "died <here>"}
    directory = write_run(tmp_path / "my & run", [*rows[:2], event, *rows[2:]], recipe_of(2, 4), summary={})
    html = write_report(directory).read_text()
    for shown in (
        "my &amp; run",
        '<span class="status finished">',
        "<div class=set><dt>seed</dt><dd>3</dd></div>",
        "<div><dt>deterministic</dt><dd>false</dd></div>",
        '<td class="n">7.5 s</td><td>engine_failure</td><td>died &lt;here&gt;</td>',
    ):
        assert shown in html, shown
    outside = re.findall(
        r"""(?:src|href)\s*=\s*["'](?!data:|#)|@import|url\((?!#)|fetch\((?!"/")|https?://(?!www\.w3\.org/2000/svg)""",
        html,
    )
    assert outside == []
    policy = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"]


@pytest.mark.parametrize(("stages", "updates"), [(1, 3), (20, 2)])
def test_every_chart_has_its_one_card_and_every_phase_its_span(stages: int, updates: int, tmp_path: Path) -> None:
    rows = rows_of(stages, updates)
    directory = write_run(tmp_path, rows, recipe_of(stages, updates))
    cards = re.findall(r'id="chart-(\w+)"', write_report(directory).read_text())
    drawing = draw(read_run(directory))
    assert sorted(cards) == sorted([*(chart.id for chart in drawing.charts), "timeline"])
    spans = drawing.timeline["spans"]
    assert len(spans) == sum(row["kind"] == "phase" for row in rows)
    assert all(0 <= start <= end for _, _, start, end in spans)


def test_stages_that_grow_have_no_updates_each(tmp_path: Path) -> None:
    recipe = recipe_of(2, 8)
    grown = recipe.model_copy(update={"schedule": recipe.schedule.model_copy(update={"growth": 1.5})})
    for tables, says in ((recipe, "µ = 8 updates each"), (grown, "µ = 8 updates a stage on average growth 1.5")):
        html = write_report(write_run(tmp_path, rows_of(2, 8), tables)).read_text()
        assert says in " ".join(re.sub("<[^>]*>", " ", html).split())


@pytest.mark.parametrize(
    ("recipe", "held_out", "training"),
    [
        ({"eval": {"temperature": 0.0}, "rollout": {"temperature": 1.0}}, "greedily", "at temperature 1"),
        (
            {"eval": {"temperature": 0.6, "sets": {"aime": {"temperature": 1.0}, "amc": {}}}, "rollout": {}},
            "at temperature 0.6 and 1",
            "as the recipe says",
        ),
    ],
)
def test_accuracy_chart_says_how_both_curves_were_sampled(
    recipe: dict[str, dict[str, object]], held_out: str, training: str, tmp_path: Path
) -> None:
    run = read_run(write_run(tmp_path, rows_of(1, 2), recipe_of(1, 2)))
    charts = charts_of(replace(run, recipe=recipe))
    assert f"Responses are sampled {held_out}." in charts["accuracy"].explains
    assert f"responses, sampled {training} when" in charts["reward"].explains


def test_summary_counts_what_the_rows_say(tmp_path: Path) -> None:
    rows = rows_of(2, 8)
    summary = summarize(write_run(tmp_path, rows, recipe_of(2, 8)))
    evals = [row for row in rows if row["kind"] == "eval"]
    assert summary["accuracy_before"] == evals[0]["accuracy/mean"] == evals[0]["accuracy/arithmetic"]
    assert summary["accuracy_after"] == evals[-1]["accuracy/mean"]
    assert summary["accuracy_interval"] == [evals[-1]["low/mean"], evals[-1]["high/mean"]]
    assert (summary["stages"], summary["updates"], summary["seed"]) == (2, 16, 3)
    assert summary["tokens"] == {"generated": 2 * 8 * 256 * 8, "trained": 16 * 2048}
    assert summary["seconds"]["optimize"] == pytest.approx(2 * 8 * 0.2, abs=1e-4)
    rollout = sum(summary["seconds"][phase] for phase in ("sync", "generate", "score"))
    total = rollout + summary["seconds"]["optimize"]
    assert summary["paper_seconds"] == pytest.approx({"T_rollout": rollout, "T_total": total}, abs=1e-4)
    ends = [row["end"] for row in rows if row["kind"] == "phase"]
    assert summary["seconds"]["total"] == pytest.approx(max(ends) - rows[0]["time"], abs=1e-4)


def test_the_phases_of_the_table_and_what_is_between_them_are_the_total(tmp_path: Path) -> None:
    summary = summarize(write_run(tmp_path, rows_of(2, 8), recipe_of(2, 8)))
    for more in (0.1, 30.0):
        seconds = {**summary["seconds"], "total": sum(summary["seconds"].values()) - summary["seconds"]["total"] + more}
        names, values, shares = (
            list(column.cells) for column in summary_table({**summary, "seconds": seconds}).columns
        )
        assert ("between phases" in names) == (more > 1)
        if more > 1:
            row = names.index("between phases")
            assert (values[row], shares[row]) == ("30.0 s", f"{100 * more / seconds['total']:.0f} %")


def test_a_first_evaluation_inside_the_run_is_not_before_it(tmp_path: Path) -> None:
    """As in a run whose first stage was generated and optimized by commands of their own."""
    rows = rows_of(2, 8)
    begun = next(row for row in rows if row["kind"] == "eval")
    directory = write_run(tmp_path, [row for row in rows if row is not begun], recipe_of(2, 8))
    summary = summarize(directory)
    assert summary["accuracy_before"] is None
    assert summary["accuracy_before_interval"] is None
    assert summary["accuracy_after"] is not None
    [gain] = [cell for column in summary_table(summary).columns for cell in column.cells if "not known" in str(cell)]
    assert str(gain) == "not known: not evaluated before the first update"
    html = write_report(directory).read_text()
    assert "not evaluated yet" not in html


SETS = ("math500", "aime24", "own-test")


def test_several_sets_stand_side_by_side_and_are_never_pooled(tmp_path: Path) -> None:
    rows = rows_of(2, 8, sets=SETS)
    directory = write_run(tmp_path, rows, recipe_of(2, 8))
    first, *_, last = (row for row in rows if row["kind"] == "eval")
    summary = summarize(directory)
    assert summary["accuracy_after"] == pytest.approx(sum(last[f"accuracy/{name}"] for name in SETS) / 3)
    assert list(summary["sets"]) == list(SETS)
    for name in SETS:
        assert summary["sets"][name] == {
            "before": first[f"accuracy/{name}"],
            "before_interval": [first[f"low/{name}"], first[f"high/{name}"]],
            "after": last[f"accuracy/{name}"],
            "interval": [last[f"low/{name}"], last[f"high/{name}"]],
            "problems": 500,
            "samples": 1,
        }
    assert summary["problems"] == 1500
    accuracy = charts_of(read_run(directory))["accuracy"]
    assert [series.label for series in accuracy.series] == [*SETS, "mean accuracy"]
    assert len({series.color for series in accuracy.series}) == 4
    assert [series.low is not None for series in accuracy.series] == [False, False, False, True]
    for series, name in zip(accuracy.series, (*SETS, "mean"), strict=False):
        assert series.y[-1] == pytest.approx(last[f"accuracy/{name}"], rel=1e-5)
    table = stage_table(read_run(directory))
    assert table
    assert table["head"][-4:] == tuple(f"{name}, after" for name in (*SETS, "mean"))
    assert table["rows"][-1][-4:] == tuple(f"{100 * last[f'accuracy/{name}']:.1f} %" for name in (*SETS, "mean"))
    html = write_report(directory).read_text()
    assert "Held-out accuracy, mean" in html
    assert "3 sets, unweighted, 1,500 problems" in html


def test_the_only_set_stands_for_itself(tmp_path: Path) -> None:
    directory = write_run(tmp_path, rows_of(2, 8), recipe_of(2, 8))
    accuracy = charts_of(read_run(directory))["accuracy"]
    assert [series.label for series in accuracy.series] == ["held-out accuracy"]
    assert accuracy.series[0].low is not None
    table = stage_table(read_run(directory))
    assert table
    assert table["head"][-1] == "arithmetic, after"


def test_mean_rewards_are_called_so_and_are_not_percentages(tmp_path: Path) -> None:
    rows = rows_of(2, 8)
    renamed = [
        {
            key.replace("accuracy/", "reward/"): 3 * v if key[:3] in ("acc", "low", "hig") else v
            for key, v in row.items()
        }
        for row in rows
    ]
    directory = write_run(tmp_path, renamed, recipe_of(2, 8))
    summary = summarize(directory)
    assert summary["measure"] == "reward"
    assert "accuracy_after" not in summary
    assert summary["reward_after"] == summary["sets"]["arithmetic"]["after"] > 1.0
    accuracy = charts_of(read_run(directory))["accuracy"]
    assert (accuracy.title, accuracy.format) == ("Held-out reward", "number")
    html = write_report(directory).read_text()
    assert "Held-out reward" in html
    assert "Held-out accuracy" not in html
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(summary_table(summary))
    said = console.export_text()
    assert f"{summary['reward_after']:.4g}" in said
    assert "accuracy" not in said


def test_a_set_of_one_problem_has_no_interval_to_draw(tmp_path: Path) -> None:
    figures = figures_of("reward", {"one": SetFigures(mean_interval([3.0]), 1, 1)})
    assert figures == {"reward/one": 3.0, "reward/mean": 3.0, "problems/one": 1, "samples/one": 1}
    rows = [{**row, **figures} if row["kind"] == "eval" else row for row in rows_of(1, 2, sets=())]
    directory = write_run(tmp_path, rows, recipe_of(1, 2))
    assert summarize(directory)["reward_interval"] is None
    assert "Held-out reward" in write_report(directory).read_text()


@given(killed_at=st.integers(min_value=12, max_value=60), pause=st.floats(min_value=0, max_value=1e7))
@settings(max_examples=10, deadline=None)
def test_resumed_run_counts_every_update_once_and_no_idle_time(
    killed_at: int, pause: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The first process dies after row `killed_at`; the second continues from the start of stage 1."""
    rows = rows_of(3, 10)
    again = next(i for i, row in enumerate(rows) if row.get("stage") == 1)
    killed_at = max(killed_at, again)
    last = max(row["end"] if row["kind"] == "phase" else row["time"] for row in rows[:killed_at])
    shift = last + pause - rows[again]["start"]
    later = [
        {key: value + shift if key in ("time", "start", "end") else value for key, value in row.items()}
        for row in rows[again:]
    ]
    process = {**rows[0], "time": last + pause}
    run = read_run(write_run(tmp_path_factory.mktemp("run"), [*rows[:killed_at], process, *later], recipe_of(3, 10)))
    assert [row["update"] for row in run.updates] == list(range(30))
    assert [row["update"] for row in run.evals] == [0, 10, 20, 30]
    times = [run.clock(row["time"]) for row in run.updates]
    assert times == sorted(times)
    first, second = last - rows[0]["time"], rows[-1]["end"] + shift - process["time"]
    assert run.seconds == pytest.approx(first + second, abs=1e-2)


def test_not_finite_values_are_gaps_and_are_told(tmp_path: Path) -> None:
    rows = rows_of(1, 6)
    broken = [row for row in rows if row["kind"] == "update"][2]
    broken |= {"loss": None, "not_finite": {"loss": "nan"}, "skipped": 1.0}
    directory = write_run(tmp_path, rows, recipe_of(1, 6))
    run = read_run(directory)
    assert draw(run).not_finite == {"loss": 1}
    assert [value is None for value in charts_of(run)["loss"].series[0].y] == [False, False, True, False, False, False]
    html = write_report(directory).read_text()
    assert "loss in 1 of 6 updates" in html
    assert "1 updates were skipped" in html


def test_many_short_stages_stay_small_and_lose_no_extreme(tmp_path: Path) -> None:
    rows = rows_of(2 * MAX_POINTS // 4, 4)
    peak = max(rows, key=lambda row: row.get("ratio_neg_max", 0))
    run = read_run(write_run(tmp_path, rows, recipe_of(MAX_POINTS // 2, 4)))
    drawing = draw(run)
    charts = {chart.id: chart for chart in drawing.charts}
    highest = charts["ratio_neg"].series[0]
    assert drawing.bucket == 2
    assert len(highest.y) <= MAX_POINTS
    assert max(value for value in highest.y if value is not None) == pytest.approx(peak["ratio_neg_max"], rel=1e-5)
    assert drawing.timeline["spans"] == []
    busy = [sum(column) for column in zip(*drawing.timeline["slices"], strict=True)]
    assert len(busy) == SLICES
    assert all(0 <= share <= 1.01 for share in busy)
    assert [series.label for series in charts["ess_by_age"].series] == [f"median of {MAX_POINTS // 2} stages"]


def test_missing_files_are_user_errors(tmp_path: Path) -> None:
    refuses(r"recipe\.toml: no such file", write_report, tmp_path)
    (tmp_path / "recipe.toml").write_text("[run]\n")
    refuses(r"metrics\.jsonl: no such file", write_report, tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    refuses("no rows yet", write_report, tmp_path)


@pytest.mark.parametrize("color", [True, False])
def test_the_summary_fits_eighty_columns_with_and_without_colour(color: bool, tmp_path: Path) -> None:
    rows = rows_of(4, 64, sets=["math500", "amc23", "aime24", "aime25", "olympiad_bench"])
    summary = summarize(write_run(tmp_path, rows, recipe_of(4, 64)))
    file = io.StringIO()
    Console(width=80, file=file, force_terminal=color, color_system="truecolor" if color else None).print(
        summary_table(summary)
    )
    said = re.sub("\x1b\\[[0-9;]*m", "", file.getvalue())
    assert ("\x1b[" in file.getvalue()) == color
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= 80
    for text in ("math500", "olympiad_bench", "256 updates in 4 stages, seed 3", "tokens/s"):
        assert text in said, text


def test_a_phase_inside_another_counts_once() -> None:
    spans = [("generate", 0, 5), ("save", 7, 8), ("probe", 9, 9.5), ("optimize", 5, 10), ("eval", 10, 12)]
    rows = [{"phase": name, "start": start, "end": end} for name, start, end in spans]
    seconds = seconds_by_phase(rows)
    assert seconds == {"generate": 5, "optimize": 3.5, "save": 1, "probe": 0.5, "eval": 2}
    assert list(seconds) == ["generate", "optimize", "save", "probe", "eval"]
