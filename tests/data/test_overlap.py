from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.data.prepare import NGRAM, contamination, without_duplicates, words
from mugrpo_megatron.samples import Problem

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
