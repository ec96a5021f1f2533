"""`mugrpo rollouts` shows what was asked for, and marks exactly the tokens that the veto drops."""

from __future__ import annotations

import io
import json
import math
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.text import Text
from transformers import AutoModelForCausalLM

from mugrpo_megatron.cli import main
from mugrpo_megatron.commands.rollout_views import Rollout, print_group, print_table
from mugrpo_megatron.commands.rollouts import RolloutFilter, browse
from mugrpo_megatron.data import arithmetic
from mugrpo_megatron.data.prepare import usable_problems
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.exchange.import_rollouts import import_rollouts
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.recipe.sections import DataSection
from mugrpo_megatron.run.directory import open_directory
from mugrpo_megatron.samples import UNSCORED, Sample
from mugrpo_megatron.stages.columns import LogprobColumn
from mugrpo_megatron.stages.manifest import stage_identity
from mugrpo_megatron.stages.store import StageStore
from tests.refusals import refuses
from tests.tiny import write_recipe

PROMPTS, UPDATES = 2, 2
PROMPT, RIGHT, WRONG = "12+34=", "46", "55+1"
GOLD, FOUND = "4.6e1", "4 6"
LOST = math.log(20_000)


@pytest.fixture(scope="module")
def run_dir(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Groups of a right and a wrong response; the wrong one's second token was 20,000 times as likely as it is now."""
    folder = tmp_path_factory.mktemp("run")
    shape = {"schedule": {"stages": 1, "updates_per_stage": UPDATES}, "rollout": {"prompts_per_update": PROMPTS}}
    recipe = load_recipe(write_recipe(folder / "recipe.toml", model, folder / "run", **shape))
    with open_directory(recipe) as directory:
        store = StageStore(directory.stage(0))
        for group in range(PROMPTS * UPDATES):
            right, wrong = sample(model, group, RIGHT, 1.0), sample(model, group, WRONG, 0.0)
            wrong.engine_logprobs[1] += LOST
            store.append([right, wrong])
        store.seal(UPDATES, PROMPTS)
    return folder / "run"


def sample(model: Path, group: int, response: str, reward: float) -> Sample:
    """With the behaviour logprobs that the model has now, computed one response at a time."""
    tokenizer = load_tokenizer(model)
    prompt, answer = (np.array(tokenizer(text)["input_ids"], dtype=np.int32) for text in (PROMPT, response))
    ids = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(ids[None]).logits[0].float()
    logprobs = logits.log_softmax(-1)[torch.arange(len(prompt) - 1, len(ids) - 1), ids[len(prompt) :]]
    return Sample(
        group,
        f"test:{group}",
        prompt,
        answer,
        logprobs.numpy(),
        reward,
        0,
        "stop",
        text=response,
        gold=GOLD,
        extracted=FOUND if reward else "",
        why="" if reward else "no answer",
        components={"math": reward},
        row=json.dumps({"question": "a\x7f?", "level": group, "extra": {"inner": ["kept", None], "deep": "too"}}),
    )


def test_ratios_are_over_the_learners_logprobs_where_the_recipe_says_so(
    model: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = ["rollout.behaviour=learner"]
    with pytest.raises(UserError, match=r"behaviour\.parquet is missing or incomplete: .* before the first update"):
        browse(run_dir, 0, RolloutFilter(vetoed=True), model, learner)
    store = StageStore(run_dir / "stages" / "00000")
    path = run_dir / "stages" / "00000" / "behaviour.parquet"
    with LogprobColumn(path, stage_identity(store.content)).write() as append:
        for update in range(UPDATES):
            excess = [0.0, LOST, 0.0, 0.0]  # of the engine in each wrong response; the learner never had it
            found = [one.engine_logprobs for one in store.read_update(update)]
            append([one if n % 2 == 0 else one - np.array(excess, dtype=np.float32) for n, one in enumerate(found)])
    browse(run_dir, 0, RolloutFilter(vetoed=True), model, learner)
    path.unlink()
    LogprobColumn(path, {}).index.unlink()
    assert "no response has a vetoed token" in capsys.readouterr().out


def cells(table: str, text: str) -> int:
    """How many cells hold the text; the run's path above them may hold it too."""
    return len(re.findall(rf"(?<!\S){re.escape(text)}(?!\S)", table))


def test_the_table_holds_what_was_asked_for(model: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    browse(run_dir, None, RolloutFilter(), None)
    assert capsys.readouterr().out.count(PROMPT) == 2 * PROMPTS * UPDATES
    browse(run_dir, 0, RolloutFilter(min_reward=0.5), None)
    shown = capsys.readouterr().out
    assert cells(shown, RIGHT) == PROMPTS * UPDATES
    assert cells(shown, WRONG) == 0
    browse(run_dir, 0, RolloutFilter(advantage="negative", update=1, limit=1), None)
    assert capsys.readouterr().out.count(WRONG) == 1
    browse(run_dir, 0, RolloutFilter(vetoed=True), model)
    shown = capsys.readouterr().out
    assert shown.count(WRONG) == PROMPTS * UPDATES
    assert "dropped" in shown
    assert shown.count("5.0e-05") == PROMPTS * UPDATES
    assert "below 0.0001" in shown


def test_a_veto_is_marked_and_another_than_the_recipe_s_can_be_looked_at(
    model: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    browse(run_dir, 0, RolloutFilter(vetoed=True), model, ["objective.trigger_ratio=1e-5"])
    shown = capsys.readouterr().out
    assert shown.startswith("stage 0: no response has a vetoed token (dropped: by veto ")
    assert "below 1e-05" in shown
    browse(run_dir, 0, RolloutFilter(vetoed=True, update=1), model, ["objective.trigger_ratio=1e-5"])
    assert "no response that fits the other options has a vetoed token" in capsys.readouterr().out
    for veto, marked in (("suffix_non_trigger", "5«5»⟦+1⟧"), ("response", "⟦5«5»+1⟧")):
        browse(run_dir, 0, RolloutFilter(group=3, advantage="negative"), model, [f"objective.veto={veto}"])
        shown = capsys.readouterr().out
        assert "test:3" in shown
        assert marked in shown


@pytest.mark.parametrize(
    ("conditions", "texts"),
    [
        (RolloutFilter(right=True), [RIGHT] * 4),
        (RolloutFilter(grep="no answer", limit=3), [WRONG] * 3),
        (RolloutFilter(grep="^[12]$", right=True), [RIGHT] * 2),
        (RolloutFilter(grep="level|question|inner|deep|,"), []),
        (RolloutFilter(grep="^kept$", update=0, right=False), [WRONG] * 2),
        (RolloutFilter(grep=r"^12\+34=$", update=0), [RIGHT, WRONG] * 2),
    ],
)
def test_json_has_every_fact_of_the_responses_searched_for(
    conditions: RolloutFilter, texts: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    browse(run_dir, 0, conditions, None, as_json=True)
    out = capsys.readouterr().out
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["response"] for row in rows] == texts
    assert out.replace("\n", "").isprintable()
    for row in rows:
        right = row["response"] == RIGHT
        assert row["prompt"] == PROMPT
        assert row["gold"] == GOLD
        assert (row["extracted"], row["why"]) == ((FOUND, "") if right else ("", "no answer"))
        assert row["components"] == {"math": row["reward"]} == {"math": float(right)}
        assert row["advantage"] == pytest.approx(0.7071 if right else -0.7071, abs=1e-4)
        assert row["row"].items() >= {"question": "a\x7f?", "level": row["group"]}.items()
        assert row["index"] == (0 if right else 1)
        assert row["update"] == row["group"] // PROMPTS


@pytest.mark.parametrize("known", [True, False], ids=["logprobs", "without logprobs"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "without masks"])
def test_json_lines_are_the_stage_again_once_they_are_imported(
    known: bool, masked: bool, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Token ids, log-probabilities, masks and rewards come back bit for bit, also those that are not known."""
    shape: dict[str, dict[str, Any]] = {
        "schedule": {"stages": 1, "updates_per_stage": UPDATES},
        "rollout": {"prompts_per_update": PROMPTS, "responses_per_prompt": 2},
    }
    if not known:
        shape |= {"objective": {"mismatch": "none"}, "rollout": {**shape["rollout"], "behaviour": "learner"}}
    recipe = load_recipe(write_recipe(tmp_path / "recipe.toml", model, tmp_path / "run", **shape))
    samples = []
    for group in range(PROMPTS * UPDATES):
        for text, reward in ((RIGHT, 1.0), (WRONG, -0.25)):
            one = sample(model, group, text, reward)
            mask = np.arange(len(one.response_ids)) != group % 2 if masked else None
            logprobs = one.engine_logprobs if known else np.full_like(one.engine_logprobs, np.nan)
            samples.append(
                replace(one, loss_mask=mask, engine_logprobs=logprobs, finish_reason=("stop", "length")[group % 2])
            )
    with open_directory(recipe) as directory:
        store = StageStore(directory.stage(0))
        for first in range(0, len(samples), 2):
            store.append(samples[first : first + 2])
        store.seal(UPDATES, PROMPTS)
    browse(tmp_path / "run", 0, RolloutFilter(limit=99), None, as_json=True)
    lines = tmp_path / "rollouts.jsonl"
    lines.write_text(capsys.readouterr().out)
    import_rollouts(lines, recipe, tmp_path / "again", say=lambda line: None)
    again = StageStore(tmp_path / "again/stages/00000")
    found = [one for update in range(UPDATES) for one in again.read_update(update)]
    for one, expected in zip(found, samples, strict=True):
        assert one.prompt_ids.tolist() == expected.prompt_ids.tolist()
        assert one.response_ids.tolist() == expected.response_ids.tolist()
        np.testing.assert_array_equal(one.engine_logprobs, expected.engine_logprobs)
        assert (one.loss_mask is None) == (expected.loss_mask is None)
        if expected.loss_mask is not None and one.loss_mask is not None:
            assert one.loss_mask.tolist() == expected.loss_mask.tolist()
        assert (one.reward, one.finish_reason) == (expected.reward, expected.finish_reason)


def test_a_stage_is_a_table_of_pass_rates_that_training_reads(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Right, wrong, cut and unscored responses in one group or two; bundled and imported problems have no row."""
    task = arithmetic.problems(0, "train", 3)[2]
    groups = {"hard": "ww", "mixed": "rw", "cut": "rc", task.id: "rr", "imported": "rw"}
    plain = sample(model, 0, RIGHT, 0.0)
    shape = {"schedule": {"stages": 1, "updates_per_stage": 2}, "rollout": {"prompts_per_update": 3}}
    recipe = load_recipe(write_recipe(tmp_path / "recipe.toml", model, tmp_path / "run", **shape))
    with open_directory(recipe) as directory:
        store = StageStore(directory.stage(0))
        for group, (problem, letters) in enumerate([*groups.items(), ("mixed", "n")]):
            row = "" if problem in (task.id, "imported") else json.dumps({"question": problem, "answer": "7"})
            responses = [replace(plain, group=group, reward=float(letter == "r")) for letter in letters]
            if letters == "n":
                responses = [replace(responses[0], components={UNSCORED: 1.0})]
            ends = ["length" if letter == "c" else "stop" for letter in letters]
            pairs = zip(responses, ends, strict=True)
            store.append([replace(s, problem=problem, row=row, finish_reason=end) for s, end in pairs])
        store.seal(2, 3)
    command = ["rollouts", str(tmp_path / "run"), "--by", "problem"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "5 problems, 1 never right, 1 always" in shown
    assert [line.split()[:4] for line in shown.splitlines() if line.rstrip().endswith("mixed")] == [
        ["3", "50%", "2", "0%"]
    ]
    assert main([*command, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err.strip() == "1 problems have no row in the stage: left out"
    records = [json.loads(line) for line in out.splitlines()]
    assert [(r.get("question") or r["problem"], r["pass_rate"], r["rollouts"]["cut"]) for r in records] == [
        ("hard", 0.0, 0.0),
        ("mixed", 0.5, 0.0),
        ("cut", 0.5, 0.5),
        (task.question, 1.0, 0.0),
    ]
    assert records[3]["answer"] == task.answer
    assert records[1]["rollouts"] == {"responses": 3, "tokens": 2.0, "cut": 0.0}
    rated = tmp_path / "rated.jsonl"
    rated.write_text(out)
    notes: list[str] = []
    data = DataSection(train=str(rated), pass_rate=(0.1, 0.5))
    problems = usable_problems(data.train, "train", data, RewardSection(), notes)
    assert [problem.question for problem in problems] == ["mixed", "cut"]
    assert "2 of 4 training problems have a pass rate outside [0.1, 0.5]: left out" in notes
    with pytest.raises(UserError, match="none of 4 training problems has a rate in"):
        usable_problems(data.train, "train", data.model_copy(update={"pass_rate": (0.6, 0.9)}), RewardSection(), notes)
    with pytest.raises(UserError, match="needs a number or null in the column pass_rate"):
        usable_problems("arithmetic", "train", data, RewardSection(), notes)
    assert main([*command, "--wrong"]) == 2
    assert "leave the other conditions out" in capsys.readouterr().err


@pytest.mark.parametrize("colour", [True, False])
def test_eighty_columns_hold_what_a_response_was_and_why(model: Path, colour: bool) -> None:
    long = sample(model, 3, WRONG, 0.0)
    shown = [Rollout(1, place, long, -0.707, PROMPT, "a long\nresponse " * 20, None) for place in range(2)]
    screen = Console(width=80, file=io.StringIO(), force_terminal=colour, color_system="truecolor" if colour else None)
    print_table(screen, "run: stage 0", shown, None)
    print_group(screen, shown, load_tokenizer(model))
    assert isinstance(screen.file, io.StringIO)
    told = screen.file.getvalue()
    assert ("\x1b[" in told) is colour
    lines = [Text.from_ansi(line).plain for line in told.splitlines()]
    assert max(map(len, lines)) <= 80
    for fact in (GOLD, "a long⏎response", "group 3", "response 1: reward 0", "why: no answer", "row.level: 3", WRONG):
        assert any(fact in line for line in lines), fact


@pytest.mark.parametrize(
    ("conditions", "said"),
    [
        (RolloutFilter(limit=3), "3 of 8 shown; --limit shows more"),
        (RolloutFilter(limit=8), ""),
        (RolloutFilter(right=True, limit=3), "3 shown, which is the limit; --limit shows more, if there are"),
        (RolloutFilter(grep="nowhere"), "stage 0: no response fits the options"),
    ],
)
def test_what_the_limit_left_out_is_said_last(
    conditions: RolloutFilter, said: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    browse(run_dir, 0, conditions, None)
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert last == said if said else "shown" not in last
    browse(run_dir, 0, conditions, None, as_json=True)
    out, err = capsys.readouterr()
    assert all(json.loads(line) for line in out.splitlines())
    assert err.strip() == said


def test_without_a_tokenizer_the_stored_texts_are_shown(
    model: Path, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A published stage has none, and its recipe names the model without its folder."""
    published = shutil.copytree(run_dir, tmp_path / "set")
    nowhere = ["model.path=nowhere"]
    browse(published, None, RolloutFilter(right=True), None, nowhere)
    first, *shown = capsys.readouterr().out.splitlines()
    assert first.startswith("nowhere holds no tokenizer, so prompts and marked tokens are left out; ")
    assert cells("\n".join(shown), RIGHT) == PROMPTS * UPDATES
    assert not any(PROMPT in line for line in shown)
    browse(published, None, RolloutFilter(group=1, grep=r"^46$"), None, nowhere)
    assert capsys.readouterr().out.rstrip().splitlines()[-1] == RIGHT
    browse(published, None, RolloutFilter(limit=1), None, nowhere, as_json=True)
    assert json.loads(capsys.readouterr().out)["prompt"] is None
    command = shlex.split(first.rpartition(": ")[2].replace("DIR", str(model)))
    assert command[:2] == ["mugrpo", "rollouts"]
    assert main(command[1:]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert sum(PROMPT in line for line in shown) == 2 * PROMPTS * UPDATES
    assert not any("holds no tokenizer" in line for line in shown)
    browse(published, None, RolloutFilter(limit=1), model, nowhere)  # the policy's does as well
    assert PROMPT in capsys.readouterr().out


def test_what_is_not_there_is_said(run_dir: Path, tmp_path: Path) -> None:
    refuses("not a run directory", browse, tmp_path, None, RolloutFilter(), None)
    refuses("stage 3 holds nothing", browse, run_dir, 3, RolloutFilter(), None)
    refuses("0 to 1", browse, run_dir, 0, RolloutFilter(update=9), None)
    refuses(r"--grep \(: not a regular expression", browse, run_dir, 0, RolloutFilter(grep="("), None)
    refuses("--policy", browse, run_dir, 0, RolloutFilter(vetoed=True), None)


def test_another_stage_s_damage_is_not_this_one_s(
    model: Path, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_dir, run, symlinks=True)
    shutil.copytree(run / "stages" / "00000", run / "stages" / "00007")
    (run / "stages" / "00007" / "manifest.json").write_text("{", encoding="utf-8")
    browse(run, 0, RolloutFilter(limit=1), model)
    assert PROMPT in capsys.readouterr().out
    refuses("00007", browse, run, None, RolloutFilter(limit=1), model)
    refuses("stage 3 holds nothing and is not sealed; only sealed", browse, run, 3, RolloutFilter(), model)
