"""What the page shows besides metrics: the responses, the heat map, the atlas and the histograms."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mugrpo_megatron.observe.rundata import RunData, read_run
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.report import curves
from mugrpo_megatron.report.details import MOST_STAGES, StageResponses, read_details, spaced
from mugrpo_megatron.report.drawing import draw
from mugrpo_megatron.report.excerpts import sample_sections
from mugrpo_megatron.report.heat import LEVELS, LOWEST, OTHERS, STEPS, WINDOW, heat_map, heat_text
from mugrpo_megatron.report.page import page, write_report
from mugrpo_megatron.report.probes import probed_responses, veto_masks
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.probe import probe_ages
from mugrpo_megatron.stages.store import StageStore
from tests.report.synthetic import charts_of, recipe_of, rows_of, write_evaluation, write_probe, write_run, write_stage

UPDATES = 16


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """A run with stages, probes and an evaluation, to be looked at."""
    path = write_run(tmp_path_factory.mktemp("run"), rows_of(2, UPDATES), recipe_of(2, UPDATES))
    for stage in range(2):
        write_stage(path, stage)
        write_probe(path, stage, UPDATES, count=8, tokens=6)
    write_evaluation(path, UPDATES)
    return read_run(path)


def test_responses_are_shown_with_what_explains_their_score(run: RunData) -> None:
    text = page(run)
    for shown in ("Evaluation after 16 updates", "3 right, 3 wrong", "Stage 0", "so it is 4", "2+2="):
        assert shown in text
    assert "why <bdi>equal</bdi>" in text
    assert "gold <bdi>4</bdi>" in text
    assert "math <bdi>1</bdi>" in text
    assert text.count('<article class="sample right">') == text.count('<article class="sample wrong">')


HOSTILE = "</script><img onerror=alert(1) src=x>\x1b[2J\x1b]0;title\x07\u202ecba\u202c\u2066x\u2069\u2028"


def test_a_response_is_text_wherever_it_is_shown(tmp_path: Path) -> None:
    """Markup is escaped; what a terminal or the text's direction would obey is written out."""
    path = write_run(tmp_path, rows_of(1, UPDATES), recipe_of(1, UPDATES))
    write_stage(path, 0, text=HOSTILE * 40, gold=HOSTILE)
    write_probe(path, 0, UPDATES, count=8, tokens=5, token=HOSTILE)
    write_evaluation(path, 0, text=HOSTILE, question=HOSTILE)
    text = write_report(path).read_text()
    assert "<img" not in text
    assert text.count("<script") == 2
    data = re.findall(r'<script type="application/json" id="drawing">(.*?)</script>', text, re.DOTALL)
    line = json.dumps(json.loads(data[0]), ensure_ascii=False) + text
    for control in ("\x1b", "\x07", "\u202e", "\u202c", "\u2066", "\u2069", "\u2028"):
        assert control not in line
    assert html.escape("</script><img onerror=alert(1) src=x>\\x1b[2J") in text


def test_what_is_damaged_is_named_and_the_page_is_written(run: RunData, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run.path, tmp_path / "run"))
    for path in (*copy.glob("stages/*/stage.parquet"), *copy.glob("probe/*/age00008.parquet")):
        path.write_bytes(b"damaged")
    (copy / "evaluations" / "update000016.jsonl").write_text("{")
    text = page(replace(run, path=copy))
    assert text.count("cannot be read") == 2
    assert text.count("is damaged") == 3
    assert "Held-out accuracy" in text


def test_a_stage_that_is_not_sealed_is_left_out(run: RunData, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run.path, tmp_path / "run"))
    (copy / "stages" / "00001" / "stage.parquet").unlink()
    assert list(read_details(copy, run.recipe).stages) == [0]


def test_of_many_stages_some_are_read_evenly_spaced() -> None:
    for count in (1, 7, 8, 9, 400):
        chosen = spaced(range(count), MOST_STAGES)
        assert len(set(chosen)) == len(chosen) == min(count, MOST_STAGES)
        assert (chosen[0], chosen[-1]) == (0, count - 1)


