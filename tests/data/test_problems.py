"""Problems of tasks, presets and files; names of data sets are short, unique and usable as TOML keys."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.data.arithmetic import TASKS
from mugrpo_megatron.data.problems import PRESETS, check_sets, held_out_sets, load, named_sources
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.metrics import is_defined
from mugrpo_megatron.recipe.scoring import MEAN, EvalSection
from mugrpo_megatron.recipe.sections import DataSection

ROWS: list[dict[str, Any]] = [
    {"problem": "1+1", "answer": 2},
    {"problem": "1/2", "answer": "\\frac{1}{2}", "source": "elsewhere"},
]
LENIENT = DataSection(strict=False)


def write(path: Path, rows: list[Any]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


MALFORMED = {
    '{"problem": "x"}\n': "field 'answer' is missing (found problem)",
    '{"answer": "2"}\n': "field 'problem' is missing (found answer)",
    '{"problem": "", "answer": "2"}\n': "field 'problem' is empty",
    '{"problem": "x", "answer": "so ####  "}\n': "field 'answer' holds no answer",
    '{"problem": "x", "answer": []}\n': "field 'answer' is empty",
}


@pytest.mark.parametrize("line", MALFORMED, ids=lambda line: repr(line[:40]))
def test_a_malformed_row_is_named_by_file_line_and_reason(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json.dumps(ROWS[0]).encode() + b"\n\n" + line.encode("latin-1") + json.dumps(ROWS[1]).encode())
    place = f"{path}:3: {MALFORMED[line]}"
    with pytest.raises(UserError) as caught:
        load(str(path), DataSection())
    assert str(caught.value).startswith(place)
    read = load(str(path), LENIENT)
    assert len(read.problems) == 2
    assert len(read.malformed) == 1
    assert read.malformed[0].startswith(place)


def test_many_malformed_rows_are_three_examples_and_a_count(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", ['{"problem": 1}\n'] * 30 + ROWS)
    with pytest.raises(UserError, match=r"; and 27 more rows: fix these rows") as caught:
        load(path, DataSection())
    assert [line for line in range(1, 40) if f"{path}:{line}: " in str(caught.value)] == [1, 2, 3]
    assert len(load(path, LENIENT).malformed) == 30


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("only_bad.jsonl", "[]\n", "holds no usable problem"),
        ("array.jsonl", '[\n{"problem": "1+1=", "answer": "2"}\n]\n', "is a JSON array.*rename it to array.json$"),
        ("semicolons.csv", "question;answer\n1+1=;2\n", "';' separates the columns: write the file again with ','$"),
    ],
)
def test_a_set_without_problems_is_the_users_mistake(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        load(str(path), LENIENT)


@pytest.mark.parametrize("section", [DataSection(), LENIENT])
def test_columns_of_unknown_names_are_to_be_named_and_not_left_out(section: DataSection, tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", [{"frage": "1+1=", "antwort": "2"}] * 2)
    with pytest.raises(
        UserError, match=r"own.jsonl:1: field 'problem' is missing .*found antwort, frage.*question_field"
    ):
        load(path, section)
    named = section.model_copy(update={"question_field": "frage", "answer_field": "antwort"})
    assert [one.answer for one in load(path, named).problems] == ["2", "2"]


def test_fields_map_into_nested_columns(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "34"}}
    section = DataSection(question_field="prompt.0.content", answer_field="reward_model.ground_truth")
    for suffix in (".jsonl", ".parquet"):
        found = load(write(tmp_path / f"nested{suffix}", [row]), section).problems
        assert [(p.question, p.answer) for p in found] == [("q", "34")]


def test_a_preset_reads_a_local_copy_of_its_set(tmp_path: Path) -> None:
    dapo = PRESETS["dapo-math-17k"].columns
    content = f"{dapo.question_prefix}What is 2+2?{dapo.question_suffix}"
    row = {"prompt": [{"content": content, "role": "user"}], "reward_model": {"ground_truth": "4", "style": "rule"}}
    found = load("dapo-math-17k@" + write(tmp_path / "d.parquet", [row]), DataSection()).problems
    assert [(p.question, p.answer, p.source) for p in found] == [("What is 2+2?", "4", "dapo-math-17k")]
    found = load(
        "gsm8k@" + write(tmp_path / "g.jsonl", [{"question": "q", "answer": "work\n#### 1,200"}]), LENIENT
    ).problems
    assert found[0].answer == "1,200"
    found = load(
        "math@" + write(tmp_path / "m.jsonl", [{"problem": "q", "solution": "so \\boxed{x^2}."}]), LENIENT
    ).problems
    assert found[0].answer == "x^2"
    row = {"question": "q", "final_answer": ["$1$", "$2$"]}
    found = load("olympiadbench@" + write(tmp_path / "o.jsonl", [row]), LENIENT).problems
    assert found[0].answer == "$1$, $2$"


def test_commas_join_sources(tmp_path: Path) -> None:
    path = write(tmp_path / "some.jsonl", ROWS)
    found = load(f"arithmetic, {path}", DataSection(eval_problems=5), "eval").problems
    assert [p.source for p in found] == ["arithmetic"] * 5 + ["some"] * 2


def test_a_list_that_python_cannot_parse_is_an_answer_as_it_is(tmp_path: Path) -> None:
    answer = f"['a', {'-' * 100_000}'b']"
    (tmp_path / "set.jsonl").write_text(json.dumps({"problem": "q", "answer": answer}))
    assert load(str(tmp_path / "set.jsonl"), DataSection()).problems[0].answer == answer


WORDS = st.sampled_from(["a", "b", "test", "arithmetic", "math500", "mean", "x y", "ü"])
SOURCES = st.one_of(
    st.sampled_from([*TASKS, *PRESETS]),
    st.builds("{}/{}.jsonl".format, WORDS, WORDS),
    st.builds("{}.parquet".format, WORDS),
    st.builds("math500@{}/{}.json".format, WORDS, WORDS),
    st.sampled_from(["owner/test", "other/test", "owner/test/default:train", "owner/a.b"]),
)


@given(st.lists(SOURCES, max_size=8))
def test_every_source_has_a_name_of_its_own_that_a_metric_and_a_toml_key_can_have(sources: list[str]) -> None:
    named = named_sources(" , ".join(sources))
    assert list(named.values()) == sources
    for name, source in named.items():
        assert re.fullmatch(r"[A-Za-z0-9_-]+", name)
        assert name != MEAN
        assert is_defined("eval", f"accuracy/{name}")
        if source in TASKS or source in PRESETS:
            assert re.fullmatch(rf"{source}(-\d)?", name)


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        ("math500,aime24@local.parquet,data/dev.jsonl,owner/set/config:test", ["math500", "aime24", "dev", "set"]),
        ("a/test.jsonl,b/test.jsonl,c/dev.jsonl", ["a-test", "b-test", "dev"]),
        ("a/test.jsonl,a/test.parquet", ["a-test", "a-test-2"]),
        ("math500,own/math500.jsonl", ["math500", "own-math500"]),
        ("own/arithmetic.jsonl", ["own-arithmetic"]),
        ("me/mean.jsonl,one/set,two/set", ["me-mean", "one-set", "two-set"]),
    ],
)
def test_names_are_as_short_as_they_can_be(sources: str, names: list[str]) -> None:
    assert list(named_sources(sources)) == names


def test_a_held_out_set_counts_once() -> None:
    with pytest.raises(UserError, match=r"data\.eval names math500 2 times: name it once"):
        held_out_sets("math500,amc23,math500")


def test_settings_of_a_set_that_is_not_evaluated_name_those_that_are() -> None:
    section = EvalSection.model_validate({"samples": 2, "sets": {"aime24": {"samples": 32, "temperature": 0.6}}})
    check_sets(section, held_out_sets("math500,aime24").keys())
    with pytest.raises(UserError, match=r"\[eval.sets.aime24\] names no held-out set: .* are amc23, math500"):
        check_sets(section, held_out_sets("math500,amc23").keys())
    assert (section.of("aime24").samples, section.of("aime24").temperature) == (32, 0.6)
    assert (section.of("math500").samples, section.of("math500").temperature) == (2, 0.0)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """A hub that holds two shards of one set in the layout of its Parquet branch; returns what was asked of it."""
    folder = tmp_path / "default" / "train"
    folder.mkdir(parents=True)
    for shard in range(2):
        rows = [{"problem": f"q{shard}", "answer": str(shard)}]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"000{shard}.parquet")
    asked: list[dict[str, object]] = []

    def snapshot(repository: str, **options: object) -> str:
        asked.append({"repository": repository, **options})
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    return asked


@pytest.mark.parametrize("source", ["deepscaler", "someone/some-set", "someone/some-set/default:train"])
def test_shards_of_a_split_are_read_in_order(stored: list[dict[str, object]], source: str) -> None:
    assert [p.question for p in load(source, DataSection(), "train").problems] == ["q0", "q1"]
    assert stored[0]["repo_type"] == "dataset"
    assert stored[0]["revision"] == "refs/convert/parquet"
    assert stored[0]["allow_patterns"] == ["default/train/*.parquet"]


@pytest.mark.usefixtures("stored")
def test_a_split_that_is_not_there_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"someone/some-set \(default, test\) has no Parquet files"):
        load("someone/some-set", DataSection(), "eval")


def test_no_network_is_one_sentence_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("cannot reach the hub\nand much more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(UserError, match=r"openai/gsm8k \(main, test\) .*cannot reach the hub\).* NAME@FILE"):
        load("gsm8k", DataSection(), "eval")
