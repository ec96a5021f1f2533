"""Loads a recipe from TOML files and `--set` overrides, validates it, and writes it back as TOML."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import date, time
from functools import reduce
from itertools import accumulate, takewhile
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.objective import Section
from mugrpo_megatron.recipe.other_trainers import translate_key
from mugrpo_megatron.recipe.sections import Recipe

MAX_VALUE_CHARS = 60
"""Characters of a wrong value that a message shows."""
MAX_LISTED_KEYS = 12
"""Keys of a section that a message lists; a recipe of an earlier version may have ten wrong ones."""


def sentence(error: ErrorDetails) -> str:
    """What is wrong with a value; for an unknown key also the nearest one, and what another trainer's is here."""
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"`{place}` is not a recipe key; {_meant(error['loc'], error['input'])}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "literal_error":
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        if close := difflib.get_close_matches(str(error["input"]), choices, n=1):
            message = f"did you mean `{close[0]}`? {message}"
    value = "" if isinstance(error["input"], dict) else f" = {short_repr(error['input'])}"
    return f"`{place}`{value}: {message}" if place else message


def short_repr(value: Any) -> str:
    """The value as text of a readable length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of more than 4,300 digits
        return f"a huge {type(value).__name__}"
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."


def _meant(loc: tuple[int | str, ...], value: Any) -> str:
    """The keys that an unknown one may stand for."""
    *sections, key = map(str, loc)
    known = _known_keys(loc[:-1])
    close = difflib.get_close_matches(key, known, n=1)
    near = f"did you mean `{'.'.join([*sections, *close])}`?" if close else ""
    other = translate_key(".".join([*sections, key]), value) or _elsewhere(key)
    if near or other:
        return " ".join(filter(None, (near, other)))
    if sections and len(known) > MAX_LISTED_KEYS:
        return f"docs/recipe.md lists the {len(known)} keys of [{'.'.join(sections)}]"
    return f"known keys: {', '.join(sorted(known))}"


def _elsewhere(key: str) -> str:
    """A sentence on the sections that have a key of this name; empty without any."""
    homes = [name for name in Recipe.model_fields if key in _known_keys((name,))]
    return f"it belongs into a section: {' or '.join(f'`{name}.{key}`' for name in homes)}" if homes else ""


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Recipe
    parts = iter(loc)
    for part in parts:
        if issubclass(model, Section) and model.named:
            model = model.named
            continue
        annotation = model.model_fields[str(part)].annotation
        if get_origin(annotation) is dict:  # tables whose names the user chooses
            next(parts)
            annotation = get_args(annotation)[1]
        assert isinstance(annotation, type)
        model = annotation
    return list(model.model_fields)


Table = dict[str, Any]


class Layer(NamedTuple):
    """One file of a recipe, or one `--set`."""

    name: str
    """As a message calls it."""
    table: Table
    """Its own keys alone."""


def layered(base: Table, top: Table) -> Table:
    """The tables of `base` below those of `top`.

    Another objective in `top` takes its preset whole, and its reward functions replace the one of `base`.
    """
    section = top.get("objective")
    below = for_objective(base, section.get("name") if isinstance(section, dict) else None)
    return merged(for_rewards(below, top.get("reward")), top)


def for_objective(table: Table, name: object) -> Table:
    """`table`, its `[objective]` empty if it names another one: a clip range of mu-GRPO is not one of GRPO."""
    section = table.get("objective")
    if name is None or not isinstance(section, dict) or section.get("name", name) == name:
        return table
    return {**table, "objective": {}}


def for_rewards(table: Table, top: object) -> Table:
    """`table` without what a higher `[reward]`'s `function` or `functions` replace: one excludes the other."""
    section = table.get("reward")
    if not isinstance(section, dict) or not isinstance(top, dict):
        return table
    one, several = bool(top.get("function")), bool(top.get("functions"))
    gone = {"function"} if several and not one else {"functions"} if one and not several else set()
    return {**table, "reward": {key: value for key, value in section.items() if key not in gone}}


def merged(base: Table, top: Table) -> Table:
    """The keys of both, table by table; where both have one, that of `top`."""
    both = dict(base)
    for key, value in top.items():
        both_tables = isinstance(value, dict) and isinstance(base.get(key), dict)
        both[key] = merged(base[key], value) if both_tables else value
    return both


def layer_of_mistake(mistake: str, layers: Sequence[Layer], mistakes: Callable[[Table], Collection[str]]) -> str | None:
    """The name of the layer that brings a mistake in: the first with which it is there and stays to the end.

    `mistakes` are those of a table. None when the layers do not have it, one over the other.
    """
    tables = list(accumulate((layer.table for layer in layers), layered))
    since = list(takewhile(lambda place: mistake in mistakes(tables[place]), reversed(range(len(tables)))))
    return layers[since[-1]].name if since else None


