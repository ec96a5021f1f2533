"""Which golds are words, and whether an answer says the same: words and numbers in them must agree.

Only string work: the caller's process asks too, because an answer in prose is reduced to its numbers unless its gold is
words.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from mugrpo_megatron.rewards.extract import boxed_answer, committed, in_ascii_digits, stated
from mugrpo_megatron.rewards.normalize import normalize, split_top, split_unit, unstyled

_PREFIX = r"(?i:(?:the )?(?:correct )?(?:answer )?(?:option|choice)\b ?:? ?)?"
_CHOICE = re.compile(rf"{_PREFIX}(?:\(([A-Z])\)|([A-Z])\)?)")
_SMALL = re.compile(r"\(?([a-z])\)?")
_SIDE_BY_SIDE = re.compile(r"[A-Z]{2,}")
_LABEL = re.compile(
    rf"{_PREFIX}(?:\(([A-Z])\)|([A-Z])(?:\)|(?=[.:]\s|\Z| is (?:the )?(?:correct|right|best)\b)))(?=[\s.:]|\Z)"
)
_BESIDE = re.compile(r"[\s.:-]*(?:,|\([A-Z]\)|[A-Z](?: [A-Z])*\s*(?:\Z|[.:),(/&|]))")
"""A comma (an "or", once normalized), another bracketed letter, or letters that stand alone."""
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
    """The letter of a normalized gold that is a choice and nothing else: `C`, `(C)`, `Option C`."""
    match = _CHOICE.fullmatch(gold)
    return match[1] or match[2] if match else None


def letters_of(gold: str) -> str | None:
    """The letters of a normalized gold that is a list of choices, sorted: `A, C` for `C, A` and `(A), (C)`."""
    letters = [letter_of(element.strip()) for element in gold.split(",")]
    found = {letter for letter in letters if letter}
    return ", ".join(sorted(found)) if 1 < len(found) == len(letters) else None


def all_chosen(answer: str) -> str | None:
    """The letters that a normalized answer chooses, sorted as in `letters_of`; they may stand side by side: `AC`."""
    if letters := _SIDE_BY_SIDE.fullmatch(answer):
        return ", ".join(sorted(set(letters[0])))
    found = [chosen(element.strip()) for element in answer.split(",")]
    return ", ".join(sorted({letter for letter in found if letter})) if all(found) else None


def chosen(answer: str) -> str | None:
    """The letter that a normalized answer chooses; None when it chooses none, or names another one beside it.

    A small letter counts when nothing else is there.
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
    """Whether a comma and one letter end it, and no other letter stands alone: `Paris, D`, but not `points A, B`."""
    before, comma, last = rest.rpartition(",")
    return bool(comma and _ALONE.fullmatch(last.strip()) and not _ALONE.search(before))


_NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:/[0-9]+)?"
_FUNCTIONS = "arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|exp|sqrt|mod|gcd|lcm|max|min"
_LETTER = r"[^\W\d_]"
_WORD = re.compile(
    rf"(?<![\w\\])(?!(?:{_FUNCTIONS})(?!{_LETTER}))(?:{_LETTER}{{3,}}(?!\w|-[0-9])|{_LETTER}{{4,}}(?=-[0-9])"
    r"|[A-Z][A-Za-z](?= [0-9]))"
    r"|(?<=[0-9] )(?:to|in|by|of|vs)(?= [0-9])"
)
"""A hyphen before a number makes `Catch-22` of four letters or more, and a difference of fewer."""
_WORDING = re.compile(r"(?:[^\W_]|[\s,.:'’\"()&!?]|(?<=[^\W_])-(?=[^\W_]))+")
_BRACKETS = re.compile(r"\([^()]*[0-9]|\A[0-9]+ ?\(")
"""A tuple, or a number before its name: `5 (five)`."""
_MONTHS = (
    r"jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|"
    r"nov(?:ember)?|dec(?:ember)?"
)
_DATED = re.compile(rf"(?<![a-z])(?:{_MONTHS})(?![a-z])", re.IGNORECASE)
_MONTH = re.compile(_MONTHS)
_PAST = (
    "ate|bought|brought|built|cost|drank|drove|fell|found|gave|got|grew|held|kept|left|lost|made|met|paid|ran|read|"
    "rode|sang|saw|sent|sold|spent|swam|threw|took|went|won|wrote"
)
_STATEMENT = re.compile(
    r"\b(?:is|are|was|were|be|equals?|has|have|had|gives|makes|costs|needs|takes|gets?)\s+-?[0-9]"
    r"|\A(?:thus|hence|so|therefore|then|about|approximately|around|roughly|nearly|almost|exactly|only|just)\b[\s,]*-?[0-9]"
    r"|\A[^:]*[a-z] ?: *-?[0-9][^:]*\Z"
    rf"|[^\W\d_] (?:[a-z]+(?:ed|[a-rt-z]s)|{_PAST})\s+-?[0-9][0-9.,/]*(?: ?[a-z]|\.?\Z)"
    r"|\A(?:[^0-9]* )?(?:rs|usd|eur|rmb|inr|gbp)\.? ?-?[0-9]"
    r"|\b(?:total|sum|profit|loss|price|value|radius|area|equal|worth)(?: (?:of|to))? -?[0-9]"
    r"|\b(?:can|could|will|would|must|should) (?:[a-z]+ )?-?[0-9]",
    re.IGNORECASE,
)
"""A sentence about a number: a verb, an adverb or a label right before it; a verb is told by its form, too."""
_QUANTITIES = re.compile(rf"{_NUMBER} ?[a-z]+(?: [a-z]+)*(?: {_NUMBER} ?[a-z]+(?: [a-z]+)*)+")
_NEXT_QUANTITY = re.compile(r"(?<=[a-z]) (?=[0-9])")
_LETTER_ALONE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_COUNTED = re.compile(rf"[+-]?{_NUMBER} [A-Za-z' -]+")
_MODEL = re.compile(r"[A-Z][A-Za-z]*-[0-9]+")
"""The `B-52` of a `B-52 bomber`."""
_SMALL_WORDS = re.compile(r" (?!(?:or|is|no|at|if|be|so)\b)(?:[a-z]{1,2}|times)(?![\w'])")
_APOSTROPHES = re.compile("['’]")
_TOKEN = re.compile(r"\\[A-Za-z]+|(?:(?<!\S)-)?[0-9]+(?:\.[0-9]+)?|[^\W\d_]+|[^\s,.:\"`()\[\]{}!-]")
_ARTICLES = frozenset(("a", "an", "the"))
_OF_DATES = frozenset(("of", "the", "st", "nd", "rd", "th"))
_GOLD_CHARS = 1000


def gold_text(gold: str) -> str:
    r"""What a gold says, before its kind is known: its last box, or what follows "the answer is", or all of it.

    Words in a formula are what a sentence says: `The city is $\text{Paris}$` says Paris.
    """
    gold = in_ascii_digits(gold)
    boxed = boxed_answer(gold)
    if boxed is not None:
        return boxed
    said = stated(gold) or gold
    worded = committed(said, text_gold=True)
    return worded if _is_text(normalize(worded)) else said


@lru_cache(maxsize=4096)
def is_text(gold: str) -> bool:
    """Whether a gold is words, a choice or prose that says no number, so that answers are not reduced to numbers."""
    if len(gold) > _GOLD_CHARS:
        return False
    said = gold_text(gold)
    return _is_text(normalize(said)) or (says_no_number(said) and committed(said) != said)


def _is_text(text: str) -> bool:
    return letter_of(text) is not None or is_words(text)


def is_words(text: str) -> bool:
    """Whether a normalized gold is words, possibly with numbers: `January 5`, `Type 2 diabetes`, `no solution`.

    Quantities (`42 apples`, `3 hours 20 minutes`), formulas, sentences about a number and lists without a number are
    not. A number with words behind it is a quantity, unless one of them is a month.
    """
    plain = unstyled(text)
    if not _WORDING.fullmatch(plain) or _BRACKETS.search(plain) or not _WORD.search(plain):
        return False
    if not re.search("[0-9]", plain):
        return "," not in plain
    if _STATEMENT.search(plain):
        return False
    elements = split_top(listed(text), ",")
    return _DATED.search(plain) is not None or not all(_is_quantity(element) for element in elements)


def says_no_number(text: str) -> bool:
    """Whether prose has numbers that are not what it says: an inequality, or a function that is spelled out."""
    return "$" not in text and re.search(rf"[<>]|(?<![\w\\])(?:{_FUNCTIONS}|ln)(?!{_LETTER})", text) is not None


