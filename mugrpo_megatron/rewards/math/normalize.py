"""Brings answers to one spelling: wrappers, spaces, thousands separators, mixed numbers and more."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from mugrpo_megatron.rewards.math.aligned import without_alignment
from mugrpo_megatron.rewards.math.characters import plain_characters
from mugrpo_megatron.rewards.math.unit_words import COUNTED, with_latin_units, without_parts
from mugrpo_megatron.rewards.math.units import NOT_IN_A_UNIT
from mugrpo_megatron.rewards.math.upright import has_value, italic

_NUMBER = r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
_GREEK_LETTERS = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta", "η": "eta", "θ": "theta",
    "ι": "iota", "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi", "π": "pi", "ρ": "rho", "σ": "sigma",
    "τ": "tau", "υ": "upsilon", "φ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega", "Γ": "Gamma", "Δ": "Delta",
    "Θ": "Theta", "Λ": "Lambda", "Ξ": "Xi", "Π": "Pi", "Σ": "Sigma", "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega",
}  # fmt: skip
_VARIABLE = re.compile(r"(?<![\u0370-\u03ff\u1f00-\u1fff])[\u0370-\u03ff]{1,2}(?![\u0370-\u03ff\u1f00-\u1fff])")
"""Matches one or two Greek letters, which are variables; three or more are a word."""
_ROOT = re.compile(r"(?P<sign>[√∛∜])\s*(?:\((?P<group>[^()]*)\)|(?P<plain>[0-9]+(?:\.[0-9]+)?|[A-Za-z]))")
_DEGREES_OF_ROOTS = {"√": "", "∛": "[3]", "∜": "[4]"}
_PLAIN = str.maketrans(
    {"−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "∞": "\\infty ", "°": "^\\circ ", "√": "\\sqrt ",
     "∛": "\\sqrt[3]", "∜": "\\sqrt[4]", "≤": "\\le ", "≥": "\\ge ", "≈": "\\approx ", "≠": "\\ne ", "∨": "\\lor ",
     "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∉": "\\notin ", "⊂": "\\subset ", "⊆": "\\subseteq ", "±": "\\pm ",
     "∓": "\\mp ", "→": "\\to ", "⇒": "\\Rightarrow ", "∠": "\\angle ", "△": "\\triangle ", "⌊": "\\lfloor ",
     "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ", "≡": "\\equiv ", "≅": "\\cong ", "∝": "\\propto ",
     "≪": "\\ll ",
     "≫": "\\gg ", "∧": "\\land ", "∂": "\\partial ", "∑": "\\sum ", "∏": "\\prod ", "∫": "\\int ", "⟨": "(", "⟩": ")",
     "∅": "\\emptyset ", "₹": " ", "₩": " ", "₽": " ", "¢": "\\text{ cents}", "\x00": "", "~": " "}
)  # fmt: skip
_FONT = (
    r"text|textbf|textrm|textit|texttt|textsf|textnormal|mathrm|mathbf|mathit|mathcal|mathbb|mathsf|boldsymbol|bm|mbox|hbox|"
    r"emph|underline"
)
_STYLE = rf"{_FONT}|boxed|fbox|framebox"
_BARE_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|csc|log|ln|exp"
"""Functions that may be written without a backslash. `sec` is left out, since it also means a second."""
_AND_OR = "或者?|及|以及|和|与|與|または|もしくは|および|또는|및|или"
"""Connectives of other scripts between answers."""


def _digits_alone(number: re.Match[str]) -> str:
    return number[1] + re.sub("[^0-9]", "", number[2])


_REWRITES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\?[$€£¥]|\\(?:pounds|euro|textdollar)(?![A-Za-z])|(?<!\\)\\[()\[\]]", " "),
        (r"^\s*(?:US|USD|EUR|GBP|INR|Rs\.?)\s*(?=[0-9])", ""),
        (r"\\\\(?=(?:[lg]eq?|left|right|[dt]?frac|sqrt|text|pi|boxed|cdot|times|pm|infty)(?![A-Za-z]))", r"\\"),
        (r"(?<=[0-9]),\\!\s*(?=[0-9])|(?<=[0-9])\{,\}\s*(?=[0-9])", ""),
        (r"\\!|\\(?:left|right|displaystyle|limits|bf|rm|it)(?![A-Za-z])|\\(?:big|Big|bigg|Bigg)[lr]?(?![A-Za-z])", ""),
        (r"\\(?:text)?color\s*\{[a-z]*\}|\\(?:large|Large|LARGE|huge|Huge|small|normalsize)(?![A-Za-z])", ""),
        (r"(?<!\\)\\[,;: ]|\\q?quad", " "),
        (r"\{:\}", ":"),
        (r"\\div(?![A-Za-z])", "/"),
        (r";", ","),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\\frac\s+([0-9])\s*([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
        (r"\\not\s*=", r"\\ne "),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"^\s*(?:[a-z]\s*\\in\s*)?\\mathbb\s*(?:\{\s*R\s*\}|R)\s*$", r"(-\\infty, \\infty)"),
        (r"^\s*(?:\\text\s*\{)?\s*[Aa]ll real(?: number)?s\s*\}?\s*$", r"(-\\infty, \\infty)"),
        (r"^\s*[Øø]\s*$", r"\\emptyset"),
        (
            r"(?<=[0-9)}])\s*(?:\\degrees?(?![A-Za-z])|\^\s*\{?\s*(?:\\(?:text|mathrm|rm)\s*\{?\s*)?[oO]\s*\}{0,2}(?=\s*(?:[CF]?\s*(?:\Z|,))))",
            r"^\\circ ",
        ),
        (r"(?<=[0-9)}])\s*[xX]\s*(?=10\s*\^)", r"\\times "),
        (r"(?<![0-9A-Za-z.'_])([0-9]{1,3})((?:['’][0-9]{3})+|(?:_[0-9]{3})+)(?![0-9'’_])", _digits_alone),
        (rf"(?<![\\A-Za-z])({_BARE_FUNCTIONS})(?=\s*[0-9(_^{{|\\]|\s+[a-z](?![A-Za-z]))", r"\\\1 "),
        (rf"(?<=[0-9A-Za-z)}}\]$])\s*(?:{_AND_OR})\s*(?=[0-9A-Za-z(\[\\$+-])", ","),
        (r"^\s*([0-9]+) to ([0-9]+)\s*$", r"\1:\2"),
        (r"^\s*([0-9]+) over ([0-9]+)\s*$", r"\1/\2"),
        (r"\\(sin|cos|tan)\s*\^\s*\{?\s*-\s*1\s*\}?", r"\\arc\1 "),
        (r"\\lg(?![A-Za-z])", r"\\log_{10}"),
        (r"\\lbrack(?![A-Za-z])", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (rf"(?<![0-9A-Za-z.}}\])^_])\\(?:{_FONT})\s*\{{\s*([0-9]+(?:\.[0-9]+)?)\s*\}}(?!\s*[0-9.(\[{{])", r"\1"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (rf"\\(?:{_STYLE})\s*\{{\s*\}}", " "),
        (r"\\+text\s*\{[\s,]*(?:or|and|,)[\s,]*\}|\\(?:lor|vee)(?![A-Za-z])|(?<![A-Za-z])(?:or|and)(?![a-z])", ","),
        (r"^\s*\\(?:text|textbf)\s*\{\s*(?:[Tt]he\s+)?(?:[Ff]inal\s+)?[Aa]nswer(?:\s+is)?\s*:?\s*\}", ""),
        (r"^\s*\\(?:text|textbf|mathbf|mathrm|bf)\s*\{\s*(\([A-Z]\)|[A-Z][.:)])\s*\}", r"\1 "),
        (r"\\+boxed\s*\{(?=[^{}]*$)", ""),
        (r"(?<=[0-9)}])i(?![A-Za-z])", " i"),
        (r",(?:\s*,)+", ","),
        (r"\s+", " "),
    )
)
_WHOLE = re.compile(rf"\s*\\+(?:{_STYLE})\s*(?=\{{)")
_STYLED = re.compile(rf"\\(?:{_STYLE})\s*\{{([^{{}}]*)\}}")
_WORDS = re.compile(
    r"\\(?:text|textbf|textrm|textit|mathrm|mbox)\s*\{(?P<words>[^{}0-9]*)\}(?:\^\{?-?[0-9]\}?)?(?=\s*(?:$|,|=))"
)
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?!,?[0-9])")
_THOUSANDS_AND_UNIT = re.compile(
    _THOUSANDS.pattern
    + r"(?=(?:\.[0-9]+)?\s*(?:\Z|\\?%|\^\s*\{?\s*\\circ|\\(?:text[a-z]*|math(?:rm|sf|bf)|mbox|hbox)\s*\{))"
)
REPEATING = re.compile(
    r"(?<![0-9.])([0-9]{0,20})\.([0-9]{0,20})(?:\\(?:overline|bar)\s*\{\s*([0-9]{1,20})\s*\}|\\(?:bar|dot)\s*\{?\s*([0-9])\s*\}?)"
    r"(?!\s*(?:[0-9.]|\\[ld]*dots))"
)
_SPACED_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?: [0-9]{3})+")
_MIXED = re.compile(r"([+-]?[0-9]+) ([0-9]+) ?/ ?([0-9]+)")
_SCIENTIFIC = re.compile(rf"([+-]?(?:{_NUMBER}))[eE]([+-]?[0-9]+)")
_ELLIPSIS = re.compile(r"(?<![0-9.])([0-9]+)\s*(?:\.{2,}|…)\s*\Z")
"""Matches an ellipsis after a whole number, which says that more elements follow. (After decimals it only says that
there are more decimals.)"""
_EMPHASIZED = re.compile(r"\A\s*(?P<marks>\*{1,3}|_{1,3}|`)(?P<inside>[^*_`]+)(?P=marks)\s*\Z")
"""Matches an answer that is emphasized as a whole, in Markdown."""
_QUOTED = re.compile(
    r"\A\s*(?:“([^“”]+)”|„([^„“”]+)[“”]|‘([^‘’]+)’|'([^']+)'|«([^«»]+)»|「([^「」]+)」|『([^『』]+)』|【([^【】]+)】)[\s.]*\Z"
)
"""Matches a whole answer in quotation marks or in the brackets of Chinese and Japanese."""
_DECORATION = re.compile(
    "\\A[\\s\u2600-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff]*(?:(?:[=\u21d2\u2192\u2234]"
    "|\\\\(?:therefore|Rightarrow|implies)(?![A-Za-z]))(?![=<>])\\s*)?"
    "|[\\s\u2600-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff]+\\Z"
)
"""Matches emoji around an answer, and a sign in front of it that says "therefore"."""
_ABOUT = re.compile(r"\A\s*~\s*(?=[0-9.])")
"""Matches a tilde that says "about"; between a number and its unit it is LaTeX's space."""
_ORDINAL = re.compile(
    r"(?<![0-9A-Za-z/.^_}])(?P<number>[0-9]{0,40}?(?:(?P<teen>1[0-9])|(?P<last>[0-9])))(?:\^\s*)?\{?"
    r"(?:\\(?:text[a-z]*|mathrm|mbox)\{)?(?P<ending>st|nd|rd|th)\s*\}{0,2}(?=\s*(?:\Z|,))"
)
_ORDINAL_ENDINGS = {"1": "st", "2": "nd", "3": "rd"}
_ANSWER_LABEL = re.compile(r"(?:the\s+)?(?:correct\s+)?(?:final\s+)?answer\s*(?:is\b\s*:?|:|=)\s*", re.IGNORECASE)
_SENTENCE = r"(?i:(?:[A-Za-z]+ ){0,6}(?:is|are|was|were|be|can|cannot|not|never|unknown|unclear|than|or)\b)"
_LABEL_WORDS = rf"(?!{_SENTENCE})((?:[A-Za-z]+ ){{0,6}}[A-Za-z]{{3,}}):"
_LABEL = re.compile(rf"(?:\\text[a-z]*\s*\{{\s*{_LABEL_WORDS}\s*\}}|{_LABEL_WORDS})\s*(?=[-+\\.0-9])")
"""Matches words with a colon before a number or a formula, unless they are a sentence. `Option C: 5` is not
matched, since it is a choice."""
_FRENCH_INTERVAL = re.compile(
    r"([\[\]])([^\[\](),]*[^\[\](),\s][^\[\](),]*,[^\[\](),]*[^\[\](),\s][^\[\](),]*)([\[\]])"
)
"""Matches an interval in square brackets; ISO 31-11 has `]0, 1]` beside `(0, 1]`."""
_LEADING = ' ,;:\n\t"`'
_TRAILING = _LEADING + ".。\\"


