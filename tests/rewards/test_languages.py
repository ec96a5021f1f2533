"""Answers in other languages than English: the words for "the answer is", and words that change or deny a number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rewards.verdicts import right

THE_ANSWER_IS = (
    # the ends of solutions in MGSM (arXiv 2210.03057), one for each of its languages
    *("答案是{}。", "Die Antwort ist {}.", "La respuesta es {}.", "La réponse est {}.", "答えは{}です。"),
    *("Ответ — {}.", "Jibu ni {}.", "సమాధానం {}", "คำตอบคือ {}", "উত্তর হল {}।"),
    # what models write in these and other languages
    *(
        "答案：{}",
        "答：{}",
        "正确答案是{}。",
        "【答案】{}",
        "정답: {}",
        "답은 {}입니다",
        "Ответ: {}",
        "ответ равен {}.",
    ),
    *("Відповідь: {}", "الجواب هو {}", "الإجابة: {}", "پاسخ: {}", "תשובה: {}", "उत्तर: {}", "Απάντηση: {}"),
    *("A resposta é {}.", "Resposta: {}", "La risposta è {}.", "Risposta: {}", "Het antwoord is {}.", "Antwoord: {}"),
    *("Odpowiedź: {}", "Odpověď: {}", "Cevap: {}", "Đáp án: {}", "Đáp số: {}", "Jawaban: {}", "Réponse : {}"),
)
CHANGED = (
    *("al menos {}", "como máximo {}", "más de {}", "menos de {}", "aproximadamente {}", "casi {}", "unos {}"),
    *("pelo menos {}", "mais de {}", "cerca de {}", "quase {}", "au moins {}", "au plus {}", "plus de {}"),
    *("moins de {}", "environ {}", "presque {}", "almeno {}", "circa {}", "più di {}", "meno di {}", "quasi {}"),
    *("mindestens {}", "höchstens {}", "etwa {}", "ungefähr {}", "mehr als {}", "weniger als {}", "ongeveer {}"),
    *("minstens {}", "meer dan {}", "около {}", "примерно {}", "больше {}", "не менее {}"),
    *("{} o más", "{} ou plus", "{} oder mehr", "{} ou mais", "{} o più", "{} of meer", "{} или больше"),
    *("nicht {}", "niet {}", "не {}", "kein {}", "sauf {}"),
)
SENTENCES = (
    "La respuesta es {} personas.",
    "Die Antwort ist {} Personen.",
    "Nous avons {} personnes.",
    "Hay {} en total.",
)


@given(
    st.integers(2, 10**6),
    st.sampled_from(THE_ANSWER_IS),
    st.sampled_from(["", "因为 1 + 1 = 2，\n", "Il y a 3 cas.\n"]),
)
def test_the_answer_is(value: int, said: str, before: str) -> None:
    assert right(before + said.format(value), str(value))
    assert not right(before + said.format(value), str(value + 1))


@pytest.mark.parametrize("words", CHANGED)
def test_words_that_change_a_number(words: str) -> None:
    for sentence in SENTENCES:
        assert right(sentence.format(7), "7")
        assert not right(sentence.format(words.format(7)), "7"), sentence
    assert not right(words.format(7), "7")


@pytest.mark.parametrize(
    "response",
    ["La respuesta correcta es C.", "정답은 C입니다.", "正解はCです。", "La bonne réponse est C.", "故选C", "Ответ: C"],
)
def test_a_choice_in_other_languages(response: str) -> None:
    assert right(response, "C")
    assert not right(response, "D")


@pytest.mark.parametrize("connective", ["和", "与", "或", "以及", "または", "및", "или"])
def test_connectives_separate_answers(connective: str) -> None:
    assert right(f"\\boxed{{6{connective}-2}}", "-2, 6")
    assert right(f"x=6{connective}x=-2", "6, -2")
    assert not right(f"6{connective}-2", "6")
    assert not right(f"\\boxed{{6\\text{{ лет {connective} больше}}}}", "6")


def test_han_in_front_of_a_number() -> None:
    assert right("所以共有9种方法。", "9")
    assert right("每小时60公里", "60\\text{ km/h}")
    assert right("每秒9米", "9 m/s")
    assert not right("每秒9米", "9\\text{ km/h}")
    assert not right("不共9个", "9")
