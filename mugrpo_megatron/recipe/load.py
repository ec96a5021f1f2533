"""Loads a recipe from TOML files and `--set` overrides, validates it, and writes it back as TOML."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Sequence
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
from mugrpo_megatron.files.home import expanded
from mugrpo_megatron.pages import page_address
from mugrpo_megatron.recipe.objective import ObjectiveSection, Section
from mugrpo_megatron.recipe.other_trainers import translate_key
from mugrpo_megatron.recipe.removed import removal
from mugrpo_megatron.recipe.sections import Recipe

MAX_VALUE_CHARS = 60
"""Most characters of a wrong value in a message."""
MAX_LISTED_KEYS = 12
"""Most keys of a section that a message lists; for a section with more keys, the message names the page that lists
them."""


def error_message(error: ErrorDetails) -> str:
    """Returns a sentence about a wrong value or an unknown key, with the most similar choice or key if there is one."""
    key = ".".join(map(str, error["loc"]))
    if (sentence := removal(key, error["input"])) is not None:
        return f"`{key}` = {short_repr(error['input'])}: {sentence}"
    if error["type"] == "extra_forbidden":
        return f"`{key}` is not a recipe key; {_suggestion(error['loc'], error['input'])}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "literal_error":
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        if close := difflib.get_close_matches(str(error["input"]), choices, n=1):
            message = f"did you mean `{close[0]}`? {message}"
    given = short_repr(error["input"]).strip("'")
    if given.lower() in OFF and NoneType in get_args(_annotation(error["loc"])):
        message += f'; write {key} = "unset" to leave it out'
    message += OFF_HERE.get((key, given), "")
    value = "" if isinstance(error["input"], dict) else f" = {short_repr(error['input'])}"
    return f"`{key}`{value}: {message}" if key else message


def short_repr(value: Any) -> str:
    """Returns the repr of a value, cut to a readable length, or `a huge int` and the like if a value has no repr."""
    try:
        return _cut(repr(value), MAX_VALUE_CHARS)
    except (ValueError, RecursionError):  # a number of more than 4,300 digits, or a value nested too deep
        return f"a huge {type(value).__name__}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _suggestion(loc: tuple[int | str, ...], value: Any) -> str:
    """Returns a hint at the keys that a user may have meant by the unknown key at `loc`, whose value is `value`."""
    *sections, key = map(str, loc)
    known = _known_keys(loc[:-1])
    close = difflib.get_close_matches(key, known, n=1)
    near = f"did you mean `{'.'.join([*sections, *close])}`?" if close else ""
    homes = [f"`{name}.{key}`" for name in Recipe.model_fields if key in _known_keys((name,))]
    home = f"it belongs into a section: {' or '.join(homes)}" if homes else ""
    other = translate_key(".".join([*sections, key]), value) or home
    if near or other:
        return " ".join(filter(None, (near, other)))
    if sections and len(known) > MAX_LISTED_KEYS:
        name = ".".join(sections)
        return f"{page_address('recipe', name)} lists the {len(known)} keys of [{name}]"
    return f"known keys: {', '.join(sorted(known))}"


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Recipe
    keys = iter(loc)
    for key in keys:
        if issubclass(model, Section) and model.entry_section:
            model = model.entry_section
            continue
        annotation = model.model_fields[str(key)].annotation
        if get_origin(annotation) is dict:  # a dictionary of tables, whose names the user chooses
            next(keys)
            annotation = get_args(annotation)[1]
        assert isinstance(annotation, type)
        model = annotation
    return list(model.model_fields)


Table = dict[str, Any]


class Layer(NamedTuple):
    """One of the TOML files that a recipe is composed of, or one `--set`."""

    name: str
    """Name in messages."""
    table: Table
    """The keys that the file or the `--set` itself sets; keys of a file's bases are not included."""


def layered(base: Table, top: Table) -> Table:
    """Returns `base` with the values of `top` in the place of its own.

    If `top` names another objective, all keys of `[objective]` in `base` are dropped first (`for_objective`). Likewise
    `reward.function` in `base` is dropped if `top` has `reward.functions`, and the other way round (`for_rewards`).
    """
    section = top.get("objective")
    base = for_objective(base, section.get("name") if isinstance(section, dict) else None)
    return merged(for_rewards(base, top.get("reward")), top)


