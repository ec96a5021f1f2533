"""Short, unique names of data sets: under them held-out figures are reported and `[eval.sets]` changes the sampling."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Set
from pathlib import Path

from mugrpo_megatron.data.arithmetic import TASKS
from mugrpo_megatron.data.files import SUFFIXES
from mugrpo_megatron.data.presets import PRESETS
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.sections import EvalSection

MEAN = "mean"
"""What stands for all sets together among a metric's names; no set is called so."""


def named_sources(sources: str) -> dict[str, str]:
    """Name -> source, in their order, of sources with commas between.

    A bundled task, a preset and `PRESET@FILE` have that name, a file its stem, a data set on the hub the last part of
    its name. A file or a set on the hub that would share its name, with another one or with a task, has its folder or
    owner before it; what still shares one has a number behind it. Only letters, digits, `-` and `_` are kept, so that a
    name can be a TOML key.
    """
    listed = [part for part in (part.strip() for part in sources.split(",")) if part]
    short = Counter([MEAN, *TASKS, *(_name(one, words=1) for one in listed)])
    named: dict[str, str] = {}
    for one in listed:
        name = _name(one, words=1 if short[_name(one, words=1)] == 1 else 2)
        taken = {*named, MEAN}
        number = next(n for n in range(1, len(listed) + 2) if _numbered(name, n) not in taken)
        named[_numbered(name, number)] = one
    return named


def held_out_sets(sources: str, key: str = "data.eval") -> dict[str, str]:
    """`named_sources` of held-out sets; UserError when one is named twice, which would count it twice."""
    named = named_sources(sources)
    for source, times in Counter(named.values()).items():
        if times > 1:
            raise UserError(f"{key} names {source} {times} times: name it once")
    return named


def check_sets(section: EvalSection, known: Set[str], key: str = "data.eval") -> None:
    """UserError when `[eval.sets]` names a set that is not `known`."""
    unknown = sorted(section.sets.keys() - known)
    if unknown:
        raise UserError(
            f"[eval.sets.{unknown[0]}] names no held-out set: those of {key} are {', '.join(sorted(known)) or 'none'}"
        )


def _name(source: str, words: int) -> str:
    """The last `words` words of what a source is called; a task or preset has one."""
    preset, at, file = source.partition("@")
    if source in TASKS or source in PRESETS:
        telling = [source]
    elif at and preset in PRESETS:
        telling = [Path(file).stem, preset]
    elif Path(source).suffix in SUFFIXES:
        telling = [Path(source).parent.name, Path(source).stem]
    else:
        telling = source.partition(":")[0].split("/")[:2]
    return "-".join(re.sub(r"[^A-Za-z0-9_-]+", "-", word).strip("-") for word in telling[-words:] if word) or "set"


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"
