"""Fields of a config that SGLang's model and rope code read; `python -m tests.weights.engine_fields` writes the table.

The source of the installed package is parsed, never run. From a family's class, every class and function of SGLang's
models, config and rope modules that its body names is followed. `--sglang DIR` parses another version.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mugrpo_megatron.weights.config import CLASSES, FIELDS_OF_ENGINES
from mugrpo_megatron.weights.families import FAMILIES

CONFIGS = {"config", "hf_config", "hf_text_config", "text_config"}
"""Names by which SGLang holds a model's config."""
ROPES = {"rope_scaling", "rope_parameters", "rope_params", "rs"}
"""Names by which it holds the dictionary of rope scaling."""
FOLLOWED = ("srt.models.", "srt.configs.model_config", "srt.utils.hf_transformers", "srt.layers.rotary_embedding")
"""Modules whose definitions are followed from a family's class."""
PICTURES = ("srt.layers.rotary_embedding.mrope_rope_index", "srt.layers.rotary_embedding.triton_kernels")
ELSEWHERE = ("models", "multimodal", "speculative", "lora", "disaggregation", "entrypoints", "hardware_backend")
"""Folders of `srt` that are not read as a whole: other models, pictures, drafts, adapters, servers."""
REPLACED = {"qwen3": {"Qwen2DecoderLayer"}, "qwen3_moe": {"Qwen2MoeDecoderLayer"}}
"""Layers of a base class, in whose place the family's class passes its own."""
NO_FIELDS = {"__class__", "get", "items", "keys", "to_dict", "update", "get_text_config"}


@dataclass(frozen=True)
class Source:
    """The parsed source of SGLang below `root`, the folder of the package."""

    root: Path
    _trees: dict[str, ast.Module | None] = field(default_factory=dict)
    _names: dict[str, dict[str, ast.stmt | tuple[str, str]]] = field(default_factory=dict)

    def tree(self, module: str) -> ast.Module | None:
        """A module below the package, such as "srt.models.llama"; None if there is none."""
        if module not in self._trees:
            path = self.root.joinpath(*module.split("."))
            file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
            self._trees[module] = ast.parse(file.read_bytes()) if file.is_file() else None
        return self._trees[module]

    @cached_property
    def classes(self) -> dict[str, str]:
        """Class that a model's module defines at its top -> the module."""
        found: dict[str, str] = {}
        for path in sorted((self.root / "srt" / "models").glob("*.py")):
            module = f"srt.models.{path.stem}"
            tree = self.tree(module)
            found |= {node.name: module for node in (tree.body if tree else []) if isinstance(node, ast.ClassDef)}
        return found

    def names(self, module: str) -> dict[str, ast.stmt | tuple[str, str]]:
        """What a module's names are: a definition at its top, or (module, name) of an import."""
        if module not in self._names:
            found: dict[str, ast.stmt | tuple[str, str]] = {}
            tree = self.tree(module) or ast.Module([], [])
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
                    origin = str(node.module).removeprefix("sglang.")
                    found |= {alias.asname or alias.name: (origin, alias.name) for alias in node.names}
            for statement in tree.body:
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement]
                for target in targets:
                    if name := getattr(target, "id", getattr(target, "name", "")):
                        found[name] = statement
            self._names[module] = found
        return self._names[module]

    def definition(self, module: str, name: str, steps: int = 6) -> tuple[str, str, ast.stmt] | None:
        """Module, name and node of what a module calls `name`, through `steps` imports at most."""
        found = self.names(module).get(name)
        if isinstance(found, tuple):
            return self.definition(*found, steps - 1) if steps else None
        return (module, name, found) if found else None

    def reached(self, class_name: str, without: set[str]) -> dict[tuple[str, str], ast.stmt]:
        """(module, name) -> definition, of a class and all that its body names."""
        found: dict[tuple[str, str], ast.stmt] = {}
        waiting = [(self.classes[class_name], class_name)]
        while waiting:
            defined = self.definition(*waiting.pop())
            if defined is None or defined[:2] in found:
                continue
            module, name, node = defined
            if not module.startswith(FOLLOWED) or module in PICTURES or name in without:
                continue
            found[module, name] = node
            used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
            waiting += [(module, other) for other in sorted(used)]
        return found