def normalize(text: str) -> str:
    """Returns an answer or a gold in one spelling, in which equal ones often have the same characters.

    LaTeX stays LaTeX; alternatives ("or", `\\lor`) become commas.
    """
    text = _DECORATION.sub("", _ABOUT.sub(r"\\sim ", plain_characters(text)))
    text = _QUOTED.sub(lambda quoted: next(filter(None, quoted.groups())), _EMPHASIZED.sub(r"\g<inside>", text))
    text = without_alignment(text)
    if not text.isascii():
        text = _VARIABLE.sub(_as_latex, _ROOT.sub(_as_root, text))
    text = _ELLIPSIS.sub(r"\1\\ldots ", text).translate(_PLAIN).rstrip(_TRAILING)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = COUNTED.sub(_in_text, with_latin_units(text))
    text = _without_label(unwrapped(text.rstrip(_TRAILING).lstrip(_LEADING))).rstrip(_TRAILING)
    text = _FRENCH_INTERVAL.sub(_as_interval, italic(_ORDINAL.sub(_as_number, text)))
    text = without_parts(REPEATING.sub(_as_fraction, _without_thousands(text)))
    while text[:1] == "{" and text[-1:] == "}" and encloses(text):
        text = text[1:-1].strip()
    if _SPACED_THOUSANDS.fullmatch(text):
        text = text.replace(" ", "")
    if mixed := _MIXED.fullmatch(text):
        return f"{mixed[1]}\\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    if scientific := _SCIENTIFIC.fullmatch(text):
        return f"{scientific[1]} \\times 10^{{{scientific[2]}}}"
    return text


