"""Compares answers with golds by their characters alone, without a parser: numbers, choices and words."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.items import Verdict
from mugrpo_megatron.rewards.math.extract import after_phrase, answer_of, boxed_answer, is_integer, values_in_prose
from mugrpo_megatron.rewards.math.normalize import normalize, unstyled

MOST_ANSWER_CHARS = 2000
"""Most characters of an extracted answer that are parsed. A longer one scores 0, unless its characters decide that it
equals the gold."""
_WRITTEN_OUT = re.compile(
    r"\$?(?P<sign>[+-]?)(?:(?P<whole>[0-9]{1,40}|[0-9]{1,3}(?:,[0-9]{3}){1,10})(?:\.(?P<decimals>[0-9]{1,40}))?"
    r"|(?P<top>[0-9]{1,40})/(?P<under>[0-9]{1,40})"
    r"|\\[dt]?frac\{(?P<numerator>[0-9]{1,40})\}\{(?P<denominator>[0-9]{1,40})\})\$?"
)


def match_literally(response: str, gold: str, section: RewardSection) -> Verdict | str:
    """Return the verdict on a response if no parser is needed: if the characters of its answer decide, or if there is
    no answer or one that is too long. Otherwise return the answer, to be parsed."""
    answer = answer_of(response, section.extract, is_text(gold))
    verdict = literal_verdict(answer, gold)
    if verdict is not None:
        return Verdict(float(verdict), answer, "equal" if verdict else "differs from the gold answer")
    if not answer:
        return Verdict(0.0, "", "no answer found")
    if len(answer) > MOST_ANSWER_CHARS:
        return Verdict(0.0, answer[:200], f"answer longer than {MOST_ANSWER_CHARS} characters")
    return answer


def literal_verdict(answer: str, gold: str) -> bool | None:
    """Whether answer and gold are equal, if their characters decide it; else None.

    True for equal strings and equal rational numbers, False for different integers or fractions. Different decimals are
    not decided here: one may be the other, rounded.
    """
    if answer == gold:
        return True
    if is_integer(answer) and is_integer(gold):
        return int(answer) == int(gold)
    left, right = _exact(answer), _exact(gold)
    if left is None or right is None:
        return None
    if left == right:
        return True
    return None if "." in answer + gold else False


def _exact(text: str) -> Fraction | None:
    match = _WRITTEN_OUT.fullmatch(text)
    if match is None:
        return None
    if match["whole"] is not None:
        decimals = match["decimals"] or ""
        value = Fraction(int(match["whole"].replace(",", "") + decimals), 10 ** len(decimals))
    else:
        under = int(match["under"] or match["denominator"])
        if under == 0:
            return None
        value = Fraction(int(match["top"] or match["numerator"]), under)
    return -value if match["sign"] == "-" else value


_PREFIX = r"(?i:(?:the )?(?:correct )?(?:answer )?(?:option|choice)\b ?:? ?)?"
_CHOICE = re.compile(rf"{_PREFIX}(?:\(([A-Z])\)|([A-Z])\)?)")
_SMALL = re.compile(r"\(?([a-z])\)?")
_SIDE_BY_SIDE = re.compile(r"[A-Z]{2,}")
_LABEL = re.compile(
    rf"{_PREFIX}(?:\(([A-Z])\)|([A-Z])(?:\)|(?=[.:]\s|\Z| is (?:the )?(?:correct|right|best)\b)))"
    r"(?=[\s.:]|\Z|(?<=\))[0-9])"
)
_BESIDE = re.compile(r"[\s.:-]*(?:,|\([A-Z]\)|[A-Z](?: [A-Z])*\s*(?:\Z|[.:),(/&|]))")
"""Matches another choice beside a letter: a comma (which an "or" has become), another letter in brackets, or single
letters."""
_ANOTHER = re.compile(
    r"\([A-Z]\)|(?<![\w(])[A-Z]\)|\b(?i:option|choice) \(?[A-Z]\b"
    r"|\b(?i:no,|(?:wait|but|rather|actually|instead|sorry)\b,?) (?:[a-z]+ )*[A-Z]\Z"
)
_ALONE = re.compile(r"(?<![\w'])[A-Z](?!\w)")
_RIGHT = r"(?:the |an? )?(?:right|correct|true|valid|possible|best|answer)\b"
_REJECTED = re.compile(
    r"[\s.:-]*(?:"
    r"(?:is|was|seems|looks|would be|must be) (?:(?:[a-z]+ly|also|just|the|an?) )*"
    rf"(?:(?:wrong|incorrect|false|untrue|invalid|impossible|excluded|eliminated|ruled out)\b|not {_RIGHT})"
    rf"|(?:isn|wasn)['’]?t {_RIGHT}|can(?:not| not|['’]?t) be {_RIGHT})",
    re.IGNORECASE,
)


def letter_of(gold: str) -> str | None:
    """The letter of a normalized gold that is a single choice: `C` for `C`, `(C)` and `Option C`; else None."""
    match = _CHOICE.fullmatch(gold)
    return match[1] or match[2] if match else None


_OPTION = re.compile(
    rf"{_PREFIX}(?:\(([A-J])\)|([A-J])(?:\)|\.(?=\s|[0-9$\\])|:(?=\s|[0-9$\\])(?!.*=)))"
    r"(?!\s*(?:\\(?:cup|cap|to|times|cdot)|[+*^=<>/,]|[A-Z]\.|.*\([A-J]\)))\s*(?P<text>\S.*)"
)


def option_of(text: str) -> tuple[str, str] | None:
    """The letter and the text of a normalized choice that has both, such as `(D) 12 m/s` or `D. Paris`; else None."""
    match = _OPTION.fullmatch(text)
    return ((match[1] or match[2]), match["text"].strip()) if match else None


def letters_of(gold: str) -> str | None:
    """The letters of a normalized gold that is a list of choices, sorted: `A, C` for `C, A` and `(A), (C)`; else
    None."""
    letters = [letter_of(element.strip()) for element in gold.split(",")]
    choices = {letter for letter in letters if letter}
    return ", ".join(sorted(choices)) if 1 < len(choices) == len(letters) else None


def chosen_letters(answer: str) -> str | None:
    """The letters that a normalized answer chooses, sorted: `A, C` for `C, A`, `(A), (C)` and `CA`.

    None if an element between commas chooses no letter.
    """
    if letters := _SIDE_BY_SIDE.fullmatch(answer):
        return ", ".join(sorted(set(letters[0])))
    choices = [chosen_letter(element.strip()) for element in answer.split(",")]
    return ", ".join(sorted({letter for letter in choices if letter})) if all(choices) else None


def chosen_letter(answer: str) -> str | None:
    """The letter that a normalized answer chooses; None if the answer has no letter, names another letter too, or says
    that its letter is wrong.

    A small letter counts only if it is the whole answer.
    """
    if small := _SMALL.fullmatch(answer):
        return small[1].upper()
    label = _LABEL.match(answer)
    if label is None:
        return None
    rest = answer[label.end() :]
    if _BESIDE.match(rest) or _ANOTHER.search(rest) or _REJECTED.match(rest) or _ends_with_another(rest):
        return None
    return label[1] or label[2]


def _ends_with_another(rest: str) -> bool:
    """Whether text ends with a comma and a single letter, the only one in it: `Paris, D`, but not `points A, B`."""
    before, comma, last = rest.rpartition(",")
    return bool(comma and _ALONE.fullmatch(last.strip()) and not _ALONE.search(before))


_FUNCTIONS = "arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|exp|sqrt|mod|gcd|lcm|max|min"
_LETTER = r"[^\W\d_]"
_WORD = re.compile(rf"(?<![\w\\])(?!(?:{_FUNCTIONS})(?!{_LETTER})){_LETTER}{{3,}}(?!\w)")
_WORDING = re.compile(r"(?:[^\W_]|[\s,.:'’\"()&!?]|(?<=[^\W_])-(?=[^\W_]))+")
_SPAN = re.compile(
    r"[0-9]{1,2}:[0-9]{2}(?: ?[ap]\.? ?m\.?)?|[0-9]+(?:/[0-9]+){2}|[0-9]+(?: ?-+ ?[0-9]+){1,2}", re.IGNORECASE
)
"""Matches a time, a date, a score or a range: its numbers are not values, and nothing is computed from them."""
_COUNTED = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?(?:/[0-9]+)? ?[A-Za-z' -]+")
_BRACKETS = re.compile(r"\([^()]*[0-9]|\A[0-9]+ ?\(")
"""Matches a tuple, or a number with its name in parentheses: `5 (five)`."""
_STATEMENT = re.compile(
    r"\A(?:the|she|he|they|it|we|you|there)\b|\b(?:is|are|was|were|be|equals?|has|have|had|gives|makes|costs|needs|takes|gets?|total|sum|about|only)\b|:",
    re.IGNORECASE,
)
"""Matches a sentence about a number; the number is then the answer."""
_ORDINAL = re.compile(r"([0-9])\s*(?:\^\s*)?\{?\s*(?:st|nd|rd|th)\b\s*\}?")
_TOKEN = re.compile(r"[0-9]+(?:\.[0-9]+)?|[^\W\d_]+|[^\s,.\"`()\[\]{}!]")
_APOSTROPHES = re.compile("['’]")
_ARTICLES = frozenset(("a", "an", "the"))
_GOLD_CHARS = 1000


def gold_text(gold: str) -> str:
    r"""The answer in a gold: its last box, else the text after "the answer is", else the whole gold.

    Words in a formula are the answer of a sentence: `Paris` in `The city is $\text{Paris}$`.
    """
    boxed = boxed_answer(gold)
    if boxed is not None:
        return boxed
    statement = after_phrase(gold) or gold
    worded = values_in_prose(statement, text_gold=True)
    return worded if _is_text(normalize(worded)) else statement


@lru_cache(maxsize=4096)
def is_text(gold: str) -> bool:
    """Whether a gold is words, a choice, or prose whose numbers are not its answer (`says_no_number`).

    Answers to such a gold are not reduced to their numbers.
    """
    if len(gold) > _GOLD_CHARS:
        return False
    statement = gold_text(gold)
    return _is_text(normalize(statement)) or (says_no_number(statement) and values_in_prose(statement) != statement)


def _is_text(text: str) -> bool:
    return letter_of(text) is not None or option_of(unstyled(text)) is not None or is_words(text)


def is_words(text: str) -> bool:
    """Whether a normalized gold consists of words, among which numbers may be (`January 5`), or is a time, a date, a
    score or a range (`12:30`).

    False for quantities (`42 apples`), formulas, prose about a number, and lists without a number.
    """
    plain = unstyled(text)
    if _SPAN.fullmatch(plain):
        return True
    if not _WORDING.fullmatch(plain) or _BRACKETS.search(plain) or not _WORD.search(plain):
        return False
    if not re.search("[0-9]", plain):
        return "," not in plain
    return not _STATEMENT.search(plain) and not all(_COUNTED.fullmatch(item.strip()) for item in plain.split(","))


def says_no_number(text: str) -> bool:
    """Whether the numbers in a text are parts of a formula in it and not its answer: the text has no `$`, but `<`, `>`
    or the name of a function such as `ln`."""
    return "$" not in text and re.search(rf"[<>]|(?<![\w\\])(?:{_FUNCTIONS}|ln)(?!{_LETTER})", text) is not None


def same_words(text: str, gold: str) -> bool:
    """Whether two texts have the same words, numbers and signs in the same order.

    Case, punctuation and an article at the beginning do not count.
    """
    return _tokens(text) == _tokens(gold)


def _tokens(text: str) -> list[str]:
    tokens = _TOKEN.findall(_ORDINAL.sub(r"\1", _APOSTROPHES.sub("", unstyled(text)).casefold()))
    return tokens[1:] if len(tokens) > 1 and tokens[0] in _ARTICLES else tokens
