"""The code's figures: banned names are found wherever a reader meets them, and a bound is broken on its worse side."""

from __future__ import annotations

from run_scripts.code_metrics import GOALS, HELD, HELD_FROM_BELOW, banned_names, failures
from run_scripts.modules import ROOT, Module, walk

TEXT = '''
"""A guest's columns."""
from x import y as anchor_of

reference_logprobs = "a guest"  # guest


def f(AnchorPolicy):
    """Anchored: not a word of the list."""
    return y.guests
'''


def module(name: str, text: str) -> Module:
    return Module(name, ROOT / f"{name}.py", text)


def test_banned_words_are_found_in_identifiers_and_docstrings_and_not_in_other_text() -> None:
    found = [line.partition(" is banned")[0] for line in banned_names([module("m", TEXT)])]
    assert sorted(found) == [
        "m.py:10: `guest`",
        "m.py:2: `guest`",
        "m.py:3: `anchor`",
        "m.py:5: `reference_logprobs`",
        "m.py:8: `anchor`",
    ]


def test_a_bound_is_broken_above_or_below() -> None:
    values = {**dict.fromkeys(GOALS, 0.0), **HELD, **HELD_FROM_BELOW}
    worse = {name: value + 1 for name, value in HELD.items()} | dict.fromkeys(HELD_FROM_BELOW, 0.0)
    assert [line for line in failures(values) if "held" in line] == []
    assert len([line for line in failures(values | worse) if "held" in line]) == len(HELD) + len(HELD_FROM_BELOW)


def test_a_walk_follows_arguments_methods_and_imports() -> None:
    first = "from mugrpo_megatron.b import g, Run\n\n\ndef f(run: Run):\n    g(1, run)\n    run.h()\n    g(2)\n"
    second = "class Run:\n    def h(self):\n        self.k()\n    def k(self): ...\n\n\ndef g(n, other): ...\n"
    modules = {name: module(name, text) for name, text in (("mugrpo_megatron.a", first), ("mugrpo_megatron.b", second))}
    assert [label.partition(":")[2] for label in walk(modules, "a", "f", "run")] == ["f", "g", "h", "k"]