def heat_of(run: RunData, **objective: Any) -> dict[str, Any]:
    probed = probed_responses(read_details(run.path, run.recipe), run.recipe)
    heat = heat_map(probed, ObjectiveSection.model_validate(objective))
    assert heat
    return heat


def test_the_heat_map_shows_ratios_triggers_and_what_the_veto_drops(run: RunData) -> None:
    heat = heat_of(run, trigger_ratio=math.exp(-9.9))
    for response in heat["responses"]:
        assert response["ages"] == list(probe_ages(UPDATES))
        for age, cells, triggers, dropped in zip(
            response["ages"], response["cells"], response["triggers"], response["dropped"], strict=True
        ):
            assert len(cells) == len(response["tokens"]) == 6
            shown = LEVELS.index(cells[2]) / STEPS + LOWEST
            assert shown == pytest.approx(max(-age / math.log(10), LOWEST), abs=0.5 / STEPS + 1e-6)
            assert triggers == ([2] if age >= 10 else [])
            assert dropped == ([[3, 5]] if age >= 10 else []), "H_κ: what follows the first trigger"


def test_the_heat_map_follows_the_runs_veto(run: RunData) -> None:
    dropped: dict[str, list[Any]] = {"none": [], "trigger": [[2, 2]], "suffix": [[3, 5]], "response": [[0, 5]]}
    for veto, spans in dropped.items():
        for response in heat_of(run, veto=veto)["responses"]:
            assert (response["dropped"][-1], response["triggers"][-1]) == (spans, [2])


@pytest.mark.parametrize("veto", ["prefix", "prefix_min"])
def test_with_weights_by_the_prefix_tokens_below_one_half_are_marked(run: RunData, veto: str) -> None:
    """The token at 2 falls by a nat an age, and its weight is of the tokens before it."""
    heat = heat_of(run, veto=veto)
    for response in heat["responses"]:
        for age, dropped in zip(response["ages"], response["dropped"], strict=True):
            assert dropped == ([[3, 5]] if age >= 1 else [])
    text = heat_text(heat, ObjectiveSection(veto=veto))
    assert f"under a line have a weight below 0.5 by this run's veto, {veto}." in text


def test_a_ratio_that_is_not_finite_has_no_colour(run: RunData) -> None:
    probed = probed_responses(read_details(run.path, run.recipe), run.recipe)
    broken = [replace(response, log_ratio=np.full_like(response.log_ratio, np.nan)) for response in probed]
    heat = heat_map(broken, ObjectiveSection())
    assert heat
    assert {letter for response in heat["responses"] for cells in response["cells"] for letter in cells} == {OTHERS}


def test_of_a_long_response_the_tokens_around_the_first_trigger_are_shown(tmp_path: Path) -> None:
    path = write_run(tmp_path, rows_of(1, UPDATES), recipe_of(1, UPDATES))
    write_probe(path, 0, UPDATES, count=4, tokens=1000)
    for response in heat_of(read_run(path))["responses"]:
        assert (response["start"], len(response["tokens"]), response["length"]) == (0, WINDOW, 1000)
        assert response["triggers"][-1] == [2]


def test_what_a_tool_wrote_is_grey_and_counts_nowhere(tmp_path: Path) -> None:
    """The token that falls is a tool's: no ratio, no trigger; the turns around it are marked."""
    path = write_run(tmp_path, rows_of(1, UPDATES), recipe_of(1, UPDATES))
    write_probe(path, 0, UPDATES, count=8, tokens=6, mask=[True, True, False, False, True, True])
    run = read_run(path)
    for response in heat_of(run)["responses"]:
        assert response["turns"] == [[0, 1], [4, 2]]
        assert {cells[2:4] for cells in response["cells"]} == {".."}
        assert not any("." in cells[:2] + cells[4:] for cells in response["cells"])
        assert not any(response["triggers"])
        assert not any(response["dropped"])
    assert "Grey: what a tool wrote." in page(run)
    charts = charts_of(run)
    assert all(not any(series.y) for series in charts["atlas_triggers"].series)
    assert min(value for series in charts["atlas_ratio"].series for value in series.y if value) > 0.5
    assert "atlas_first" not in charts


