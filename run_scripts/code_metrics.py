"""Counts the size of the code: files, lines, imports, recipe keys, words, and how far `run` is carried.

    python -m run_scripts.code_metrics            # every figure beside its goal
    python -m run_scripts.code_metrics --check    # fails where a figure is worse than its bound, or a name is banned

`make check` runs it with --check. A bound is tightened whenever a figure improves; a commit that loosens one says why.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from run_scripts.modules import PACKAGE, ROOT, Module, imported, is_name, module_of, product, walk

WALKS = (("train", "optimize_stage", "run"), ("train", "generate_stage", "run"))
"""(module, function, parameter) whose way through the calls is counted."""
MAIN_PATH = (
    *("train", "samples", "phases.stage", "phases.batches", "phases.generate", "run.run", "learner.update"),
    *("learner.loss", "kernels.fused_loss", "algorithm.policy_loss", "weights.sync", "weights.buckets", "stages.store"),
)
"""Where a reader follows a response from the engine to the gradient."""

HELD = {
    "core files": 202,
    "parameters of type Recipe": 86,
    "class names defined twice": 0,
    "locals called one": 5,
    "docstrings that begin with a question word": 0,
    "turns of dialect in docstrings": 13,
    "recipe keys": 141,
    "recipe keys that nothing shipped sets": 36,
    "modules with one importer": 44,
    "basenames that occur twice": 4,
    "circles of rooms": 0,
}
"""Figures that may only fall. The suite holds its own CPU seconds (tests/conftest.py)."""

HELD_FROM_BELOW = {"comments per 100 lines, main path": 4.1}
"""Figures that may only rise."""

GOALS = {
    "product lines (core, extras, convert)": 41_000,
    "core lines": 31_000,
    "core files": 190,
    "lines of extras": 9_000,
    "lines of run_scripts": 4_500,
    "lines of tests": 35_000,
    "parameters of type Recipe": 90,
    "class names defined twice": 5,
    "locals called one": 80,
    "docstrings that begin with a question word": 0,
    "turns of dialect in docstrings": 20,
    "comments per 100 lines, main path": 4,
    "modules with one importer": 45,
    "basenames that occur twice": 6,
    "circles of rooms": 0,
    "recipe keys": 135,
    "recipe keys that nothing shipped sets": 30,
    "functions that run enters below optimize_stage": 25,
    "functions that run enters below generate_stage": 15,
    "lines of train.py": 70,
    "imports of train.py": 10,
    "header lines, per cent": 9,
}
"""What each figure should be at most; those of `HELD_FROM_BELOW` at least."""

MISSED = {
    "product lines (core, extras, convert)": "promises take them; guards and refusals added 1,400, an endpoint 700",
    "core lines": "the same",
    "core files": "a run's identity, inputs and initial model became modules of their own",
    "lines of extras": "the doctor, the comparison of runs and the later policy came from the core",
    "lines of tests": "they hold each promise of docs/faults.md and SECURITY.md",
    "turns of dialect in docstrings": "the pronoun is right in about half of them",
    "comments per 100 lines, main path": "reasons stand where a line surprises",
    "recipe keys": "learner.flash_attention is a way around a broken library; ess_power, pass_rate, prefix_signs came",
    "recipe keys that nothing shipped sets": "the study's grids set five elsewhere; ess_power, pass_rate, prefix_signs",
    "header lines, per cent": "imports are one a line",
}
"""Why a figure misses its goal."""

BANNED = {
    "guest": "auxiliary model",
    "anchor": "ref",
    "reference_logprobs": "proximal_logprobs",
    "anchor_logprobs": "ref_logprobs",
    "kept_ids": "support_ids",
    "seat": "engine role",
    "bond": "peer failure",
    "door": "compatibility module",
    "sick": "health warning",
    "told": "reported, or text_columns",
    "taker": "sink",
    "workshop": "context",
    "own_terms": "user_*",
    "own_metrics": "user_metrics",
    "host_ahead": "prelaunched_host",
}
"""Words that no identifier and no docstring of the product may have, each with the field's word for it."""
QUESTION = re.compile(r"(What|Why|How|Where|Which)\b")
DIALECT = re.compile(r"\b(that of|those of|but for|is of|of which)\b")
"""Turns of phrase for which plain English has subject, verb and object."""


def circles(arrows: Mapping[str, set[str]]) -> int:
    """Number of sets of rooms that import one another, directly or through others."""

    def reach(room: str) -> set[str]:
        reached: set[str] = set()
        rooms = [room]
        while rooms:
            for other in arrows.get(rooms.pop(), set()) - reached:
                reached.add(other)
                rooms.append(other)
        return reached

    reachable = {room: reach(room) for room in arrows}
    groups = {frozenset(o for o in reachable[room] if room in reachable.get(o, ())) for room in arrows}
    return len(groups - {frozenset()})


def shipped_keys() -> set[str]:
    """The keys that a TOML file of run_scripts or a named objective sets."""
    from mugrpo_megatron.recipe.objective import PRESETS

    names = {f"objective.{key}" for preset in PRESETS.values() for key in preset}

    def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in table.items():
            yield f"{prefix}{name}"
            if isinstance(value, dict):
                yield from leaves(value, f"{prefix}{name}.")

    for path in (ROOT / "run_scripts").rglob("*.toml"):
        names |= set(leaves(tomllib.loads(path.read_text(encoding="utf-8"))))
    return names