BUNDLED = Path(__file__).parents[1] / "recipes"
"""The recipes that are shipped: in a checkout a link to run_scripts/recipes/."""
OF_CHECKOUT = Path("run_scripts/recipes")
MAX_BASES = 64
"""Recipes that one recipe may be composed of."""
MAX_BYTES = 1 << 20
"""Bytes of one TOML file; a device has no end."""
MAX_OVERRIDE_CHARS = 100
"""Characters of a `--set` that a message shows."""


def load_recipe(
    path: Path | None, overrides: Sequence[str] = (), tell: Callable[[str], object] = lambda line: None
) -> Recipe:
    """The recipe in `path`, composed with its `base` files and overridden by `a.b=c` strings, validated.

    None stands for an empty recipe: every key at its default. A recipe may start with `base = "other.toml"`, or a list
    of such paths (relative to itself, or bundled); its own keys win over its bases', a later base's over an earlier
    one's. The name of another objective takes that preset whole: the keys of `[objective]` below it are dropped, and
    `tell` gets a line if `--set` drops some. Raises UserError for a missing file, broken TOML, an unknown key or a
    value out of range.
    """
    layers: list[Layer] = []
    read = _read_with_base(find_recipe_file(path), within=(), read=[], layers=layers) if path else {}
    texts = {override.partition("=")[0].strip(): override for override in overrides}
    base = for_objective(read, _objective_of(texts))
    table = for_rewards(base, reduce(_applied, overrides, Table()).get("reward"))
    for override in overrides:
        table = _applied(table, override)
        layers.append(Layer(f"--set {_short(override)}", _applied({}, override)))
    recipe = validate(table, str(path or "--set"), layers)
    if base is not read and (line := _dropped(read["objective"], recipe)):
        tell(f"{path}: {line}")
    return recipe


def validate(table: Table, source: str, layers: Sequence[Layer] = ()) -> Recipe:
    """The typed recipe of a table; UserError lists every wrong key in one sentence each.

    A sentence names the one of the `layers` that brings the mistake in, else `source`, the whole table's name.
    """
    if not (wrong := _mistakes(table)):
        return Recipe.model_validate(table)
    raise UserError("; ".join(f"{layer_of_mistake(one, layers, _mistakes) or source}: {one}" for one in wrong))


def _mistakes(table: Table) -> list[str]:
    """A sentence for every wrong key of a table."""
    try:
        Recipe.model_validate(table)
    except ValidationError as error:
        return [sentence(one) for one in error.errors()]
    return []


def dump_recipe(recipe: Recipe, every: bool = True) -> str:
    """The resolved recipe as TOML, unset optional fields left out; `load_recipe` of the text gives the same recipe.

    Without `every` also what has the default, or the value of the objective's preset.
    """
    table = _dumped(recipe)
    if not every:
        table = _differing(table, _dumped(Recipe.model_validate({"objective": {"name": recipe.objective.name}})))
        table = merged({"objective": {"name": recipe.objective.name}}, table)
    return tomli_w.dumps(table)


def _dumped(recipe: Recipe) -> Table:
    return recipe.model_dump(mode="json", exclude_none=True)


def _differing(table: Table, default: Table) -> Table:
    """The keys of a table whose values are not those of another, table by table."""
    parts = {
        key: _differing(value, default[key])
        if isinstance(value, dict) and isinstance(default.get(key), dict)
        else value
        for key, value in table.items()
        if value != default.get(key)
    }
    return {key: value for key, value in parts.items() if value != {}}