def for_objective(table: Table, name: object) -> Table:
    """Returns `table`, but with `[objective]` emptied if it names another objective than `name`; unchanged if `name` is
    None or the table names no objective."""
    # Keys that were set for one objective make no sense for another: GRPO should not get the clip range of mu-GRPO.
    section = table.get("objective")
    if name is None or not isinstance(section, dict) or section.get("name", name) == name:
        return table
    return {**table, "objective": {}}


def for_rewards(table: Table, top: object) -> Table:
    """Returns `table` without `reward.function` if `top`, another `[reward]` table, has `functions`, and without
    `reward.functions` if it has `function`; unchanged if `top` has both or neither."""
    section = table.get("reward")
    if not isinstance(section, dict) or not isinstance(top, dict):
        return table
    has_function, has_functions = bool(top.get("function")), bool(top.get("functions"))
    if has_function == has_functions:
        return table
    replaced = "functions" if has_function else "function"
    return {**table, "reward": {key: value for key, value in section.items() if key != replaced}}


def merged(base: Table, top: Table) -> Table:
    """Returns the keys of both tables. Where both have a key, the value of `top` counts; two tables are merged."""
    result = dict(base)
    for key, value in top.items():
        both_tables = isinstance(value, dict) and isinstance(base.get(key), dict)
        result[key] = merged(base[key], value) if both_tables else value
    return result


OFF = ("", "0", "0.0", "-1", "false", "none", "null", "nil", "off", "no")
"""Values with which users of other programs turn a setting off."""
OFF_HERE = {
    ("rollout.top_k", "-1"): "; 0 keeps all tokens",
    ("rollout.top_p", "0"): "; 1 keeps all tokens",
    ("rollout.top_p", "0.0"): "; 1 keeps all tokens",
    ("optimizer.lr", "0"): "; a rate of 0 trains nothing, and `mugrpo eval` evaluates without training",
    ("optimizer.lr", "0.0"): "; a rate of 0 trains nothing, and `mugrpo eval` evaluates without training",
}
"""(key, value that turns the setting off in other programs) -> how to do it here."""
UNSET = "unset"
"""Value that takes back what a base sets, so that the default applies; TOML has no null."""


def without_unset(table: Table, levels: int = 8) -> Table:
    """Returns `table` without the keys whose value is UNSET. Tables in it are searched to a depth of `levels`, which is
    more than a recipe has."""
    return {
        key: without_unset(value, levels - 1) if isinstance(value, dict) and levels else value
        for key, value in table.items()
        if not isinstance(value, str) or value != UNSET
    }


def layer_of_mistake(mistake: str, layers: Sequence[Layer], mistakes: Callable[[Table], Collection[str]]) -> str | None:
    """Returns the name of the layer (a file or a --set) that causes a mistake; None if the merged layers do not have
    it.

    The layers are merged one after the other. The layer returned is the first after which the result always has
    the mistake. `mistakes` lists the mistakes of a table.
    """
    tables = [without_unset(table) for table in accumulate((layer.table for layer in layers), layered)]
    since = list(takewhile(lambda index: mistake in mistakes(tables[index]), reversed(range(len(tables)))))
    return layers[since[-1]].name if since else None


BUNDLED = Path(__file__).parents[1] / "recipes"
"""Folder of the bundled recipes; in a checkout it is a link to run_scripts/recipes/."""
OF_CHECKOUT = Path("run_scripts/recipes")
MAX_BASES = 64
"""Most files that a recipe may be composed of."""
MAX_BYTES = 1 << 20
"""Most bytes of a TOML file; without a limit, reading a device such as /dev/zero would not end."""
MAX_OVERRIDE_CHARS = 100
"""Most characters of a `--set` option that the message about a mistake in it begins with."""


def load_recipe(
    path: Path | None, overrides: Sequence[str] = (), say: Callable[[str], object] = lambda line: None
) -> Recipe:
    """Load a recipe, merge it over its `base` files, apply `a.b=c` overrides, and validate the result.

    Without a `path` every key has its default. A recipe may start with `base = "other.toml"`, or a list of such paths
    (relative to the recipe's file, or bundled). A recipe overrides its bases, and a later base overrides an earlier
    one; the value "unset" gives a key its default back. A layer that names another objective drops the keys of
    `[objective]` in the layers before it; `say` gets a line if a `--set` drops some. Raises UserError for a missing
    file, broken TOML, an unknown key or a value out of range.
    """
    layers: list[Layer] = []
    read = _read_with_base(find_recipe_file(path), within=(), read=[], layers=layers) if path else {}
    given = reduce(_applied, overrides, Table())
    base = for_objective(read, given.get("objective", {}).get("name"))
    table = for_rewards(base, given.get("reward"))
    for override in overrides:
        table = _applied(table, override)
        printable = override if override.isprintable() else ascii(override)[1:-1]
        layers.append(Layer(f"--set {_cut(printable, MAX_OVERRIDE_CHARS)}", _applied({}, override)))
    recipe = validate(without_unset(table), str(path or "--set"), layers)
    if base is not read and (line := _dropped_keys(read["objective"], recipe.objective)):
        say(f"{path}: {line}")
    return recipe


