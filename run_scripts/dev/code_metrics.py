"""Prints figures of the code, and fails if a contract is broken: `python -m run_scripts.dev.code_metrics`.

The figures have no bounds: lines, files, imports, recipe keys, words, and through how many functions `run` is passed
on. The contracts are in run_scripts/dev/contracts.py. `make check` runs this script.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from run_scripts.dev.contracts import broken
from run_scripts.dev.modules import PACKAGE, ROOT, Module, docstrings, imported, is_name, module_of, product, walk

WALKS = (("train", "optimize_stage", "run"), ("train", "generate_stage", "run"))
"""(module, function, parameter): the functions through which the parameter is passed on are counted."""
MAIN_PATH = (
    *("train", "samples", "phases.stage", "phases.batches", "phases.generate", "run.run", "learner.update"),
    *("learner.loss", "kernels.fused_loss", "algorithm.policy_loss", "weights.sync", "weights.buckets", "stages.store"),
)
"""Modules in which a reader follows a response from the engine to the gradient."""
QUESTION = re.compile(r"(What|Why|How|Where|Which)\b")
DIALECT = re.compile(r"\b(that of|those of|but for|is of|of which)\b")
"""Matches turns of phrase that plain English would replace by a subject, a verb and an object."""


def shipped_keys() -> set[str]:
    """The recipe keys that a TOML file in run_scripts or an objective's preset sets."""
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
    """Number of parameters annotated `Recipe`: their functions take the whole recipe instead of a section."""
    functions = (
        node
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    arguments = (a for node in functions for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
    return sum(argument.annotation is not None and is_name(argument.annotation, "Recipe") for argument in arguments)


def bindings(modules: Iterable[Module], name: str) -> int:
    """Number of assignments to local variables with this name."""
    return sum(
        is_name(node, name) and isinstance(node.ctx, ast.Store)
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Name)
    )


def lines_of(folder: str, *patterns: str) -> int:
    """Number of lines of the files below a folder whose names match one of the patterns."""
    paths = (path for pattern in patterns for path in (ROOT / folder).rglob(pattern))
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def figures(modules: Mapping[str, Module]) -> dict[str, float]:
    """Name -> figure, for all figures of the code."""
    from mugrpo_megatron.recipe.load import dotted_keys

    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for name, _ in imported(module.tree):
            other = module_of(name, modules)
            if other and other != module.name:
                importers[other].add(module.name)
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
        "lines of the longest file": max(module.lines for module in modules.values()),
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
        "recipe keys": len(recipe),
        "recipe keys that nothing shipped sets": len(recipe - shipped_keys()),
        **{name: len(way) for name, way in ways.items()},
        "lines of train.py": train.lines,
        "imports of train.py": sum(isinstance(node, (ast.Import, ast.ImportFrom)) for node in train.tree.body),
        "header lines, per cent": round(100 * sum(module.header for module in modules.values()) / lines, 1),
    }


def main() -> int:
    """Print the figures, and what breaks a contract; returns 1 if something does."""
    modules = product()
    for name, value in figures(modules).items():
        print(f"{name:48}{value:>10,}")
    lines = broken(modules)
    for line in lines:
        print(f"{line} (run_scripts/dev/contracts.py)", file=sys.stderr)
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
