"""Rollouts that TRL logged become a stage, and training takes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mugrpo_megatron.cli import main
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.exchange import import_rollouts as import_command
from mugrpo_megatron.extras.exchange.import_rollouts import import_rollouts
from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.run.published import read_published
from mugrpo_megatron.stages.store import StageStore
from tests.refusals import refuses
from tests.tiny import COIN, mugrpo, rows, write_recipe

PROMPTS, GROUP, UPDATES = 4, 4, 2
TOKENIZER = build_arithmetic_tokenizer()


def trl_log(path: Path, steps: int = UPDATES, reward: str = "parity") -> Path:
    """What `log_completions` of TRL's GRPOTrainer writes: text, each reward function's column, its advantage."""
    logged = [
        {"step": step, "prompt": f"{step}+{place}=", "completion": str(said), reward: said % 2.0, "advantage": 0.0}
        for step in range(steps)
        for place in range(PROMPTS)
        for said in range(GROUP)
    ]
    pq.write_table(pa.Table.from_pylist(logged), path)
    return path


def recipe_file(folder: Path, model: Path, **sections: dict[str, Any]) -> Path:
    shape: dict[str, dict[str, Any]] = {
        "schedule": {"stages": 1, "updates_per_stage": UPDATES},
        "rollout": {"behaviour": "learner", "prompts_per_update": PROMPTS, "responses_per_prompt": GROUP},
        "reward": COIN,
    }
    merged = {name: {**shape.get(name, {}), **sections.get(name, {})} for name in {*shape, *sections}}
    return write_recipe(folder / "recipe.toml", model, folder / "run", **merged)


def imported(file: Path, recipe: Recipe, to: Path, reward: str | None = "parity") -> StageStore:
    import_rollouts(file, recipe, to, reward, say=lambda line: None)
    return StageStore(to / "stages" / "00000")


@pytest.mark.process
def test_what_trl_logged_trains(model: Path, tmp_path: Path) -> None:
    recipe, log = recipe_file(tmp_path, model), trl_log(tmp_path / "completions.parquet")
    mugrpo("import", log, "--recipe", recipe, "--to", tmp_path / "stage", "--reward", "parity")
    mugrpo("optimize", recipe, "--from", tmp_path / "stage")
    updates = rows(tmp_path / "run", "update")
    assert len(updates) == UPDATES
    assert updates[0]["ratio_mean"] == 1.0, "the learner's own log-probabilities"
    assert all(row["grad_norm"] > 0 for row in updates)


@pytest.mark.parametrize("ids", [False, True])
def test_responses_in_which_bytes_were_lost_are_counted(ids: bool, model: Path, tmp_path: Path) -> None:
    """A model may sample half of a character; only its token ids say so."""
    logged = pq.read_table(trl_log(tmp_path / "completions.parquet")).to_pylist()
    for row in logged[1::5]:
        row["completion"] = f"{row['completion']}\ufffd"
    if ids:
        for row in logged:
            row["response_ids"] = [*TOKENIZER.encode(row["completion"]), TOKENIZER.eos_token_id]
    file, said = tmp_path / "rows.jsonl", list[str]()
    file.write_text("".join(json.dumps(row) + "\n" for row in logged))
    import_rollouts(file, load_recipe(recipe_file(tmp_path, model)), tmp_path / "stage", "parity", said.append)
    lines = [line for line in said if "U+FFFD" in line]
    assert len(lines) == (not ids)
    if lines:
        assert f": {len(logged[1::5])} responses with U+FFFD" in lines[0]
        assert "export response_ids" in lines[0]


def test_the_stage_holds_the_file(model: Path, tmp_path: Path) -> None:
    recipe, log = load_recipe(recipe_file(tmp_path, model)), trl_log(tmp_path / "completions.parquet")
    store = imported(log, recipe, tmp_path / "stage")
    samples = [sample for k in range(UPDATES) for sample in store.read_update(k, with_text=True)]
    logged = pq.read_table(log).to_pylist()
    assert [json.loads(sample.row) for sample in samples] == logged
    assert [sample.reward for sample in samples] == [row["parity"] for row in logged]
    assert [sample.text for sample in samples] == [row["completion"] for row in logged]
    assert samples[0].response_ids.tolist() == [*TOKENIZER.encode("0"), TOKENIZER.eos_token_id]
    assert samples[5].components == {"parity": 1.0}
    assert sum(sample.advantage or 0 for sample in samples[:GROUP]) == pytest.approx(0, abs=1e-6)
    published = read_published(tmp_path / "stage")
    assert published
    assert not published.logprobs
    refuses("exists already", imported, log, recipe, tmp_path / "stage")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"rollout": {"behaviour": "engine"}}, "no logprobs.*; what fits: --set rollout.behaviour=learner$"),
        (
            {"rollout": {"prompts_per_update": 16, "responses_per_prompt": 2}, "schedule": {"updates_per_stage": 5}},
            "prompts_per_update = 16 does not divide the number of groups, each of 1, 2, 4, 8 does; what fits: "
            "--set rollout.prompts_per_update=8 --set rollout.responses_per_prompt=4 --set schedule.updates_per_stage=1",  # noqa: E501
        ),
        ({"rollout": {"max_response_tokens": 1}}, "what fits: --set rollout.max_response_tokens=2$"),
    ],
)
def test_a_recipe_that_does_not_fit_is_told_what_fits(
    sections: dict[str, dict[str, Any]], words: str, model: Path, tmp_path: Path
) -> None:
    recipe = load_recipe(recipe_file(tmp_path, model, **sections))
    refuses(words, imported, trl_log(tmp_path / "completions.parquet"), recipe, tmp_path / "stage")
    assert not (tmp_path / "stage").exists()


def test_what_fits_is_imported_and_the_hint_has_the_settings(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong: dict[str, Any] = {
        "rollout": {"prompts_per_update": 16, "behaviour": "engine"},
        "schedule": {"updates_per_stage": 5},
    }
    file, recipe = trl_log(tmp_path / "completions.parquet"), str(recipe_file(tmp_path, model, **wrong))
    command = ["import", str(file), "--recipe", recipe, "--to", str(tmp_path / "stage"), "--reward", "parity"]
    assert main(command) == 2
    flags = capsys.readouterr().err.strip().partition("what fits: ")[2]
    assert main([*command, *flags.split()]) == 0
    hint = capsys.readouterr().out.splitlines()[-1]
    assert hint == f"train on them: mugrpo optimize {recipe} --from {tmp_path / 'stage'} {flags} --set run.dir=NEW"


def of_ids(path: Path, *rows: dict[str, Any]) -> Path:
    """Two updates of two groups of two responses, each row changed by `rows`."""
    unchanged = [{"prompt_ids": [k, 2], "response_ids": [3, 4], "reward": n % 2} for k in range(4) for n in range(2)]
    path.write_text("".join(json.dumps(row | change) + "\n" for row, change in zip(unchanged, rows, strict=True)))
    return path


SMALL = {"rollout": {"prompts_per_update": 2, "responses_per_prompt": 2}}


def test_an_update_needs_a_token_to_train_on(model: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(tmp_path, model, **SMALL))
    none: dict[str, Any] = {"loss_mask": [0, 0]}
    log = of_ids(tmp_path / "rows.jsonl", *[none] * 3, {"loss_mask": [0, 1]}, *[none] * 4)
    words = r"rows\.jsonl: the loss masks of update 1 \(from 0\), whose responses begin at rows\.jsonl:5, are all 0"
    refuses(words, imported, log, recipe, tmp_path / "stage", reward=None)
    assert not (tmp_path / "stage").exists()
    log = of_ids(tmp_path / "rows.jsonl", *[none] * 3, {"loss_mask": [0, 1]}, *[none] * 3, {"loss_mask": [True, 0]})
    store = imported(log, recipe, tmp_path / "stage", reward=None)
    assert sum(int(sample.trained(sample.response_ids).size) for k in range(2) for sample in store.read_update(k)) == 2


@pytest.mark.parametrize("reward", ["-1" + "0" * 400, "1e39", '"a"', "[1]"])
def test_a_reward_is_finite_as_float32(reward: str, model: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(tmp_path, model, **SMALL))
    log = of_ids(tmp_path / "rows.jsonl", *[{}] * 8)
    first, rest = log.read_text().split("\n", 1)
    log.write_text(first.replace('"reward": 0', f'"reward": {reward}') + "\n" + rest)
    refuses(r"rows\.jsonl:1: reward holds no finite number", imported, log, recipe, tmp_path / "stage", reward=None)


@pytest.mark.parametrize("none", [None, float("nan"), "nan", ""])
def test_a_response_without_a_reward_is_neutral(none: Any, model: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(tmp_path, model, **SMALL))
    unscored = {"reward": none}
    log = of_ids(tmp_path / "rows.jsonl", unscored, {}, {}, {}, unscored, unscored, {}, {})
    store = imported(log, recipe, tmp_path / "stage", reward=None)
    samples = [sample for update in range(2) for sample in store.read_update(update, with_text=True)]
    assert [(s.group, s.reward, bool(s.advantage)) for s in samples] == [
        (0, 1.0, False), (1, 0.0, True), (1, 1.0, True), (2, 0.0, False), (3, 0.0, True), (3, 1.0, True)
    ]  # fmt: skip
    with pytest.raises(UserError, match="no row has a reward in reward"):
        imported(of_ids(log, *[unscored] * 8), recipe, tmp_path / "other", reward="reward")


@pytest.mark.process
def test_a_file_is_scored_as_training_scores(model: Path, tmp_path: Path) -> None:
    """Golds are read as from data, functions see source and prompt, and shaping is added."""
    functions = {
        "math": {"function": "math", "sources": ["sums"]},
        "verl": {"function": "tests.rewards.foreign.verl_reward:compute_score", "sources": ["log"]},
        "asked": {"function": "tests.rewards.functions:prompt_length", "weight": 0},
    }
    shaping = {"overlong_buffer_tokens": 2, "function": "math"}
    recipe = load_recipe(
        recipe_file(
            tmp_path,
            model,
            reward={**shaping, "functions": functions, "workers": 1},
            rollout={"prompts_per_update": 1, "max_response_tokens": 5},
        )
    )
    asked = [
        {"prompt": "1+1=", "group": 0, "answer": "so #### 2", "data_source": "sums"},
        {"prompt": "1+1=", "group": 1, "label": "2"},
    ]
    said = ["2", "3", "222", "2222"]
    (tmp_path / "log.jsonl").write_text(
        "".join(json.dumps(row | {"completion": text}) + "\n" for row in asked for text in said)
    )
    rewards, parts = [], []
    store = imported(tmp_path / "log.jsonl", recipe, tmp_path / "stage", reward=None)
    for sample in (sample for k in range(UPDATES) for sample in store.read_update(k, with_text=True)):
        rewards.append(sample.reward)
        parts.append(sample.components)
    assert rewards[:4] == [1.0, 0.0, -0.5, -1.0]  # 222 and its end-of-sequence token are one short of the limit
    assert rewards[4:] == [2.5, -0.5, -1.0, -1.5]
    assert all(part["asked"] == 4 for part in parts)
    assert parts[2]["overlong"] == 0.5


@pytest.mark.process
def test_a_function_that_needs_no_gold_gets_none(model: Path, tmp_path: Path) -> None:
    recipe, log = load_recipe(recipe_file(tmp_path, model)), trl_log(tmp_path / "completions.parquet")
    store = imported(log, recipe, tmp_path / "stage", reward=None)
    assert {sample.reward for sample in store.read_update(0)} == {0.0, 1.0}


@pytest.mark.process
def test_a_function_gets_the_tests_of_a_program(model: Path, tmp_path: Path) -> None:
    """As in training: a column of tests is the gold of functions that take any value."""
    recipe, path, tests = load_recipe(recipe_file(tmp_path, model)), tmp_path / "log.jsonl", ["assert f(1) == 2"]
    path.write_text(
        "".join(
            json.dumps({"prompt": "f", "group": group, "completion": str(said), "tests": tests}) + "\n"
            for group in range(PROMPTS * UPDATES)
            for said in range(GROUP)
        )
    )
    store = imported(path, recipe, tmp_path / "stage", reward=None)
    assert {sample.gold for sample in store.read_update(0, with_text=True)} == {json.dumps(tests)}


def test_rows_without_reward_and_gold_are_refused(model: Path, tmp_path: Path) -> None:
    math = {"function": "math"}
    recipe, log = load_recipe(recipe_file(tmp_path, model, reward=math)), trl_log(tmp_path / "completions.parquet")
    with pytest.raises(
        UserError, match=r"completions\.parquet:1: has neither a reward nor a gold \(.*\) \(found .*parity"
    ):
        imported(log, recipe, tmp_path / "stage", reward=None)
    with pytest.raises(UserError, match=r"completions\.parquet:1: has no column nothing of rewards \(found .*parity"):
        imported(log, recipe, tmp_path / "stage", reward="nothing")


def test_what_another_makes_while_a_stage_is_written_stays(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, file = tmp_path / "stage", trl_log(tmp_path / "log.parquet")

    def card(*arguments: Any, **named: Any) -> str:
        to.mkdir()
        (to / "precious").touch()
        return "# a stage"

    monkeypatch.setattr(import_command, "card", card)
    refuses("was created meanwhile", imported, file, load_recipe(recipe_file(tmp_path, model)), to)
    assert [path.name for path in to.iterdir()] == ["precious"]