def validate(table: Table, source: str, layers: Sequence[Layer] = ()) -> Recipe:
    """Returns the typed recipe of a table. Raises UserError with a sentence for each wrong key.

    A sentence begins with the name of the layer that causes the mistake, or with `source`, the name of the whole table.
    """
    if not (mistakes := _mistakes(table)):
        return Recipe.model_validate(table)
    raise UserError(
        "; ".join(f"{layer_of_mistake(mistake, layers, _mistakes) or source}: {mistake}" for mistake in mistakes)
    )


def _mistakes(table: Table) -> list[str]:
    """Returns a sentence for each wrong key of a table."""
    try:
        Recipe.model_validate(table)
    except ValidationError as error:
        return [error_message(details) for details in error.errors()]
    return []


def dump_recipe(recipe: Recipe, every: bool = True) -> str:
    """Returns the recipe as TOML, without unset keys; `load_recipe` of this text gives the same recipe.

    Without `every`, values are left out that are the default or come from the objective's preset.
    """
    table = recipe.model_dump(mode="json", exclude_none=True)
    if not every:
        default = Recipe.model_validate({"objective": {"name": recipe.objective.name}})
        table = _differing(table, default.model_dump(mode="json", exclude_none=True))
        table = merged({"objective": {"name": recipe.objective.name}}, table)
    return tomli_w.dumps(table)


def _differing(table: Table, default: Table) -> Table:
    """Returns the keys of a table whose values are not those of `default`; tables inside it are compared key by key."""
    result = {
        key: _differing(value, default[key])
        if isinstance(value, dict) and isinstance(default.get(key), dict)
        else value
        for key, value in table.items()
        if value != default.get(key)
    }
    return {key: value for key, value in result.items() if value != {}}


