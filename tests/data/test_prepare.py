from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.data import arithmetic
from mugrpo_megatron.data.prepare import evenly_spaced_by_set, prepare, read_problems
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.recipe.sections import DataSection
from mugrpo_megatron.samples import Problem

TOKENIZER = build_arithmetic_tokenizer()
REWARD = RewardSection(workers=1)


def write(path: Path, rows: list[tuple[str, str]]) -> str:
    path.write_text("".join(json.dumps({"problem": q, "answer": a}) + "\n" for q, a in rows))
    return str(path)


@pytest.mark.process
def test_what_is_left_out_is_noted(tmp_path: Path) -> None:
    train = [("one plus one", "2"), ("One plus one?", "3"), ("held out", "1"), ("gold", "$ $"), ("x" * 99, "1")]
    data = DataSection(
        train=write(tmp_path / "train.jsonl", train),
        eval=write(tmp_path / "eval.jsonl", [("held out", "1"), ("another", "\\frac{1}{2}"), ("third", "x")]),
        eval_problems=2,
        max_prompt_tokens=50,
        strict=False,
        contamination="drop",
    )
    made = prepare(data, REWARD, TOKENIZER)
    assert [p.question for p in made.train.problems] == ["one plus one"]
    assert [p.question for p in made.held_out.problems] == ["held out", "third"]
    told = "\n".join(made.notes)
    for expected in (
        "eval: 2 of its 3 held-out problems are used, evenly spaced",
        "train.jsonl:4: the answer '$ $' does not verify against itself",
        "train.jsonl:2: same question as",
        "1 training problems repeat another one's question",
        "1 training problems share half of their wording with a held-out problem: left out",
        "train.jsonl:3 is 100% of",
        "1 training prompts are longer",
    ):
        assert expected in told


def test_contamination_is_reported_and_kept_by_default(tmp_path: Path) -> None:
    path = write(tmp_path / "same.jsonl", [("held out", "1"), ("other", "2")])
    made = prepare(DataSection(train=path, eval=path), REWARD, TOKENIZER)
    assert len(made.train.problems) == 2
    assert made.notes[0].startswith("2 training problems share half of their wording")


@pytest.mark.process
def test_a_gold_that_cannot_be_verified_ends_a_strict_run(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", [("fine", "2"), ("bad", "$ $")])
    with pytest.raises(UserError, match=r"bad\.jsonl:2: the answer .* does not verify"):
        prepare(DataSection(train=path, eval="arithmetic"), REWARD, TOKENIZER)


def test_the_bundled_task_needs_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "GENERATED", 500)
    made = prepare(DataSection(eval_problems=50), REWARD, TOKENIZER)
    assert (len(made.train.problems), len(made.held_out.problems), made.notes[:-1]) == (500, 50, [])
    assert made.notes[-1].startswith("the first prompt as the model sees it (plain): '")


def test_held_out_problems_keep_the_name_of_their_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "GENERATED", 5)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    rows = [("one", "1"), ("two", "2"), ("three", "3"), ("four", "4"), ("five", "5")]
    sources = [write(tmp_path / folder / "test.jsonl", rows) for folder in "ab"]
    data = DataSection(eval=",".join([*sources, "arithmetic"]), eval_problems=2)
    made = prepare(data, REWARD, TOKENIZER)
    assert [p.source for p in made.held_out.problems] == ["a-test"] * 2 + ["b-test"] * 2 + ["arithmetic"] * 2
    assert len(made.held_out.prompts) == 6
    assert [p.question for p in made.held_out.problems[:4]] == ["one", "four"] * 2
    cut = "2 of its 5 held-out problems are used, evenly spaced; data.eval_problems sets how many"
    assert made.notes[:2] == [f"a-test: {cut}", f"b-test: {cut}"]


@given(st.integers(1, 60), st.integers(1, 60))
def test_problems_of_a_larger_set_are_evenly_spaced(size: int, limit: int) -> None:
    problems = [Problem(f"set:{place}", "q", "1", "set") for place in range(size)]
    notes: list[str] = []
    kept = [problems.index(one) for one in evenly_spaced_by_set(problems, limit, notes)]
    assert len(kept) == min(size, limit)
    assert bool(notes) == (size > limit)
    gaps = {after - before for before, after in pairwise([*kept, size])}
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.process
def test_a_held_out_set_of_which_nothing_is_left_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "GENERATED", 5)
    bad = write(tmp_path / "bad.jsonl", [("bad", "$ $")])
    with pytest.raises(UserError, match=r"data\.eval: .*bad\.jsonl has no usable problem"):
        prepare(DataSection(eval=f"arithmetic,{bad}", strict=False), REWARD, TOKENIZER)


def test_problems_that_were_read_before_are_not_read_again(tmp_path: Path) -> None:
    data = DataSection(train=write(tmp_path / "a.jsonl", [("one", "1"), ("x" * 99, "2")]), eval="arithmetic")
    data = data.model_copy(update={"eval_problems": 3, "max_prompt_tokens": 50})
    found = read_problems(data, REWARD)
    (tmp_path / "a.jsonl").unlink()
    made = prepare(data, REWARD, TOKENIZER, found)
    assert [p.question for p in made.train.problems] == ["one"]
    assert len(made.held_out.prompts) == 3
    assert made.notes[:-1] == ["1 training prompts are longer than data.max_prompt_tokens: left out"]
    assert found.notes == []  # what is told of the prompts does not go back
