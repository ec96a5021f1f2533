"""Rows, adapters, rollouts and recipes of any JSON: each is used, or refused in a sentence."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.commands.score import _input
from mugrpo_megatron.data.demonstrations import demonstrations
from mugrpo_megatron.data.files import rows
from mugrpo_megatron.data.problems import load
from mugrpo_megatron.data.prompts import Template
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.extras.exchange.foreign_rollouts import read_rollouts
from mugrpo_megatron.extras.lora.peft_files import CONFIG, WEIGHTS, read_adapter
from mugrpo_megatron.extras.sandbox.row_tests import read_tests
from mugrpo_megatron.recipe import Recipe, dump_recipe, load_recipe
from mugrpo_megatron.recipe.load import read_toml
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.recipe.sections import DataSection
from mugrpo_megatron.rewards.math.extract import answer_of
from mugrpo_megatron.rewards.math.literal import match_literally
from mugrpo_megatron.weights.families import read_architecture
from tests.extras.exchange.test_traces import TWO, VERIFIERS
from tests.extras.lora.adapted import write_adapter
from tests.hostile.damage import damages
from tests.hostile.fuzz import ODD, TEXTS, changed
from tests.hostile.outcome import answered, sentence
from tests.tiny import save_model, write_recipe

pytestmark = pytest.mark.night

PROBLEM = {"problem": "1+1=", "answer": "2", "data_source": "a", "level": 3, "options": ["1", "2"]}
CHAT = {
    "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1="}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": 1},
}
SCORED = {
    "response": "So \\boxed{2}",
    "answer": "2",
    "prompt": [{"role": "user", "content": "1+1="}],
    "data_source": "a",
}
SAID = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
ASSERTS = {"answer": "x", "test_list": ["assert f(1) == 2", "assert f(2) == 3"], "test_imports": ["import math"],
           "test_setup_code": "x = 1", "prompt": "def f(x):\n    pass\n"}  # fmt: skip
CHECKED = {"answer": "x", "test": "def check(candidate):\n    assert candidate(1) == 2\n", "entry_point": "f",
           "prompt": "import math\ndef g(x):\n    return x\ndef f(x):\n    '''doc'''\n"}  # fmt: skip
CASES = {"answer": {"inputs": ["1\n", ["2"]], "outputs": ["1", ["2"]], "fn_name": "f"}, "metadata": {"func_name": "f"},
         "tests": [{"input": "1", "output": "2", "testtype": "stdin"}],
         "public_tests": {"input": ["1"], "output": ["1"]}}  # fmt: skip


def written(folder: pytest.TempPathFactory, row: Any) -> str:
    path = folder.getbasetemp() / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (PROBLEM | SCORED | SAID, row)), encoding="utf-8")
    return str(path)


@given(st.sampled_from([PROBLEM, CHAT]).flatmap(changed))
def test_a_training_row(tmp_path_factory: pytest.TempPathFactory, row: Any) -> None:
    path = written(tmp_path_factory, row)

    def read() -> None:
        both = load(path, DataSection(strict=False))
        assert len(both.problems) + len(both.malformed) == 2
        for problem in both.problems:
            json.dumps([problem.question, problem.answer, problem.row], allow_nan=False).encode()

    sentence(read)


@given(changed(SAID))
def test_a_row_of_supervised_learning(tmp_path_factory: pytest.TempPathFactory, row: Any) -> None:
    path = written(tmp_path_factory, row)
    sentence(lambda: demonstrations(path, DataSection(strict=False)))


@given(changed(SCORED), st.booleans())
def test_a_row_to_score(tmp_path_factory: pytest.TempPathFactory, row: Any, own: bool) -> None:
    written(tmp_path_factory, row)
    section = RewardSection(function="a:b" if own else "math")
    for _, one in rows(tmp_path_factory.getbasetemp() / "rows.jsonl"):
        try:
            asked = _input(one, section)
        except ValueError as error:
            assert str(error)
        else:
            json.dumps([asked.row, asked.answer], allow_nan=False).encode()
            match_literally(asked.row["response"], asked.answer, RewardSection())


@given(st.sampled_from([ASSERTS, CHECKED, CASES]).flatmap(changed))
def test_a_row_with_tests(row: Any) -> None:
    if isinstance(row, dict):
        try:
            assert read_tests(row.get("answer"), row)
        except ValueError as error:
            assert str(error)


PIECES = st.sampled_from([
    "Answer:", "**Final Answer:**", "The answer is ", "$", "$$", "\\[", "\\]", "\\boxed{", "}", "{", "=", "120", "-3.5",
    "\\frac{1}{2}", "f(x)", " or ", " is ", "\n", ". ", "€", "\\text{cm}", "1,000", "(", ")", "[", ",", "<think>",
    "</think>",
])  # fmt: skip


@given(st.lists(PIECES | TEXTS, max_size=14).map("".join), st.sampled_from(["120", "1/2", "f(x)=2", "(1,2)", "12 cm"]))
def test_a_response(response: str, gold: str) -> None:
    for extract in ("auto", "boxed", "final", "last_number"):
        match_literally(response, gold, RewardSection(extract=extract))
    answer_of(response)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and an adapter of it."""
    folder = tmp_path_factory.mktemp("adapter")
    return save_model(folder / "model"), write_adapter(folder / "whole", folder / "model")