def _as_latex(letters: re.Match[str]) -> str:
    """Greek letters as LaTeX commands, except the ohm sign, which `with_latin_units` needs."""
    return "".join(f"\\{_GREEK_LETTERS[c]} " if c in _GREEK_LETTERS and c != "Ω" else c for c in letters[0])


def _as_number(ordinal: re.Match[str]) -> str:
    """The number of an ordinal: 3 for `3rd` and `3^{\\text{rd}}`. Unchanged if the ending does not belong to the
    number."""
    expected = "th" if ordinal["teen"] else _ORDINAL_ENDINGS.get(ordinal["last"], "th")
    return ordinal["number"] if ordinal["ending"] == expected else ordinal[0]


def _as_interval(interval: re.Match[str]) -> str:
    """`]0, 1]` as `(0, 1]`: an end next to a reversed bracket is not in the interval."""
    opening, ends, closing = interval.groups()
    return f"{'[' if opening == '[' else '('}{ends}{']' if closing == ']' else ')'}"


def _in_text(counted: re.Match[str]) -> str:
    """A word after a number as `\\text{...}`, which can be a unit; unchanged if the word changes or denies the
    number."""
    return counted[0] if NOT_IN_A_UNIT.search(counted["word"]) else f"\\text{{{counted['word']}}}"


