"""Writes inequalities as intervals, so that `x \\ge 2` answers `[2, \\infty)` and the other way round."""

from __future__ import annotations

import re

from mugrpo_megatron.rewards.normalize import encloses, split_top

_ORDER = r"\s*(<=|>=|<|>|\\(?:le|ge|lt|gt)q?(?:slant)?(?![A-Za-z]))\s*"
_CHAIN = re.compile(rf"([^<>]+?){_ORDER}([A-Za-z]){_ORDER}([^<>]+)")
_ONE_SIDED = re.compile(rf"([A-Za-z]){_ORDER}([^<>]+)|([^<>A-Za-z]+(?:\\[A-Za-z]+[^<>A-Za-z]*)*){_ORDER}([A-Za-z])")
_ABSOLUTE = re.compile(r"(?:\||\\vert ?)([A-Za-z])(?:\||\\vert ?)\s*(<=?|\\(?:le|lt)q?(?![A-Za-z]))\s*([^<>]+)")
_SET_OF = re.compile(
    r"\\\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*)?(?:\\mid(?![A-Za-z])|\\vert(?![A-Za-z])|[|:])\s*(.+?)\s*\\\}"
)
_MEMBER = re.compile(r"[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_UNION = re.compile(r"\\cup(?![A-Za-z])")


def as_interval(text: str) -> str:
    """The interval, or union of intervals, that inequalities of one unknown describe; other text as it is."""
    if described := _SET_OF.fullmatch(text):
        text = described[2]
    parts = [_interval(part) for part in split_top(text, ",")]
    return " \\cup ".join(sorted(part for part in parts if part)) if all(parts) else text


def is_interval(text: str) -> bool:
    """Whether text is an interval or a union of intervals: brackets around two ends."""
    parts = split_top(text, _UNION.pattern)
    return all(part[:1] in "([" and part[-1:] in ")]" and encloses(part) and part.count(",") == 1 for part in parts)


def is_range(text: str) -> bool:
    r"""Whether text is an inequality, or an interval that is no point: `[0, 1)`, `(-\infty, 2]`."""
    if not is_interval(text):
        return is_interval(as_interval(text))
    return text[0] + text[-1] in ("[)", "(]") or "\\infty" in text


def without_membership(text: str) -> str:
    r"""`x \in S` as `S`."""
    return _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text


def union_parts(text: str) -> list[str]:
    """The parts of a union."""
    return split_top(text, _UNION.pattern)


def _interval(part: str) -> str:
    if absolute := _ABSOLUTE.fullmatch(part):
        _, sign, bound = absolute.groups()
        return _between(f"-({bound})", sign, bound, sign)
    if chain := _CHAIN.fullmatch(part):
        low, first, _, second, high = chain.groups()
        if _is_less(first) and _is_less(second):
            return _between(low, first, high, second)
        if not _is_less(first) and not _is_less(second):
            return _between(high, second, low, first)
    elif one := _ONE_SIDED.fullmatch(part):
        name, after, bound, other_bound, before, _ = one.groups()
        above = not _is_less(after) if name else _is_less(before)
        end, sign = (bound, after) if name else (other_bound, before)
        return _between(end, sign, "\\infty", "<") if above else _between("-\\infty", "<", end, sign)
    return ""


def _is_less(sign: str) -> bool:
    return sign[0] == "<" or sign.startswith("\\l")


def _between(low: str, first: str, high: str, second: str) -> str:
    opening, closing = "(["["e" in first or "=" in first], ")]"["e" in second or "=" in second]
    return f"{opening}{low.strip()}, {high.strip()}{closing}"
