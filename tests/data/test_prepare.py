"""From rows to the problems of a run: duplicates, overlaps with held-out sets, the order of problems and updates."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.data import arithmetic
from mugrpo_megatron.data.prepare import (
    NGRAM,
    contamination,
    evenly_spaced_by_set,
    prepare,
    problem_at,
    read_problems,
    update_at,
    without_duplicates,
    words,
)
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
        "1 training problems contain half or more of a held-out problem's wording: left out",
        "train.jsonl:3 contains 100% of",
        "1 training prompts are longer",
    ):
        assert expected in told


def test_contamination_is_reported_and_kept_by_default(tmp_path: Path) -> None:
    path = write(tmp_path / "same.jsonl", [("held out", "1"), ("other", "2")])
    made = prepare(DataSection(train=path, eval=path), REWARD, TOKENIZER)
    assert len(made.train.problems) == 2
    assert made.notes[0].startswith("2 training problems contain half or more of a held-out")


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


@given(st.integers(0, 2**63), st.integers(1, 60), st.integers(0, 5))
def test_every_epoch_visits_every_problem_once(seed: int, n: int, epoch: int) -> None:
    visited = [problem_at(seed, n, epoch * n + i) for i in range(n)]
    assert sorted(visited) == list(range(n))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        return [problem_at(seed, 50, number * 50 + i) for i in range(50)]

    assert epoch(0, 0) == epoch(0, 0)
    assert len({tuple(epoch(seed, number)) for seed in range(3) for number in range(3)}) == 9


def test_the_order_never_changes() -> None:
    """A run resumed with a later numpy continues with the same problems."""
    assert [problem_at(7, 10, i) for i in range(10)] == [6, 3, 4, 9, 0, 2, 8, 7, 5, 1]


@given(st.integers(0, 2**31), st.integers(0, 9), st.integers(1, 40), st.integers(0, 4))
def test_every_pass_takes_every_update_once_and_the_first_one_in_order(
    seed: int, stage: int, updates: int, number: int
) -> None:
    taken = [update_at(seed, stage, updates, number * updates + place) for place in range(updates)]
    assert sorted(taken) == list(range(updates))
    assert number > 0 or taken == list(range(updates))


def test_later_passes_differ_by_seed_stage_and_pass_and_repeat() -> None:
    def order(seed: int, stage: int, number: int) -> tuple[int, ...]:
        return tuple(update_at(seed, stage, 50, number * 50 + place) for place in range(50))

    assert order(1, 1, 1) == order(1, 1, 1)
    orders = {order(seed, stage, number) for seed in range(3) for stage in range(3) for number in (1, 2)}
    assert len(orders) == 18


def test_the_order_of_a_later_pass_never_changes() -> None:
    """A run resumed with a later numpy continues with the same updates."""
    assert [update_at(7, 2, 8, 8 + place) for place in range(8)] == [2, 1, 7, 6, 4, 0, 5, 3]


LONG = "A farmer keeps seven hens and each hen lays three eggs every day of the week except on Sunday"


def asked(*questions: str) -> list[Problem]:
    return [Problem(f"set:{n}", question, "1") for n, question in enumerate(questions)]


def test_layout_case_and_punctuation_do_not_matter() -> None:
    assert words("Find  $\\left(x+1\\right)$, please!") == words("find (x+1) please")
    assert words("2-1") != words("2+1")


def test_the_first_copy_stays_and_disagreements_are_named() -> None:
    problems = [*asked("1+1?", "2+2?"), Problem("set:9", "1 + 1", "3")]
    kept, disagreements = without_duplicates(problems)
    assert [p.id for p in kept] == ["set:0", "set:1"]
    assert disagreements == ["set:9: same question as set:0 but answer '3', not '1'"]


def test_punctuation_that_changes_the_answer_makes_another_problem() -> None:
    problems = [
        Problem("set:0", "What is 3!?", "6"),
        Problem("set:1", "What is 3?", "3"),
        Problem("set:2", "What is (1+2)*3?", "9"),
        Problem("set:3", "What is 1+(2*3)?", "7"),
        Problem("set:4", "what is  $3$", "3"),
    ]
    kept, disagreements = without_duplicates(problems)
    assert [p.id for p in kept] == ["set:0", "set:1", "set:2", "set:3"]
    assert not disagreements


def test_a_problem_that_was_reworded_a_little_is_found() -> None:
    found = contamination(asked("Something else entirely", LONG + ", how many in all?"), asked("no", LONG))
    assert [(c.train.id, c.held_out.id) for c in found] == [("set:1", "set:1")]
    assert found[0].overlap > 0.9


def test_half_of_the_wording_is_the_limit() -> None:
    half = " ".join(LONG.split()[: NGRAM - 1])
    assert contamination(asked(half), asked(LONG)) == []


def test_short_problems_count_only_when_equal() -> None:
    assert [c.train.id for c in contamination(asked("12+34=", "12+35="), asked("12 + 34 ="))] == ["set:0"]


@given(st.lists(st.text(max_size=80), max_size=8))
def test_a_set_is_contaminated_by_itself(questions: list[str]) -> None:
    problems = asked(*questions)
    found = contamination(problems, problems)
    assert [c.train.id for c in found] == [p.id for p in problems]
    assert all(c.overlap == 1.0 for c in found)