def parts(file: Path) -> tuple[Any, bytes]:
    """The header of a safetensors file, and its data."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


@given(st.data())
def test_an_adapter(whole: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    model, adapter = whole
    copy = tmp_path_factory.getbasetemp() / "adapter"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(adapter, copy)
    kind = data.draw(st.sampled_from(["config", "header", "bytes"]))
    if kind == "config":
        (copy / CONFIG).write_text(json.dumps(data.draw(changed(json.loads((adapter / CONFIG).read_text())))))
    elif kind == "header":
        header, values = parts(adapter / WEIGHTS)
        text = json.dumps(data.draw(changed(header))).encode()
        (copy / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + values)
    else:
        [damaged] = damages((adapter / WEIGHTS).read_bytes(), 1, data.draw(st.integers(0, 10**6)))
        (copy / WEIGHTS).write_bytes(damaged)

    def read() -> None:
        found = read_adapter(copy, read_architecture(model))
        assert math.isfinite(found.alpha / found.rank)
        assert len(found.read()) == len(parts(adapter / WEIGHTS)[0]) - 1

    sentence(read)


TOKENIZER = build_arithmetic_tokenizer()
TEMPLATE = Template("{% for m in messages %}{{ m.content }}{% endfor %}=")
ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "response": "2", "reward": 1.0, "step": 1, "finish_reason": "stop"},
    {"prompt_ids": [3, 4, 5], "response_ids": [5, 6], "logprobs": [-0.5, -1.0], "loss_mask": [1, 0], "group": 7},
    {"prompt": [{"role": "user", "content": "1+1"}], "completion": [{"role": "assistant", "content": "2"}]},
]
TRACES: list[Any] = [TWO, VERIFIERS]
TRACES += [{"trace": trace, "reward": 1.0, "group": 4} for trace in TRACES]


@given(st.sampled_from([*ROWS, *TRACES]).flatmap(lambda row: changed([row, row])))
def test_rows_of_rollouts_and_traces(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def read() -> None:
        for group in read_rollouts(path, TOKENIZER, TEMPLATE, (32, 32)):
            for one in group:
                assert 0 < len(one.prompt_ids) <= 32
                assert len(one.response_ids) > 0
                for values in (one.logprobs, one.loss_mask):
                    assert values is None or len(values) == len(one.response_ids)
                assert one.logprobs is None or np.isfinite(one.logprobs).all()

    sentence(read)


DEFAULT = Recipe().model_dump(mode="json", exclude_none=True)
KEYS = [f"{section}.{key}" for section, keys in DEFAULT.items() for key in keys]


def without_null(value: Any) -> Any:
    """TOML has no null, and no integer beyond 64 bits."""
    match value:
        case dict():
            return {str(key): without_null(one) for key, one in value.items() if one is not None}
        case list():
            return [without_null(one) for one in value if one is not None]
        case int() if abs(value) >= 2**63:
            return float(2**63)
        case _:
            return value


def stays_the_same(path: Path, overrides: list[str]) -> None:
    recipe = load_recipe(path, overrides)
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(path) == recipe


@given(changed(DEFAULT))
def test_a_changed_recipe(tmp_path_factory: pytest.TempPathFactory, table: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.toml"
    path.write_bytes(tomli_w.dumps(without_null(table)).encode("utf-8", "surrogatepass"))
    sentence(lambda: stays_the_same(path, []))


@given(st.lists(st.tuples(st.sampled_from(KEYS), ODD | st.text(max_size=20)), min_size=1, max_size=3))
def test_words_of_set(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, Any]]) -> None:
    path = tmp_path_factory.getbasetemp() / "empty.toml"
    path.write_bytes(b"")
    words = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in pairs]
    sentence(lambda: stays_the_same(path, words))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    return read_toml(write_recipe(folder / "recipe.toml", save_model(folder / "model"), folder / "run"))


@given(st.data())
def test_a_dry_run(tmp_path_factory: pytest.TempPathFactory, tiny: dict[str, Any], data: st.DataObject) -> None:
    """The whole way of `mugrpo train` until it would import Megatron: nothing is written."""
    path = tmp_path_factory.getbasetemp() / "dry.toml"
    table = without_null(data.draw(changed(tiny, most=2)))
    path.write_bytes(tomli_w.dumps(table).encode("utf-8", "surrogatepass"))
    answered("train", path, "--dry-run")
    assert not Path(tiny["run"]["dir"]).exists()
