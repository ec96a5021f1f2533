"""Replaces `~` by the home directory in paths of recipes and command lines."""

from __future__ import annotations

import os
import re

_HOME = re.compile(r"(?:\A|(?<=[,@\s]))~[A-Za-z0-9._-]*(?=/|\Z|,)")
_OF_OPTION = re.compile(r"(?<==)~[A-Za-z0-9._-]*(?=/|\Z|,)")


def expanded(text: str) -> str:
    """Replace `~` by the home directory in `~/x` and `~user/x`, also after a comma, `@` or a space:
    `gsm8k@~/a.jsonl,~/b.jsonl`."""
    return _HOME.sub(lambda match: os.path.expanduser(match[0]), text) if "~" in text else text


def expanded_words(words: list[str]) -> list[str]:
    """The words of a command line with `~` replaced, also in `--out=~/x`, which the shell leaves as it is.

    Values of `--set` stay as they are, since the recipe's sections know which keys are paths. So do words with a space,
    except options such as `--out=~/x y`.
    """
    overrides = {index + 1 for index, word in enumerate(words) if word == "--set"}
    return [
        word if index in overrides or word.startswith("--set=") or "~" not in word else _expanded_word(word)
        for index, word in enumerate(words)
    ]


def _expanded_word(word: str) -> str:
    word = _OF_OPTION.sub(lambda match: os.path.expanduser(match[0]), word) if word.startswith("--") else word
    return word if " " in word else expanded(word)