def dotted_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """The keys of a recipe's section and of those below it, as `section.key`."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from dotted_keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def find_recipe_file(name: Path, folder: Path = Path()) -> Path:
    """The file of a recipe in `folder`, else the bundled one of this name, with `run_scripts/recipes/` or without."""
    path = folder / name
    bundled = BUNDLED / (name.relative_to(OF_CHECKOUT) if name.is_relative_to(OF_CHECKOUT) else name)
    return path if os.path.exists(path) or not os.path.isfile(bundled) else bundled


def read_toml(path: Path) -> Table:
    """The tables of a TOML file; UserError when it is missing, unreadable or not TOML."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise UserError(f"{path}: longer than {MAX_BYTES:,} bytes, so not a recipe")
        return parse_toml(raw.decode("utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe; {_near(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: cannot be read as a recipe ({reason})") from None
    except ValueError as error:  # also for a path with a null character
        raise UserError(f"{path}: not valid TOML: {error}") from None


def _near(path: Path) -> str:
    """Which recipe a name may stand for, beside it or among the bundled ones, else where those are."""
    bundled = [str(one.relative_to(BUNDLED)) for one in sorted(BUNDLED.rglob("*.toml"))]
    beside = sorted(str(one) for one in path.parent.glob("*.toml"))
    if close := difflib.get_close_matches(str(path), [*beside, *bundled], n=1, cutoff=0.75):
        return f"did you mean {close[0]}?"
    return f"the bundled ones are in {BUNDLED.resolve()}/"


def parse_toml(text: str) -> Table:
    """The tables of a TOML text; ValueError when it is not TOML, nested too deep, or has a number of 4,300 digits."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _read_with_base(path: Path, within: tuple[Path, ...], read: list[Path], layers: list[Layer]) -> Table:
    """The tables of a recipe and its bases.

    `within` are the recipes that lead to it, `read` all those read so far; `layers` gets each with its own keys alone.
    """
    table = read_toml(path)
    if (own := path.resolve()) in within:
        raise UserError(f"{path}: its `base` leads back to itself; break the cycle")
    read.append(own)
    if len(read) > MAX_BASES:
        raise UserError(f"{path}: more than {MAX_BASES} recipes are composed by `base`; write fewer")
    base = table.pop("base", None)
    names = [] if base is None else [base] if isinstance(base, str) else base
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f'{path}: `base` is the path of another recipe, or a list of them, as in base = "common.toml"')
    tables = [
        _read_with_base(find_recipe_file(Path(name), path.parent), (*within, own), read, layers) for name in names
    ]
    layers.append(Layer(str(path), table))
    return reduce(layered, [*tables, table])


def _dropped(section: Table, recipe: Recipe) -> str | None:
    """A sentence on the keys of an `[objective]` that another name has replaced; None if all values are the same."""
    now = recipe.objective.model_dump(mode="json")
    keys = [key for key, value in section.items() if key != "name" and now.get(key) != value]
    if not keys:
        return None
    listed = ", ".join(f"{key} = {short_repr(section[key])}" for key in keys)
    return (
        f"its objective is {short_repr(section['name'])}, and --set objective.name={recipe.objective.name} takes that "
        f"preset whole; no longer in force: {listed}; use --set to keep one"
    )


def _applied(table: Table, override: str) -> Table:
    """`table` with `a.b=c`; c is TOML where it parses as such (numbers, booleans, lists), else a plain string.

    A key that takes text alone gets the text (`coerce_override`).
    """
    dotted, equals, text = override.partition("=")
    *sections, key = dotted.strip().split(".")
    if not equals or not key or not sections:
        meant = translate_key(dotted)
        raise UserError(
            f"--set {override}: write it as section.key=value, for instance --set schedule.stages=8"
            + (f"; {meant}" if meant else "")
        )
    result = inner = dict(table)
    for section in sections:
        below = inner.get(section, {})
        if not isinstance(below, dict):
            raise UserError(f"--set {override}: {section} is a value, not a section")
        inner[section] = inner = dict(below)
    inner[key] = coerce_override(dotted.strip(), text.strip(), _value(override, text))
    return result


def _objective_of(overrides: Mapping[str, str]) -> object:
    """The objective that `--set` names, None without one."""
    override = overrides.get("objective.name")
    return None if override is None else _value(override, override.partition("=")[2])


def _short(override: str) -> str:
    """The override as it can be printed, cut where it is long."""
    text = override if override.isprintable() else ascii(override)[1:-1]
    return text if len(text) <= MAX_OVERRIDE_CHARS else f"{text[: MAX_OVERRIDE_CHARS - 3]}..."


def coerce_override(key: str, text: str, value: Any) -> Any:
    """`value`, the TOML value of `text`; the text where `key` takes texts or paths alone.

    `model.revision=1.0` is no number, and `run.dir=2026-05-01` no date.
    """
    model: Any = Recipe
    for name in key.split("."):
        fields = getattr(model, "model_fields", {})
        model = fields[name].annotation if name in fields else None
    texts = {*(get_args(model) or (model,))} <= {str, Path, NoneType}
    return text if texts and isinstance(value, int | float | date | time) else value


def _value(override: str, text: str) -> Any:
    """The value of an override's text: TOML where it parses as such, else the text itself."""
    try:
        override.encode("utf-8")
        parsed = parse_toml(f"value = {text}")
    except UnicodeEncodeError:
        raise UserError(f"--set {override}: not UTF-8 text") from None
    except tomllib.TOMLDecodeError:
        return text
    except ValueError as error:
        raise UserError(f"--set {short_repr(override)}: {error}") from None
    if parsed.keys() != {"value"}:
        raise UserError(f"--set {override}: sets several keys; pass --set once for each")
    return parsed["value"]