def is_named(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression is one of the names, an attribute of that name, or `(name or {})`."""
    if isinstance(node, ast.BoolOp):
        return is_named(node.values[0], names)
    return getattr(node, "id", None) in names or getattr(node, "attr", None) in names


def literal(node: ast.AST) -> list[Any]:
    """The value of a constant expression, in a list; an empty list for any other expression."""
    try:
        return [ast.literal_eval(node)]
    except ValueError:
        return []


def looped_strings(node: ast.AST, name: str, module: ast.Module | None) -> list[str]:
    """What a loop over a list of strings, here or at the module's top, puts into the variable `name`."""
    for part in ast.walk(node):
        if isinstance(part, ast.For) and isinstance(part.target, ast.Name) and part.target.id == name:
            scopes = [node, *([module] if module else [])]
            assigned = [
                item.value
                for scope in scopes
                for item in ast.walk(scope)
                if isinstance(item, ast.Assign) and is_named(item.targets[0], {getattr(part.iter, "id", "")})
            ]
            return [text for value in [part.iter, *assigned] for texts in literal(value) for text in texts]
    return []


def fields_read(node: ast.AST, names: set[str], module: ast.Module | None = None) -> Iterator[tuple[str, list[Any]]]:
    """Yields (field, [default]) for every read of a config's field; an empty list where no constant stands in."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load) and is_named(part.value, names):
            yield part.attr, []
        if not isinstance(part, ast.Call):
            continue
        function, arguments = part.func, part.args
        if getattr(function, "id", "") in ("getattr", "hasattr", "_hf_attr") and is_named(arguments[0], names):
            default = literal(arguments[2]) if len(arguments) > 2 else []
            if isinstance(arguments[1], ast.Constant):
                yield str(arguments[1].value), default
            else:
                for name in looped_strings(node, getattr(arguments[1], "id", ""), module):
                    yield name, default
        if getattr(function, "attr", "") == "get" and is_named(getattr(function, "value", function), names):
            for text in literal(arguments[0]):
                yield text, literal(arguments[1]) if len(arguments) > 1 else [None]


def keys_read(node: ast.AST) -> Iterator[tuple[str, list[Any]]]:
    """Yields (key, [default]) for every read of rope scaling's dictionary, as `fields_read` does."""
    for part in ast.walk(node):
        if isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Load) and is_named(part.value, ROPES):
            yield from ((text, []) for text in literal(part.slice))
        if isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.In):
            if is_named(part.comparators[0], ROPES):  # "key" in rope_scaling
                yield from ((text, []) for text in literal(part.left))
            elif getattr(part.left, "id", "") == "k" and isinstance(part.comparators[0], ast.Tuple):
                # {k: v for k, v in rope_scaling.items() if k in ("key", ...)}
                yield from ((text, []) for texts in literal(part.comparators[0]) for text in texts)
        if isinstance(part, ast.Call):
            name, first = getattr(part.func, "id", ""), part.args[0] if part.args else part
            if name == "_get_rope_param" and is_named(first, ROPES):
                yield from ((text, literal(part.args[2])) for text in literal(part.args[1]))
            if getattr(part.func, "attr", "") == "get" and is_named(getattr(part.func, "value", part), ROPES):
                yield from ((text, literal(part.args[1]) if len(part.args) > 1 else [None]) for text in literal(first))


def branches(node: ast.AST) -> Iterator[tuple[str, ast.If]]:
    """Yields (kind, branch) for `if scaling_type == "kind"`, elif included."""
    for part in ast.walk(node):
        if (
            isinstance(part, ast.If)
            and isinstance(part.test, ast.Compare)
            and is_named(part.test.left, {"scaling_type"})
        ):
            yield from ((kind, part) for kind in literal(part.test.comparators[0]))


def merged(reads: Iterator[tuple[str, list[Any]]]) -> dict[str, list[Any]]:
    """Field -> its defaults, without repetition."""
    found: dict[str, list[Any]] = {}
    for name, default in reads:
        if name not in NO_FIELDS:
            kept = found.setdefault(name, [])
            kept += [value for value in default if value not in kept]
    return dict(sorted(found.items()))


def table(root: Path) -> dict[str, dict[str, list[Any]]]:
    """`{"every model": ..., family: ..., "rope": {kind: ...}, "rope of FAMILY": ...}`, each field -> defaults."""
    source, result = Source(root), {}
    everywhere = [
        path
        for path in sorted((root / "srt").rglob("*.py"))
        if path.relative_to(root / "srt").parts[0] not in ELSEWHERE
        and ("configs" not in path.parts or path.stem == "model_config")
        and path.stem != "mrope_rope_index"
    ]
    texts = [text for path in everywhere if b"hf_config" in (text := path.read_bytes()) or b"text_config" in text]
    trees = [ast.parse(text) for text in texts]
    result["every model"] = merged(read for tree in trees for read in fields_read(tree, CONFIGS - {"config"}, tree))
    for family in sorted(set(FAMILIES) - set(CLASSES)):
        class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
        if class_name not in source.classes:
            continue
        reached = source.reached(class_name, REPLACED.get(family, set())).items()
        result[family] = merged(
            read for (module, _), node in reached for read in fields_read(node, CONFIGS, source.tree(module))
        )
        result[f"rope of {family}"] = merged(
            read
            for (module, name), node in reached
            if name not in ("get_rope", "get_rope_cpu")
            for read in keys_read(node)
        )
    get_rope = source.definition("srt.layers.rotary_embedding.factory", "get_rope")
    assert get_rope, "SGLang's get_rope has moved"
    for kind, branch in branches(get_rope[2]):
        body = ast.Module([*branch.body], [])
        result[f"rope {kind}"] = merged(keys_read(body))
    return result


def installed() -> Path:
    """The folder of the installed package."""
    package = find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the fields that a version of SGLang reads into the table.")
    parser.add_argument("--sglang", type=Path, help="folder of an unpacked wheel; the installed package by default")
    unpacked = parser.parse_args().sglang
    name = next(unpacked.glob("sglang-*.dist-info")).name.split("-")[1].removesuffix(".dist") if unpacked else ""
    written = json.loads(FIELDS_OF_ENGINES.read_text(encoding="utf-8")) if FIELDS_OF_ENGINES.exists() else {}
    written[name or version("sglang")] = table(unpacked / "sglang" if unpacked else installed())
    lines = [
        f"{json.dumps(release)}: {{\n"
        + ",\n".join(f"{json.dumps(part)}: {json.dumps(fields)}" for part, fields in parts.items())
        + "\n}"
        for release, parts in sorted(written.items())
    ]
    FIELDS_OF_ENGINES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