def same_words(text: str, gold: str) -> bool:
    """Whether two texts have the same words, numbers and signs in their order, whatever their case and punctuation.

    An article in front does not count. A date may begin with its day or its month: `June 20` is `20th of June`.
    """
    left, right = _tokens(text), _tokens(gold)
    return left == right or (_date(right) is not None and _date(left) == _date(right))


def listed(text: str) -> str:
    """`3 hours 20 minutes` as `3 hours, 20 minutes`: quantities side by side are a list; other text as it is."""
    plain = unstyled(text)
    if not _LETTER_ALONE.search(text) or ("," not in plain and not _QUANTITIES.fullmatch(plain)):
        return text
    parts = [part for element in split_top(plain, ",") for part in _side_by_side(element)]
    return text if any(_LETTER_ALONE.search(split_unit(part)[0]) for part in parts) else ", ".join(parts)


def _side_by_side(plain: str) -> list[str]:
    return _NEXT_QUANTITY.split(plain) if _QUANTITIES.fullmatch(plain) else [plain]


def _is_quantity(text: str) -> bool:
    """Whether nothing but a value is left without the unit, or without what is counted: `12 ways to do it`."""
    plain, value = unstyled(text), unstyled(split_unit(text)[0])
    if not _WORD.search(value):
        return value == plain or not _MODEL.fullmatch(value)
    return _COUNTED.fullmatch(plain) is not None and not _WORD.search(split_unit(_SMALL_WORDS.sub("", plain))[0])


def _tokens(text: str) -> list[str]:
    found = _TOKEN.findall(_APOSTROPHES.sub("", unstyled(text)).casefold())
    return found[1:] if len(found) > 1 and found[0] in _ARTICLES else found


def _date(tokens: list[str]) -> list[str] | None:
    """A month and a day, a year or both, sorted; None for everything else."""
    found = sorted(token for token in tokens if token not in _OF_DATES)
    months = [token for token in found if _MONTH.fullmatch(token)]
    numbers = [token for token in found if token.isdigit()]
    return found if len(months) == 1 and len(numbers) in (1, 2) and len(found) == 1 + len(numbers) else None


_SPAN_NUMBER = r"[0-9]{1,40}(?:\.[0-9]{1,40})?(?:/[0-9]{1,40})?"
_RANGE = re.compile(rf"({_SPAN_NUMBER}) ?(?:-{{1,3}}|to) ?({_SPAN_NUMBER})")
_DATE = re.compile(r"([0-9]{1,4})([-/])([0-9]{1,2})\2([0-9]{1,4})")
_TIME = re.compile(r"([0-9]{1,2}):([0-9]{2}) ?(?:([ap])\.? ?m\b\.?)?|([0-9]{1,2}) ?([ap])\.? ?m\b\.?", re.IGNORECASE)
_FRACTION = re.compile(r"\\frac ?(?:\{([0-9]+)\}|([0-9])) ?(?:\{([0-9]+)\}|([0-9]))")

Span = tuple[str, ...]
"""The kind (`time`, `date` or `range`), then its numbers; a time ends with `a` or `p`, its half of the day, or ""."""


def span_of(text: str) -> Span | None:
    """What a normalized text is, if it is a time, a date, a score or a range, with or without a unit behind it."""
    found = _span(text)
    return found if found is not None or "-" not in text + unstyled(text) else _span(split_unit(text)[0])


def same_span(answer: Span | None, gold: Span) -> bool:
    """Whether both say the same; a half of the day that one side leaves out is no difference."""
    if answer is None or answer[0] != gold[0]:
        return False
    return answer == gold or (gold[0] == "time" and answer[:3] == gold[:3] and not (answer[3] and gold[3]))


def _span(text: str) -> Span | None:
    plain = _FRACTION.sub(r"\1\2/\3\4", unstyled(text))
    if time := _TIME.fullmatch(plain):
        return ("time", str(int(time[1] or time[4])), time[2] or "00", (time[3] or time[5] or "").lower())
    if date := _DATE.fullmatch(plain):
        return ("date", *(str(int(part)) for part in date.group(1, 3, 4)))
    if ends := _RANGE.fullmatch(plain):
        try:
            return (
                "range",
                *(str(Fraction(end)) if "/" not in end or "." not in end else end for end in ends.groups()),
            )
        except ZeroDivisionError:
            return None
    return None