def recipe_parameters(modules: Iterable[Module]) -> int:
    """Number of parameters annotated `Recipe`: functions that take all of it instead of a section."""
    functions = (
        node
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    arguments = (a for node in functions for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
    return sum(argument.annotation is not None and is_name(argument.annotation, "Recipe") for argument in arguments)


def bindings(modules: Iterable[Module], name: str) -> int:
    """Number of assignments to a local name."""
    return sum(
        is_name(node, name) and isinstance(node.ctx, ast.Store)
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Name)
    )


def banned_names(modules: Iterable[Module]) -> Iterator[str]:
    """`file:line: word ...` of every identifier and docstring that has a word of `BANNED`."""
    for module in modules:
        for line, text in names_and_docstrings(module.tree):
            words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", text)
            forms = {word.lower() for word in words} | {word.lower().removesuffix("s") for word in words}
            for word, better in BANNED.items():
                if word in forms or ("_" in word and word in text):
                    yield f"{module.path.relative_to(ROOT)}:{line}: `{word}` is banned; the field says `{better}`"


def names_and_docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every identifier and of every string that is a statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname
    yield from docstrings(tree)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that is a statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def lines_of(folder: str, *patterns: str) -> int:
    """Lines of the files below a folder whose names match one of the patterns."""
    paths = (path for pattern in patterns for path in (ROOT / folder).rglob(pattern))
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def figures(modules: Mapping[str, Module]) -> dict[str, float]:
    """Every figure of `GOALS`."""
    from mugrpo_megatron.recipe.load import dotted_keys

    importers: dict[str, set[str]] = defaultdict(set)
    arrows: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for name, _ in imported(module.tree):
            other = module_of(name, modules)
            if other and other != module.name:
                importers[other].add(module.name)
                rooms = module.room, modules[other].room
                if rooms[0] != rooms[1] and rooms[0] not in (PACKAGE, "checkpoints_convert"):
                    arrows[rooms[0]].add(rooms[1])
    core = [module for module in modules.values() if not module.is_extra]
    files = [module for module in modules.values() if not module.path.name.startswith("__")]
    names = Counter(module.path.name for module in files)
    classes = Counter(
        node.name for module in modules.values() for node in module.tree.body if isinstance(node, ast.ClassDef)
    )
    lines = sum(module.lines for module in modules.values())
    texts = [text for module in modules.values() for _, text in docstrings(module.tree)]
    path = [modules[name] for name in (f"{PACKAGE}.{name}" for name in MAIN_PATH) if name in modules]
    train = modules[f"{PACKAGE}.train"]
    ways = {
        f"functions that {what} enters below {name}": walk(modules, module, name, what) for module, name, what in WALKS
    }
    recipe = set(dotted_keys())
    return {
        "product lines (core, extras, convert)": lines,
        "core lines": sum(module.lines for module in core),
        "core files": len(core),
        "lines of extras": sum(module.lines for module in modules.values() if module.is_extra),
        "lines of run_scripts": lines_of("run_scripts", "*.py", "*.sh"),
        "lines of tests": lines_of("tests", "*.py"),
        "parameters of type Recipe": recipe_parameters(modules.values()),
        "class names defined twice": sum(count > 1 for count in classes.values()),
        "locals called one": bindings(modules.values(), "one"),
        "docstrings that begin with a question word": sum(bool(QUESTION.match(text)) for text in texts),
        "turns of dialect in docstrings": sum(len(DIALECT.findall(text)) for text in texts),
        "comments per 100 lines, main path": round(
            100 * sum(module.comments for module in path) / sum(module.lines for module in path), 1
        ),
        "modules with one importer": sum(len(importers[module.name]) == 1 for module in files),
        "basenames that occur twice": sum(count > 1 for count in names.values()),
        "circles of rooms": circles(arrows),
        "recipe keys": len(recipe),
        "recipe keys that nothing shipped sets": len(recipe - shipped_keys()),
        **{name: len(way) for name, way in ways.items()},
        "lines of train.py": train.lines,
        "imports of train.py": sum(isinstance(node, (ast.Import, ast.ImportFrom)) for node in train.tree.body),
        "header lines, per cent": round(100 * sum(module.header for module in modules.values()) / lines, 1),
    }


def failures(values: Mapping[str, float]) -> list[str]:
    """A sentence for every bound of `HELD` or `HELD_FROM_BELOW` that is broken, and for every miss without a reason."""
    found = [f"{name}: {values[name]}, held at most {bound}" for name, bound in HELD.items() if values[name] > bound]
    found += [
        f"{name}: {values[name]}, held at least {bound}"
        for name, bound in HELD_FROM_BELOW.items()
        if values[name] < bound
    ]
    return found + [
        f"{name}: {values[name]} misses its goal {GOALS[name]}, and MISSED has no reason"
        for name in GOALS
        if misses(name, values[name]) and name not in MISSED
    ]


def misses(name: str, value: float) -> bool:
    """Whether a figure misses its goal."""
    return value < GOALS[name] if name in HELD_FROM_BELOW else value > GOALS[name]


def main(arguments: list[str]) -> int:
    """Print the figures; 1 where --check finds a broken bound or a banned name."""
    modules = product()
    values = figures(modules)
    if "--check" in arguments:
        broken = [*failures(values), *banned_names(modules.values())]
        for line in broken:
            print(f"{line} (run_scripts/code_metrics.py)", file=sys.stderr)
        return bool(broken)
    for name, goal in GOALS.items():
        bound = "at least" if name in HELD_FROM_BELOW else "at most"
        reason = f"   {MISSED.get(name, 'missed')}" if misses(name, values[name]) else ""
        print(f"{name:48}{values[name]:>10,}   goal {bound} {goal:,}{reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