def _as_root(root: re.Match[str]) -> str:
    return f"\\sqrt{_DEGREES_OF_ROOTS[root['sign']]}{{{root['group'] or root['plain'] or ''}}}"


def _without_thousands(text: str) -> str:
    """Remove thousands separators: `1200` for `1,200`. In a text with brackets, only from numbers outside of them that
    have a unit behind them or end the text."""
    if not any(bracket in text for bracket in "([{"):
        return _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)

    def joined(match: re.Match[str]) -> str:
        before = text[: match.start()]
        inside = any(before.count(opening) > before.count(closing) for opening, closing in ("()", "[]", "{}"))
        return match[0] if inside else match[0].replace(",", "")

    return _THOUSANDS_AND_UNIT.sub(joined, text)


def _as_fraction(match: re.Match[str]) -> str:
    r"""A repeating decimal as a fraction: `\frac{1}{6}` for `0.1\overline{6}`."""
    fixed, repeated = match[1] + match[2], match[3] or match[4]
    value = Fraction(int(fixed + repeated) - int(fixed or "0"), 10 ** len(match[2]) * (10 ** len(repeated) - 1))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _without_label(text: str) -> str:
    r"""Remove a label that only announces the answer; make any other label (`_LABEL`) the left side of an equation.

    `The answer is 5` becomes `5`, and `\text{Total: } 5` the equation `\text{Total} = 5`.
    """
    if label := _ANSWER_LABEL.match(text):
        return unwrapped(text[label.end() :])
    if label := _LABEL.match(text):
        return f"\\text{{{label[1] or label[2]}}} = {text[label.end() :]}"
    return text


def unwrapped(text: str) -> str:
    r"""Text without style macros around the whole of it: `5` for `\text{5}` and for `\mathbf{\boxed{5}}`."""
    while (macro := _WHOLE.match(text)) and encloses(text[macro.end() :].rstrip()):
        text = text[macro.end() :].strip()[1:-1].strip()
    return text


def unstyled(text: str) -> str:
    r"""Text without any style macros: `Line 3` for `\text{Line } 3`."""
    return " ".join(_STYLED.sub(r"\1", _STYLED.sub(r"\1", text)).split())


def without_words(text: str) -> str:
    r"""Text without words in `\text{...}` at its end, before a comma, or before an equals sign.

    Words that contain a value (`has_value`) stay.
    """
    return _WORDS.sub(lambda words: words[0] if has_value(words["words"]) else " ", text).strip()


def encloses(text: str) -> bool:
    """Whether a single pair of brackets encloses the whole text."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return index > 0 and index == len(text) - 1
    return False


def split_top(text: str, separators: str) -> list[str]:
    """Split text where a separator is outside all brackets and braces; `separators` is a regular expression."""
    parts, depth, begin, index = [], 0, 0, 0
    pattern = re.compile(separators)
    while index < len(text):
        if text[index] in "([{":
            depth += 1
        elif text[index] in ")]}":
            depth -= 1
        elif depth <= 0 and (match := pattern.match(text, index)):
            parts.append(text[begin:index].strip())
            begin = index = match.end()
            continue
        index += 1
    return [*parts, text[begin:].strip()]
