"""Makes docs/recipe.md of the sections' docstrings: `python -m run_scripts.dev.recipe_reference > docs/recipe.md`."""

from __future__ import annotations

import re
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from mugrpo_megatron.recipe.objective import Section
from mugrpo_megatron.recipe.sections import Recipe

HEAD = """# Recipe reference

For everyone who writes a recipe: every key, with its default and its meaning. [Recipes](recipes.md) lists those that
come with the program, and the [glossary](glossary.md) explains the words.

A recipe is a TOML file. With `base = "other.toml"` at its top it begins with that recipe and says only what differs.
The path is relative to the file, or a bundled recipe's name. `base` may be a list, in which later recipes override
earlier ones. On the command line, `--set section.key=value` overrides one key, the value `"unset"` takes back what a
base sets, and `--dry-run` only checks.

A line has a key, its default, its type where the default does not show it, and its meaning. A key without a default
is unset. Each key has an address, such as `recipe.md#objective.veto`. `make docs` makes this page from the docstrings
in `mugrpo_megatron/recipe/`.
"""


def markdown() -> str:
    """The text of docs/recipe.md."""
    parts = [HEAD]
    for name, field in Recipe.model_fields.items():
        section: Any = field.annotation
        parts.append(_part(f"{name}.NAME", section.entry_section) if section.entry_section else _part(name, section))
        for key, inner in section.model_fields.items():
            if _is_section(inner.annotation):
                parts.append(_part(f"{name}.{key}", inner.annotation))
            elif (table := _named_table(inner.annotation)) is not None:
                parts.append(_part(f"{name}.{key}.NAME", table))
    return "\n".join(parts)


def _part(name: str, section: Any) -> str:
    lines = [
        f'- <a id="{name}.{key}"></a>`{key}`{_default(inner)}: {_type_of(inner)}{_meaning(inner)}'
        for key, inner in section.model_fields.items()
        if not _is_section(inner.annotation)
    ]
    about = re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", cleandoc(section.__doc__))
    return f"## `[{name}]`\n\n{about}\n\n" + "\n".join(lines) + "\n"


def _meaning(field: FieldInfo) -> str:
    """The description of a field in one line; pages that it names become links."""
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", " ".join((field.description or "").split()))


def _named_table(annotation: Any) -> Any:
    """The section type of a dictionary's values; None when the annotation is not a dictionary of sections."""
    inner = get_args(annotation)[1] if get_origin(annotation) is dict else None
    return inner if _is_section(inner) else None


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _type_of(field: FieldInfo) -> str:
    """The type of a field as a sentence; empty if the default shows it."""
    return "" if _default(field) and field.annotation in (int, float, bool, str) else f"{_type(field.annotation)}. "


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _type(get_args(annotation)[0])
    if _named_table(annotation) is not None:
        return "tables by name"
    if get_origin(annotation) is dict:
        return "table"
    if get_origin(annotation) is tuple:
        return "list"
    names = {int: "integer", float: "number", bool: "boolean", str: "text", Path: "path"}
    if annotation in names:
        return names[annotation]
    parts = [_type(part) for part in get_args(annotation) if part is not type(None)]
    return " or ".join(parts) or str(annotation)


def _default(field: FieldInfo) -> str:
    """The text about the default after a key; a required key says so, and unset or empty defaults have no text."""
    if field.is_required():
        return " (required)"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ({}, ()):
        return ""
    return f" = `{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(markdown(), end="")