def dotted_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Yields every key of a section, and of the sections in it, as `section.key`."""
    for name, field in section.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from dotted_keys(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def find_recipe_file(name: Path, folder: Path = Path()) -> Path:
    """Returns `folder / name` if it exists, else the path of the bundled recipe `name`; if there is none either,
    `folder / name`.

    The name of a bundled recipe may begin with `run_scripts/recipes/`.
    """
    path = folder / name
    bundled = BUNDLED / (name.relative_to(OF_CHECKOUT) if name.is_relative_to(OF_CHECKOUT) else name)
    return path if os.path.exists(path) or not os.path.isfile(bundled) else bundled


def read_toml(path: Path) -> Table:
    """Returns the tables of a TOML file; UserError when it is missing, unreadable, too long or not TOML."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise UserError(f"{path}: longer than {MAX_BYTES:,} bytes, so not a recipe; name another file")
        return parse_toml(raw.decode("utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe; {_similar_recipe(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: cannot be read as a recipe ({reason}); name a readable TOML file") from None
    except ValueError as error:  # raised for broken TOML, and for a path with a null character
        raise UserError(f"{path}: not valid TOML: {error}") from None


def _similar_recipe(path: Path) -> str:
    """Returns a hint for a missing recipe: the most similar name of a recipe in its folder or of a bundled one, or, if
    none is similar, the folder of the bundled recipes."""
    bundled = [str(recipe.relative_to(BUNDLED)) for recipe in sorted(BUNDLED.rglob("*.toml"))]
    siblings = sorted(map(str, path.parent.glob("*.toml")))
    if close := difflib.get_close_matches(str(path), [*siblings, *bundled], n=1, cutoff=0.75):
        return f"did you mean {close[0]}?"
    return f"the bundled ones are in {BUNDLED.resolve()}/"


def parse_toml(text: str) -> Table:
    """Returns the tables of a TOML text.

    Raises ValueError if it is not TOML, is nested too deep, or has an integer of more than 4,300 digits.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("lists or tables are nested too deep") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python's own message would tell the user to change a setting of Python
        raise ValueError("an integer has more than 4,300 digits; write a smaller one") from None


def _read_with_base(path: Path, within: tuple[Path, ...], read: list[Path], layers: list[Layer]) -> Table:
    """Returns the keys of a recipe merged over those of its bases.

    `within` has the recipes whose base this one is, directly or through other bases; `read` has all recipes read so
    far. `layers` gets the keys that each recipe itself sets.
    """
    table = read_toml(path)
    if (resolved := path.resolve()) in within:
        raise UserError(f"{path}: its `base` leads back to itself; break the cycle")
    read.append(resolved)
    if len(read) > MAX_BASES:
        raise UserError(f"{path}: more than {MAX_BASES} recipes are composed by `base`; write fewer")
    base = table.pop("base", None)
    names = [] if base is None else [base] if isinstance(base, str) else base
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f'{path}: `base` is the path of another recipe, or a list of them, as in base = "common.toml"')
    tables = [
        _read_with_base(find_recipe_file(Path(expanded(name)), path.parent), (*within, resolved), read, layers)
        for name in names
    ]
    layers.append(Layer(str(path), table))
    return reduce(layered, [*tables, table])


def _dropped_keys(section: Table, objective: ObjectiveSection) -> str | None:
    """Returns a sentence that lists the keys of `section`, an `[objective]` table, that `--set objective.name` has
    dropped; None if all of them have the same values in the new `objective`."""
    values = objective.model_dump(mode="json")
    keys = [key for key, value in section.items() if key != "name" and values.get(key) != value]
    if not keys:
        return None
    listed = ", ".join(f"{key} = {short_repr(section[key])}" for key in keys)
    return (
        f"--set objective.name={objective.name} replaces its objective {short_repr(section['name'])} with all its "
        f"keys; no longer in force: {listed}; use --set to keep one"
    )


def _applied(table: Table, override: str) -> Table:
    """Returns `table` with the override `a.b=c`. c is read as TOML (number, boolean, list); other text stays text."""
    dotted, equals, text = override.partition("=")
    *sections, key = dotted.strip().split(".")
    if not equals or not key or not sections:
        hint = translate_key(dotted)
        raise UserError(
            f"--set {override}: write it as section.key=value, for instance --set schedule.stages=8"
            + (f"; {hint}" if hint else "")
        )
    result = inner = dict(table)
    for section in sections:
        below = inner.get(section, {})
        if not isinstance(below, dict):
            raise UserError(f"--set {override}: {section} is a key, not a section; leave out what follows it")
        inner[section] = inner = dict(below)
    inner[key] = coerce_override(dotted.strip(), text.strip(), _value(override, text))
    return result


def coerce_override(key: str, text: str, value: Any) -> Any:
    """Returns the value that an override gives to `key`. `value` is `text` read as TOML.

    It is `value`, except for a key that takes only text or paths: there a number, a boolean, a date or a time stays
    `text`. So `model.revision=1.0` is not a number, and `run.dir=2026-05-01` not a date.
    """
    annotation = _annotation(key.split("."))
    texts = {*(get_args(annotation) or (annotation,))} <= {str, Path, NoneType}
    return text if texts and isinstance(value, int | float | date | time) else value


def _annotation(path: Sequence[str | int]) -> Any:
    """Returns the type of the recipe's key at `path`; None if there is no such key."""
    model: Any = Recipe
    for name in path:
        field = getattr(model, "model_fields", {}).get(name)
        model = field.annotation if field else None
    return model


def _value(override: str, text: str) -> Any:
    """Returns the TOML value of an override's text, or the text itself if it is not TOML.

    Raises UserError for text that is not UTF-8, sets several keys, is nested too deep, or has an integer of more than
    4,300 digits.
    """
    try:
        override.encode("utf-8")
        parsed = parse_toml(f"value = {text}")
    except UnicodeEncodeError:
        raise UserError(f"--set {override}: not UTF-8 text; write it in UTF-8") from None
    except tomllib.TOMLDecodeError:
        return text
    except ValueError as error:
        raise UserError(f"--set {short_repr(override)}: {error}") from None
    if parsed.keys() != {"value"}:
        raise UserError(f"--set {override}: sets several keys; pass --set once for each")
    return parsed["value"]