def test_a_response_of_several_turns_has_a_place_in_the_heat_map(tmp_path: Path) -> None:
    path = write_run(tmp_path, rows_of(1, UPDATES), recipe_of(1, UPDATES))
    write_probe(path, 0, UPDATES, count=8, tokens=WINDOW + 40)
    run = read_run(path)
    mask = np.arange(WINDOW + 40) % 10 < 6
    probed = probed_responses(read_details(run.path, run.recipe), run.recipe)
    last = max(
        (response for response in probed if response.negative),
        key=lambda response: (response.log_ratio[-1].min(), response.probe.update),
    )
    several = replace(last, probe=replace(last.probe, mask=mask.tolist()))
    heat = heat_map([several if response is last else response for response in probed], ObjectiveSection())
    assert heat
    assert [len(response["turns"]) for response in heat["responses"]] == [0, 0, 13]
    start = heat["responses"][-1]["start"]
    turns = {place + start: number for place, number in heat["responses"][-1]["turns"]}
    assert all(place == max(start, 10 * (number - 1)) for place, number in turns.items())


def test_positive_responses_have_no_trigger(run: RunData) -> None:
    probed = probed_responses(read_details(run.path, run.recipe), run.recipe)
    positive = [response for response in probed if not response.negative]
    assert len(positive) == 4
    for response in positive:
        triggers, dropped = veto_masks(response, ObjectiveSection())
        assert not triggers.any()
        assert not dropped.any()


def test_with_the_learners_behaviour_ratios_begin_at_one(run: RunData) -> None:
    recipe = {**run.recipe, "rollout": {"behaviour": "learner"}}
    for response in probed_responses(read_details(run.path, recipe), recipe):
        assert not response.log_ratio[0].any()


def test_the_atlas_is_of_the_negative_responses_of_all_stages(run: RunData) -> None:
    charts = charts_of(run)
    shares = {series.label: series.y for series in charts["atlas_triggers"].series}
    for name, values in shares.items():
        below = [float(age > -math.log(float(name))) for age in probe_ages(UPDATES)]
        assert values == pytest.approx(below), name
    lowest = charts["atlas_ratio"].series[-1]
    assert lowest.label == "1 %"
    assert lowest.y[0] == pytest.approx(1)
    assert (lowest.y[-1] or 1.0) < 1e-3
    trained = next(series for series in charts["atlas_trained"].series if series.label == "trained on")
    assert trained.y[0] is None, "nothing is trained on at age 0"
    for series in charts["atlas_first"].series:
        assert series.y == [2.0] * 12


def test_histograms_count_every_response(run: RunData) -> None:
    charts = charts_of(run)
    assert draw(run, read_details(run.path, run.recipe)).axes["reward"]["u"] == [0.0, 1.0]
    assert [series.y for series in charts["rewards"].series] == [[0.75, 0.25]] * 2
    for series in charts["lengths"].series:
        assert sum(value for value in series.y if value) == pytest.approx(1, abs=1e-4)


