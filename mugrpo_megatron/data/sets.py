"""Short, unique names of data sets: held-out figures carry them, and they are the keys of `[eval.sets]`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Set
from pathlib import Path

from mugrpo_megatron.data.arithmetic import TASKS
from mugrpo_megatron.data.files import SUFFIXES
from mugrpo_megatron.data.presets import PRESETS
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.scoring import MEAN, EvalSection


def named_sources(sources: str) -> dict[str, str]:
    """Split comma-separated sources: name -> source, in their order.

    A bundled task and a preset keep their name, also in `PRESET@FILE`; a file gets its stem, a data set of the hub the
    last part of its name. When a file or a hub set would share its name with another source or a task, its folder or
    owner goes in front; names that are still equal get a number. Only letters, digits, `-` and `_` are kept, so that a
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
    """`named_sources` of held-out sets; UserError when one is named twice, as it would count twice."""
    named = named_sources(sources)
    for source, times in Counter(named.values()).items():
        if times > 1:
            raise UserError(f"{key} names {source} {times} times: name it once")
    files: dict[tuple[int, int], str] = {}
    for source in named.values():
        path = Path(source.rpartition("@")[2])
        if path.is_file():
            found = path.stat()
            other = files.setdefault((found.st_dev, found.st_ino), source)
            if other != source:
                raise UserError(f"{key} names one file as {other} and as {source}: name it once")
    return named


def check_sets(section: EvalSection, known: Set[str], key: str = "data.eval") -> None:
    """UserError when `[eval.sets]` names a set that is not `known`."""
    unknown = sorted(section.sets.keys() - known)
    if unknown:
        raise UserError(
            f"[eval.sets.{unknown[0]}] names no held-out set: those in {key} are {', '.join(sorted(known)) or 'none'}"
        )


def _name(source: str, words: int) -> str:
    """A source's name, made of its last `words` words; a task or preset has one."""
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
