"""Extracts the answer from a response by string operations, without a parser; a response takes microseconds."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from mugrpo_megatron.rewards.math.aligned import as_displays
from mugrpo_megatron.rewards.math.characters import FRACTIONS, OVER_DIGITS, RAISED, plain_characters
from mugrpo_megatron.rewards.math.languages import (
    ANSWER_IS,
    CHANGED_BEFORE,
    CHANGED_BEHIND,
    COPULA_BEHIND,
    DENIED_BEFORE,
)
from mugrpo_megatron.rewards.math.markup import answering_turn, without_markup
from mugrpo_megatron.rewards.math.thoughts import after_thoughts

_PHRASE = re.compile(
    r"\b(?:final\s+answer|answers?|correct\s+(?:option|choice)s?)\s*(?:(?:is|are|would\s+be|must\s+be)\b|:|=)\s*:?\s*"
    r"|\b(?:I|we)(?:\s+(?:will|would|shall)|['’]l?[ld])?\s+(?:choose|pick|select)\s+"
    r"|(?<![不没非])[选選](?:择|擇|项|項)?\s*[:：]?\s*(?=\(?[A-Z]\b)"
    rf"|{ANSWER_IS}",
    re.IGNORECASE | re.MULTILINE,
)
_REASON = re.compile(r"[\s,]\s*(?:because|since)\b", re.IGNORECASE)
_NEGATED = re.compile(r"\b(?:not?|cannot|unknown|neither)\b|n't\b", re.IGNORECASE)
_DENIED = re.compile(
    r"(?:\b(?:not|never|hardly|neither|except|without|(?:anything|all|nothing)\s+but|far\s+from|unlikely)|n't|\bcannot)"
    r"\s+(?:\w+\s+)?(?:(?:equal\s+to|to\s+be|be|the|a)\s+)*\$?\s*\Z"
    rf"|{DENIED_BEFORE}",
    re.IGNORECASE,
)
_CHANGED_BEFORE = re.compile(
    r"\b(?:at\s+(?:least|most)|\w+er\s+than|(?:more|less|fewer|other)\s+than|about|approximately|around|roughly|nearly"
    r"|almost|close\s+to|up\s+to|under|below|above|between|plus|minus|times|(?:divided|multiplied)\s+by|negative|half"
    r"|twice|double|triple"
    r"|(?:half|double|root|square|cube|multiple|factor|power|logarithm)\s+of|(?:before|after)|if\s+it\s+is"
    r"|maybe|perhaps|possibly|probably|(?:might|could|may)\s+be|guess|un(?:known|clear|sure))[\s:]+"
    r"(?:the\s+|of\s+|an?\s+)*\$?\s*\Z"
    rf"|{CHANGED_BEFORE}",
    re.IGNORECASE,
)
_CHANGED_BEHIND = re.compile(
    r"\s*\$?\s*(?:or\s+(?:more|less|fewer|so|greater|higher|lower)\b|(?:more|less|fewer|greater|other)\s+than\b|squared\b"
    r"|cubed\b|factorial\b|(?:plus|minus|times|divided|modulo|mod)\b"
    r"|(?:is|was)\s+(?:wrong|incorrect|false|impossible)\b)"
    rf"|{CHANGED_BEHIND}",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z])|\.\s*$|[。！？।]|\n")
_COPULA = re.compile(COPULA_BEHIND)
_PROSE = re.compile(
    r"(?<![\\A-Za-z{])(?!(?:arc)?(?:sin|cos|tan|cot)\b|ln\b|log\b|exp\b)[A-Za-z']{2,}\s+(?:[A-Za-z']{1,}\s+)?(?:[A-Za-z']{2,}|(?=[$\\0-9]))|(?<!\\)\b[A-Za-z]{3,}\s*:"
)
_MATH = re.compile(
    r"\$\$.+?\$\$|(?<!\\)\$(?![0-9])(?:\\.|[^$\\\n])+?\$(?![0-9])|\\\(.+?\\\)|\\\[.+?\\\]"
    r"|(?<!\\)\$(?=[0-9])(?:\\.|\s(?![A-Za-z]{2})|[^$\\\s])+?\$(?![0-9])"
)
"""Matches a formula in prose. A `$` in front of a digit ends no formula, as in Pandoc's `tex_math_dollars`: `$17 and
$18` are two amounts. Nor does such a `$` begin a formula that has a word behind a space: `$5 if $x = 3$` is an amount
and a formula."""
_DISPLAY = r"(?:\$\$|\\\[|\\begin\{(?:equation|displaymath)\*?\})"
_DISPLAYED = re.compile(
    rf"{_DISPLAY}(?P<inside>(?:(?!{_DISPLAY}).)+?)(?:\$\$|\\\]|\\end\{{(?:equation|displaymath)\*?\}})", re.DOTALL
)
_HEADED = re.compile(rf"^[#*_>\s]*(?:final\s+)?answers?\b[*_.:\s]*\n\s*(?={_DISPLAY})", re.IGNORECASE | re.MULTILINE)
"""Matches a heading "Answer" above a displayed formula."""
_AT_THE_END = re.compile(
    r"\b(?:is|are|equals?)\s+(?:(?:therefore|thus|hence|then|exactly|simply|just|equal\s+to)\s+)?(?=\$|\\[(\[]|[-0-9])"
)
_RELATION = r"\$[^$\n=<>]+(?:=|<|>|\\[lg]eq?\b)[^$\n]+\$"
_GIVEN = re.compile(rf"\b(?:when|if|where|for|with)\s+{_RELATION}(?:,?\s+and\s+{_RELATION})*(?!,?\s+and\b)")
"""Matches a condition that consists of formulas: `when $x = 3$`."""
_CONDITIONAL = re.compile(r"\b(?:if|unless|when|whether|not|no|never|neither|or|because|since)\b|[;:,]", re.IGNORECASE)
NUMBER = re.compile(
    r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+(?:,[0-9]{2}(?![0-9]))?)(?:\.[0-9]+)?(?:\s?/\s?[0-9]+|\s?[%‰‱])?"
)
_AMOUNT = re.compile(rf"(?<!\\)\$\s?{NUMBER.pattern}")
_SPAN = (
    r"(?<![\w.:/-])(?:[0-9]{1,4}(?::[0-9]{1,2})+(?:\s?[aApP]\.?\s?[mM]\b\.?)?|[0-9]{1,2}\s?[aApP]\.?\s?[mM]\b\.?"
    r"|[0-9]+(?:[-–][0-9]+){1,2}(?![0-9]|[/.][0-9])|[0-9]+(?:/[0-9]+){2}(?![0-9/])"
    r"|(?<!from )[0-9]+ (?:to|over) [0-9]+(?![0-9./]))"
)
"""Matches a time, a ratio, a score, a range or a date; no number in it is a value of its own."""
_MAGNITUDE = r"(?:\s(?:dozen|hundred|thousand|million|billion|trillion)s?\b|\s(?:per\s?mil(?:le?)?|basis\s+points?)\b)?"
_PLAIN_VALUE = re.compile(
    rf"{_SPAN}|-?[0-9]*\.[0-9]*[0-9][{OVER_DIGITS}][0-9{OVER_DIGITS}]*|(?:{NUMBER.pattern})(?:\s?[{FRACTIONS}]|{RAISED}+)?{_MAGNITUDE}|(?<!\w)-?[{FRACTIONS}]"
)
_VALUE = re.compile(f"{_MATH.pattern}|{_PLAIN_VALUE.pattern}")
_TEXT = re.compile(
    r"(?!\$[0-9])(?:.*?(?<![\\A-Za-z])[A-Za-z]{3,}|[\\$(\s]*(?:\\[a-z]+\{)*\(?[A-Z]\)?\}*[\\$).\s]*\Z)", re.DOTALL
)
"""Matches a formula that has words in it or is the letter of a choice; not an amount of money."""
_LISTED = re.compile(r"\s*[,;]?\s*(?:\b(?:and|or)\b)?\s*(?:[A-Za-z](?:_\{?\w\}?)?\s*=\s*)?\$?")
_CONDITION = re.compile(
    r"\b(?:for|when|if|with|from|after|at|in|on|by|as|given|where)\s+(?:[A-Za-z]\s*=\s*)?\$?\Z", re.IGNORECASE
)
"""Matches the text before a value in a condition, as in "for $x = 2$, 5": the comma after that value does not separate
elements of a list."""
_PROSE_CHARS = 1000
_VALUES = 16
"""Number of values of a statement, from its first, that are checked for words around them that deny or change the
value. A statement with more values is a list that no gold asks for in prose."""


def after_phrase(text: str) -> str | None:
    """The text after the last "answer is" or "answer:", to the end of its sentence; None without such a phrase.

    If a displayed formula follows the phrase or a heading "Answer" directly, only the formula is returned, over several
    lines too. If the sentence gives a value to a formula, only the value is returned (`_value_at_the_end`).
    """
    phrases = [*_PHRASE.finditer(text), *_HEADED.finditer(text)]
    if not phrases:
        return None
    rest = text[max(phrase.end() for phrase in phrases) :].strip()
    if displayed := _DISPLAYED.match(rest):
        return displayed["inside"].strip()
    statement = _COPULA.sub("", _SENTENCE_END.split(rest, maxsplit=1)[0]).strip()
    return _value_at_the_end(statement) or statement


def _value_at_the_end(statement: str) -> str:
    """The value that a sentence gives to a formula, as in `The area of $ABC$ is 120`; "" for other statements."""
    verbs = list(_AT_THE_END.finditer(statement))
    if not verbs:
        return ""
    before, value = statement[: verbs[-1].start()].strip(), _VALUE.match(statement, verbs[-1].end())
    if not _is_prose(before) and not (_MATH.fullmatch(before) and re.search("[A-Za-z]", before)):
        return ""
    # Commas inside formulas separate arguments, not clauses, so they are removed before `_CONDITIONAL` looks for
    # commas.
    words = _MATH.sub(lambda formula: formula[0].replace(",", ""), _GIVEN.sub("", before))
    if value is None or re.search(r"[0-9$]", statement[value.end() :]) or _CONDITIONAL.search(words):
        return ""
    another = re.search("[0-9]", _MATH.sub("", before))
    return statement[verbs[-1].end() :] if _MATH.search(before) and not another else ""


def answer_in_statement(statement: str, text_gold: bool) -> str:
    """The values in a statement of a response (`values_in_prose`).

    Unless `text_gold`, a statement whose words deny a value or change it ("not 5", "at least 5") is returned whole, so
    that it does not count as the value.
    """
    reason = _REASON.split(statement, maxsplit=1)[0]
    values = list(_VALUE.finditer(reason[:_PROSE_CHARS]))
    if not text_gold and any(_is_changed(reason, value) for value in values[:_VALUES]):
        return statement
    return values_in_prose(statement, text_gold)


def values_in_prose(statement: str, text_gold: bool = False) -> str:
    """The formulas in prose, or else its numbers, joined by commas.

    Text after "because" or "since" is left out. With `text_gold`, only formulas with words in them count. The statement
    is returned whole if it is not prose, begins with a negation, or has no such values.
    """
    statement = _REASON.split(statement, maxsplit=1)[0].rstrip()
    statement = statement[:_PROSE_CHARS] if _is_prose(statement[:_PROSE_CHARS]) else statement
    if not _is_prose(statement[:_PROSE_CHARS]) or _NEGATED.match(statement):
        return statement
    amounts = _AMOUNT.findall(_MATH.sub("", statement))
    values = _MATH.findall(_GIVEN.sub("", statement) if len(amounts) == 1 else statement) or amounts
    values = [value for value in values or _PLAIN_VALUE.findall(statement) if not text_gold or _TEXT.match(value)]
    return ", ".join(dict.fromkeys(value.strip("$ ") for value in values)) if values else statement


def last_answer(text: str, text_gold: bool) -> str:
    """The displayed formula at the end of `text`, or else its last line.

    Of a line of prose, only its last values with no other words between them are returned (`_last_group`). The line is
    returned whole if it has no value, or if its words deny or change one of the last values.
    """
    displays = list(_DISPLAYED.finditer(text))
    if displays and displays[-1].end() == len(text):
        displayed = text[-_PROSE_CHARS:]
        formulas = list(_MATH.finditer(displayed))
        is_found = formulas and formulas[-1].end() == len(displayed)
        return _listed(_last_group(displayed, formulas)) if is_found else displays[-1]["inside"].strip()
    line = text.rsplit("\n", 1)[-1].strip()
    if not _is_prose(line[-_PROSE_CHARS:]):
        return line
    line = line[-_PROSE_CHARS:]
    values = [match for match in _VALUE.finditer(line) if not text_gold or _TEXT.match(match[0])]
    if not values or _NEGATED.search(line, values[-1].end()):
        return line
    group = _last_group(line, values)
    return line if any(_is_changed(line, value) for value in group) else _listed(group)


def _last_group(line: str, values: list[re.Match[str]]) -> list[re.Match[str]]:
    """The last values of a line that have nothing but commas, "and" and the like between them."""
    group = values[-1:]
    for value in reversed(values[:-1]):
        between = line[value.end() : group[0].start()]
        is_condition = "," in between and _CONDITION.search(line[: value.start()])
        if not between or not _LISTED.fullmatch(between) or is_condition:
            break
        group.insert(0, value)
    return group


def _listed(values: list[re.Match[str]]) -> str:
    return ", ".join(dict.fromkeys(value[0].strip("$ ") for value in values))


def _is_changed(text: str, value: re.Match[str]) -> bool:
    """Whether the words around a value deny it, or turn it into another value."""
    before = text[max(0, value.start() - 40) : value.start()]
    return bool(_DENIED.search(before) or _CHANGED_BEFORE.search(before) or _CHANGED_BEHIND.match(text, value.end()))


def _is_prose(line: str) -> bool:
    """Whether a line is prose: it has several words in a row, or words beside a formula."""
    return bool(_PROSE.search(line) or (_MATH.search(line) and re.search(r"[A-Za-z]{2,}", _MATH.sub(" ", line))))


_ANSWER = re.compile(
    r"<(?P<tag>answer|final_answer)>(?P<inside>(?:(?!</?(?P=tag)>).)*)(?:</(?P=tag)>|\Z)"
    r"|<\|(?P<box>begin_of_box)\|>(?P<boxed>(?:(?!<\|begin_of_box\|>).)*?)(?:<\|end_of_box\|>|\Z)",
    re.IGNORECASE | re.DOTALL,
)
"""Matches an answer in tags; GLM's `<|begin_of_box|>` is such a tag."""
_CUT_TAG = re.compile(r"<(?:/[A-Za-z_]*)?\s*\Z")
"""Matches a closing tag that was cut off at the length limit."""
_ONLY_CLOSED = re.compile(r"(?P<inside>(?:(?!</?(?:final_)?answer>).)+)</(?:final_)?answer>", re.IGNORECASE | re.DOTALL)
"""Matches an answer that has only a closing tag, since the opening tag is in the prompt."""


def tagged_answers(text: str, connective: re.Pattern[str]) -> list[str]:
    """The contents of the last group of `<answer>...</answer>` tags; empty if there is no such tag.

    Tags form a group if they have only connectives between them, as boxes do. The closing tag may be cut by a stop
    string, and the opening one may be in the prompt.
    """
    if "<" not in text:
        return []
    pairs = [pair for pair in _ANSWER.finditer(text) if (pair["inside"] or pair["boxed"] or "").strip() or pair["tag"]]
    if not pairs and (closed := _ONLY_CLOSED.match(text)):
        return [closed["inside"].strip()]
    group = pairs[-1:]
    for pair in reversed(pairs[:-1]):
        if not connective.fullmatch(text, pair.end(), group[0].start()):
            break
        group.insert(0, pair)
    return [_CUT_TAG.sub("", pair["inside"] or pair["boxed"] or "").strip() for pair in group]


Extract = Literal["auto", "boxed", "final", "last_number"]

_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_CONNECTIVE = re.compile(
    r"(?:\s|\$|,|;|\.|\\[()\[\],;:! ]|\\q?quad\b|\\text\s*\{[^{}0-9]{0,40}\}|\b(?:and|or)\b"
    r"|[a-zA-Z](?:_\{?\w\}?)?\s*=)*"
)
_BRACE = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{|\\.|\{|\}", re.DOTALL)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?![A-Za-z{\s])([^\s${}\\]+)")
_TAIL_CHARS = 8000
"""Number of characters at the end of a response that are searched; an earlier answer does not count."""


def is_integer(text: str) -> bool:
    return _INTEGER.fullmatch(text) is not None


def answer_of(response: str, extract: Extract = "final", text_gold: bool | None = None) -> str:
    r"""Extract the answer from a response, without spaces around it; "" if there is none.

    Thoughts (`after_thoughts`) and tokens that end a turn are left out. If there are answers in tags, only these are
    searched. `extract` says how:

    "boxed" takes the last `\boxed{}` or `\fbox{}`, joined with boxes before it if only "and", commas and the like are
    between them. "final" takes the first of these that exists: the response, if it is an integer; the last box; the
    text after the last `####`; the rest of the sentence after the last "answer is" or "answer:"; a displayed `$$...$$`
    at the end; the last line, or if that is prose, its last formula or number. "last_number" takes the last number
    anywhere. "auto" is "final"; a recipe whose prompts ask for a box turns it into "boxed".

    `text_gold` says whether the gold is words or the letter of a choice; None if that is not known. For such a gold,
    prose is the answer and not the numbers in it, and a choice that is named after a box counts if the box holds no
    choice.
    """
    text = plain_characters(answering_turn(after_thoughts(response)), scripts=False).strip()
    if extract == "last_number":
        numbers = NUMBER.findall(text[-_TAIL_CHARS:])
        return numbers[-1] if numbers else ""
    if extract != "boxed" and is_integer(text):
        return text
    text = as_displays(text[-_TAIL_CHARS:])
    texts = tagged_answers(text, _CONNECTIVE) or [text]
    if extract == "boxed":
        return ", ".join(dict.fromkeys(boxed_answer(text) or "" for text in texts))
    return ", ".join(dict.fromkeys(_final_answer(text, text_gold) for text in texts))


def _final_answer(text: str, text_gold: bool | None) -> str:
    boxed = boxed_answer(text)
    text = without_markup(text)
    if boxed is not None:
        return _named_behind(text, boxed, text_gold) or boxed
    if "####" in text:
        after = text.rsplit("####", 1)[1].strip().split("\n", 1)[0].strip()
        if not after.lower().startswith(("final answer", "answer")):
            return after
    statement = after_phrase(text)
    if statement is None:
        return last_answer(text, bool(text_gold))
    return answer_in_statement(statement, bool(text_gold))


_CHOICE = re.compile(
    r"(?:(?:option|choice)\s+)?(?:\((?P<in>[A-Z])\)|(?P<bare>[A-Z])(?:\)|(?=[.:]\s|[.:]?\Z)))", re.IGNORECASE
)
_MACROS = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf)|boxed)\s*\{|[${}]")


def _named_behind(text: str, boxed: str, text_gold: bool | None) -> str | None:
    """The answer that a phrase such as "the answer is" names after the last box, if it replaces the box's; None if the
    box counts.

    Words replace a formula in the box if the gold is words or a choice. A choice replaces what the box holds in two
    cases: the gold is words or a choice, or the gold is not known and the box holds an equation or no number. If the
    box holds another choice, both are returned as a list, which no single gold equals.
    """
    if text_gold is False:
        return None
    end = max((box.end for box in _boxes(text)), default=0)
    statement = after_phrase(text[end:]) if end else None
    if not statement:
        return None
    bare = _MACROS.sub("", boxed).strip()
    named, in_box = _CHOICE.match(statement), _CHOICE.match(bare)
    if named:
        letter = (named["in"] or named["bare"]).upper()
        if in_box:
            other = (in_box["in"] or in_box["bare"]).upper()
            return None if letter == other else f"{other}, {letter}"
        return letter if text_gold or not re.search("[0-9]", bare) or re.search(r"[=<>]|\\[lg][elg]", bare) else None
    worded = (
        text_gold
        and not in_box
        and re.search("[A-Za-z]{3}", statement)
        and not re.search(r"[A-Za-z]{3}", _COMMANDS.sub("", bare))
    )
    return answer_in_statement(statement, True) if worded else None


_COMMANDS = re.compile(r"\\[A-Za-z]+")


def boxed_answer(text: str) -> str | None:
    r"""The contents of the last group of `\boxed{}`, joined by commas, or of the last `\boxed5` without braces; None if
    there is neither.

    Boxes form a group if they have only connectives between them. A list never equals a single gold, so boxing many
    candidates gains nothing.
    """
    boxes = _boxes(text)
    if not boxes:
        bare = _BARE_BOX.findall(text)
        return bare[-1].rstrip(".,;") if bare else None
    group = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if not _CONNECTIVE.fullmatch(text, box.end, group[0].start):
            break
        group.insert(0, box)
    return ", ".join(dict.fromkeys(text[box.inside : box.end - 1].strip() for box in group))


class _Box(NamedTuple):
    start: int
    inside: int
    end: int


def _boxes(text: str) -> list[_Box]:
    r"""The places of all complete, outermost `\boxed{...}` and `\fbox{...}`, in one pass; escaped braces are text."""
    boxes: list[_Box] = []
    open_braces: list[re.Match[str]] = []
    for token in _BRACE.finditer(text):
        if token[0].endswith("{") and token[0] != "\\{":
            open_braces.append(token)
        elif token[0] == "}" and open_braces:
            opening = open_braces.pop()
            if opening[0] != "{":
                while boxes and boxes[-1].start > opening.start():
                    boxes.pop()
                boxes.append(_Box(opening.start(), opening.end(), token.end()))
    return boxes
