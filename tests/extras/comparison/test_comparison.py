"""Several runs on one page: what tells them apart, and whose figures are whose."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.comparison.comparison import (
    comparison,
    differences,
    distinguishing_settings,
    labels_of,
    write_comparison,
)
from mugrpo_megatron.files.durable import write_checksummed_json
from mugrpo_megatron.observe.rundata import RunData, read_run
from mugrpo_megatron.recipe.load import validate
from tests.report.synthetic import drawing_in, rows_of, write_run


def runs_of(folder: Path, *sections: dict[str, Any]) -> list[RunData]:
    return [
        read_run(write_run(folder / f"run{k}", rows_of(2, 8, seed=k), validate(section, source="test")))
        for k, section in enumerate(sections)
    ]


def test_the_fewest_settings_tell_runs_apart(tmp_path: Path) -> None:
    runs = runs_of(
        tmp_path,
        {"objective": {"name": "mu_grpo"}, "run": {"dir": "a"}},
        {"objective": {"name": "mu_grpo", "veto": "none"}, "run": {"dir": "b"}},
        {"objective": {"name": "grpo"}, "run": {"dir": "c"}},
    )
    assert distinguishing_settings(runs) == ["objective.name", "objective.veto"]
    assert {"objective.clip_low", "objective.clip_high"} < set(differences(runs))
    assert not any(key.startswith("run.") for key in differences(runs))
    assert labels_of(runs) == [
        "objective mu_grpo, veto suffix_non_trigger",
        "objective mu_grpo, veto none",
        "objective grpo, veto none",
    ]


def test_runs_of_one_recipe_have_their_directories_names(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, {}, {})
    assert differences(runs) == []
    assert labels_of(runs) == ["run0", "run1"]


def test_each_run_has_its_own_axes_and_values(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, {"run": {"seed": 1}}, {"run": {"seed": 2}})
    html = comparison(runs)
    drawing = drawing_in(html)
    reward = next(chart for chart in drawing["charts"] if chart["id"] == "reward_mean")
    for number, (run, series) in enumerate(zip(runs, reward["series"], strict=True)):
        assert series["axis"] == f"update{number}"
        assert series["label"] == f"seed {number + 1}"
        assert series["y"] == pytest.approx([row["reward_mean"] for row in run.updates], rel=1e-5)
        assert drawing["axes"][series["axis"]]["u"] == [row["update"] for row in run.updates]
    assert html.count('<td class="run">') == 2


def test_names_and_settings_are_text_on_the_page(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    runs = runs_of(tmp_path, {"data": {"train": evil}}, {"data": {"train": "arithmetic"}})
    html = comparison(runs)
    assert evil not in html
    assert html.count("<script") == 2


def test_the_same_run_twice_and_a_folder_that_is_no_run_are_refused(tmp_path: Path) -> None:
    (run,) = runs_of(tmp_path, {})
    with pytest.raises(UserError, match="named twice"):
        write_comparison([run.path, run.path / ".." / run.path.name], tmp_path / "page.html")
    with pytest.raises(UserError, match="no such file; name the directory of a run"):
        write_comparison([run.path, tmp_path], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_setting_that_an_older_version_did_not_know_has_its_default(tmp_path: Path) -> None:
    new, old = runs_of(tmp_path, {"objective": {"name": "mu_grpo"}}, {"objective": {"name": "mu_grpo"}})
    old = replace(old, recipe={name: table for name, table in old.recipe.items() if name != "report"})
    assert differences([new, old]) == []


def test_accuracies_and_rewards_have_charts_of_their_own(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, {"run": {"seed": 1}}, {"run": {"seed": 2}})
    as_reward = [{key.replace("accuracy/", "reward/"): value for key, value in row.items()} for row in runs[1].evals]
    html = comparison([runs[0], replace(runs[1], evals=as_reward)])
    charts = {chart["id"]: chart for chart in drawing_in(html)["charts"]}
    for number, measure in enumerate(("accuracy", "reward")):
        [series] = charts[f"held_out_{measure}"]["series"]
        assert series["axis"] == f"eval{number}"
    assert "Accuracy or reward before" in html


def test_runs_on_other_terms_are_warned_of(tmp_path: Path) -> None:
    same = runs_of(tmp_path / "same", {"run": {"seed": 1}}, {"run": {"seed": 2}})
    assert "compare" not in re.findall(r'id="warnings">(.*?)<div class="tiles', comparison(same), re.DOTALL)[0]
    short, long = {"stages": 16, "updates_per_stage": 16}, {"stages": 64, "updates_per_stage": 4}
    as_often = ({"schedule": short, "eval": {"every_stages": 2}}, {"schedule": long, "eval": {"every_stages": 8}})
    ours, grpo = runs_of(tmp_path / "as-often", *as_often)
    assert "compare one to one" not in comparison([ours, grpo])
    unfinished, seldom = replace(grpo, evals=grpo.evals[:2]), replace(grpo, evals=[*grpo.evals[:1], *grpo.evals[2:]])
    assert "compare one to one" not in comparison([ours, unfinished])
    assert "evaluation (eval.every_stages): their curves do not compare one to one" in comparison([ours, seldom])
    other = runs_of(tmp_path / "other", {}, {"data": {"train": "gsm8k"}, "reward": {"timeout_s": 9.0}})
    html = comparison(other)
    assert "The runs differ in their training data (data.train): their curves do not compare one to one." in html
    assert "The runs differ in their reward (reward.timeout_s)" in html
    fewer = replace(same[0], evals=[{**row, "problems/arithmetic": 9} for row in same[0].evals])
    assert "evaluated on different problems" in comparison([fewer, same[1]])


def test_runs_whose_files_were_edited_between_them_are_warned_of(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, {"run": {"seed": 1}}, {"run": {"seed": 2}}, {"run": {"seed": 3}})
    data, reward = "The runs' training problems differ", "The runs' reward functions differ"
    for run in runs[:2]:  # the third has no record
        write_checksummed_json(run.path / "data.json", "data", {"train": {"own": "1"}, "held-out": {}})
        write_checksummed_json(run.path / "user_files.json", "files", {"reward.function": "1"})
    same = comparison(runs)
    assert data not in unescape(same)
    assert reward not in unescape(same)
    changed = {"train": {"own": "2"}, "held-out": {}}
    write_checksummed_json(runs[1].path / "data.json", "data", changed)
    functions = {"reward.function": "2", "objective.surrogate": "1"}
    write_checksummed_json(runs[1].path / "user_files.json", "files", functions)
    html = unescape(comparison(runs))
    assert data in html
    assert reward in html
    (runs[1].path / "data.json").write_text("{}")
    assert data not in unescape(comparison(runs))


def test_rewards_that_branches_of_one_stage_share_are_not_drawn(tmp_path: Path) -> None:
    first, second = runs_of(tmp_path, {"run": {"seed": 1}}, {"run": {"seed": 2}})
    shared = [
        {**row, "reward_mean": other["reward_mean"]} for row, other in zip(second.updates, first.updates, strict=True)
    ]
    assert 'id="chart-reward_mean"' in comparison([first, second])
    assert 'id="chart-reward_mean"' not in comparison([first, replace(second, updates=shared)])