def test_rewards_of_any_size_have_an_axis_that_holds_them(tmp_path: Path) -> None:
    rewards = np.linspace(-3, 7, 400)
    stages = {0: StageResponses(rewards, rewards, np.arange(400) // 8, np.full(400, 5), [])}
    low, high = curves.reward_span(stages)
    assert low <= -3
    assert high >= 7
    assert len(curves.axes_of(stages)["reward"]) == 24
    [series] = curves.reward_series(stages)
    assert sum(value for value in series.y if value) == pytest.approx(1, abs=1e-4)


def test_pass_at_k_is_the_chance_over_groups(run: RunData) -> None:
    curves = {series.label: series.y for series in charts_of(run)["pass_at_k"].series}
    assert curves == {"k = 1": [0.25, 0.25], "k = 2": [0.5, 0.5], "k = 4": [1.0, 1.0]}


def test_a_thousand_updates_with_everything_stay_below_400_kb(tmp_path: Path) -> None:
    path = write_run(tmp_path, rows_of(4, 256, sets=["a", "b", "c", "d", "e"], eval_every=64), recipe_of(4, 256))
    for stage in range(4):
        write_stage(path, stage, text="x = 3\n" * 3000)
        write_probe(path, stage, 256, count=8, tokens=3000)
    for update in range(0, 1025, 256):
        write_evaluation(path, update, text="therefore " * 4000, sets=5, question="why? " * 300)
    report = write_report(path)
    size, text = report.stat().st_size, report.read_text()
    assert size < 400_000, f"{size:,} bytes"
    assert text.count('<article class="sample') > 20
    assert '<details class="text">' in text
    assert "characters are left out" in text


def test_answers_that_are_not_found_are_counted(run: RunData, tmp_path: Path) -> None:
    (training,) = charts_of(run)["unparsed"].series
    assert training.y == [0.0, 0.0]
    write_stage(tmp_path, 0, text="")
    assert read_details(tmp_path, run.recipe).stages[0].unparsed == 1.0


def test_only_math_finds_answers(run: RunData) -> None:
    for reward in ({"function": "code"}, {"functions": {"a": {"function": "math"}}}):
        assert "unparsed" not in charts_of(replace(run, recipe={**run.recipe, "reward": reward}))


def test_right_and_wrong_are_by_the_verdict_not_by_the_shaped_reward(tmp_path: Path) -> None:
    """Responses that are too long lose reward."""
    store = StageStore(tmp_path / "stages" / "00000")
    ids, logprobs = np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.float32)
    for group in range(2):
        right, wrong = ({"math": verdict, "overlong": 0.5} for verdict in (1.0, 0.0))
        parts = [(0.5, right), (-0.5, wrong), (-0.5, wrong), (-0.5, wrong)]
        store.append(
            [
                Sample(group, "p", ids, ids, logprobs, reward, 0, "stop", text="4", components=components)
                for reward, components in parts
            ]
        )
    store.seal(1, 2)
    details = read_details(tmp_path, {"reward": {"overlong_buffer_tokens": 8}})
    assert details.stages[0].verdicts.tolist() == [1.0, 0.0, 0.0, 0.0] * 2
    assert details.stages[0].rewards.tolist() == [0.5, -0.5, -0.5, -0.5] * 2
    [section] = sample_sections(details, "accuracy")
    assert {(response["kind"], response["reward"]) for response in section["responses"]} == {
        ("right", "0.5"),
        ("wrong", "-0.5"),
    }


def test_throughput_is_of_the_whole_stage(run: RunData) -> None:
    """Evaluations inside a stage divide its optimization into several rows."""
    [first] = [row for row in run.phases if row["phase"] == "optimize" and row["stage"] == 0][:1]
    tail = {**first, "start": first["end"], "end": first["end"] + 1.0, "tokens": 1.0}
    curves = {
        curve.label: curve.y for curve in charts_of(replace(run, phases=[*run.phases, tail]))["throughput"].series
    }
    rows = [row for row in [*run.phases, tail] if row["phase"] == "optimize" and row["stage"] == 0]
    expected = sum(row["tokens"] for row in rows) / sum(row["end"] - row["start"] for row in rows)
    assert curves["trained"][0] == pytest.approx(expected, rel=1e-4)


def test_pass_at_k_of_held_out_sets_with_several_samples(run: RunData) -> None:
    assert "passed" not in charts_of(run), "one response a problem"
    evals = [
        {**row, "samples/arithmetic": 4, "passed/arithmetic": 0.75, "unparsed/arithmetic": 0.5} for row in run.evals
    ]
    charts = charts_of(replace(run, evals=evals))
    (curve,) = charts["passed"].series
    assert (curve.label, set(curve.y)) == ("arithmetic, k = 4", {0.75})
    assert set(charts["unparsed"].series[1].y) == {0.5}
