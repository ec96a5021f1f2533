"""docs/cli.md, made from the parsers of `mugrpo`: `python -m run_scripts.dev.site.cli_page > docs/cli.md`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from operator import attrgetter

from mugrpo_megatron.cli import COMMANDS, command_parser
from mugrpo_megatron.commands.reading import CONVERSIONS

HEAD = """# Command line

For everyone at the command line: every command and every option. `mugrpo` lists the commands, and `mugrpo COMMAND
--help` prints what this page says about one. There are guides to [a run in parts](parts.md),
[evaluation](evaluation.md), [a look at a run](look.md), [stages as data](stages.md) and [planning](plan.md).

`RUN_DIR` is the directory of a run. `RECIPE` is a TOML file, or the name of a [bundled recipe](recipes.md) such as
`one_gpu/24gb.toml`. Stages and updates count from 0. `--set SECTION.KEY=VALUE` changes one [key](recipe.md) and may be
repeated.

A *stage* is the responses of many updates, sampled with one set of weights. It is *sealed* once it is complete. The
[glossary](glossary.md) has the other words.

`mugrpo --version` prints the version and the commit.

| Exit code | Meaning |
| --: | --- |
| 0 | the command has done its work |
| 1 | the run failed, or the program has a bug |
| 2 | your mistake: the error says what it is and the way out |
| 130 | you pressed Ctrl-C |
| 143 | SIGTERM ended work that cannot be continued |

Each option has an address, such as `cli.md#train--set`. `make docs` makes this page from the parsers.
"""
NAME = re.compile(r"\w[.\d]\w")
"""A word that is a name, such as `eval.samples` or `h200`: a sentence that begins with it keeps its first letter."""


def markdown() -> str:
    """The text of docs/cli.md."""
    parts = [HEAD]
    parsers = next(a.choices for a in command_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for group, commands in groupby(COMMANDS, attrgetter("group")):
        parts.append(f"## {group}\n")
        for command in commands:
            parts.append("\n".join(_command(f"mugrpo {command.name}", command.name, parsers[command.name])))
            for word in CONVERSIONS if command.name == "convert" else ():
                parser = import_module(f"checkpoints_convert.{word}").command_parser()
                parts.append("\n".join(_command(parser.prog, f"convert-{word}", parser)))
    return "\n".join(parts)


def _command(title: str, name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the lines of a command and of its subcommands."""
    yield f"### `{title}`\n"
    if parser.description:
        yield _sentence(parser.description) + "\n"
    inner: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            inner += action.choices.items()
        elif not isinstance(action, argparse._HelpAction):
            yield _argument(name, action)
    if parser.epilog:
        yield f"\n{_sentence(parser.epilog)}"
    yield ""
    for word, below in inner:
        yield from _command(f"{title} {word}", f"{name}-{word}", below)


def _argument(command: str, action: argparse.Action) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    value = " ".join(value) if isinstance(value, tuple) else str(value)
    if action.option_strings:
        shown = ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")
        place = f"{command}{action.option_strings[-1]}"
    else:
        shown, place = value, f"{command}-{action.dest}"
    needed = " (required)" if action.required and action.option_strings else ""
    text = " ".join((action.help or "").replace("%%", "%").split())
    default = f" Default: `{action.default}`." if _has_default(action, text) else ""
    return f'- <a id="{place}"></a>`{shown}`{needed}{": " if text or default else ""}{_sentence(text)}{default}'


def _has_default(action: argparse.Action, text: str) -> bool:
    given = action.default not in (None, False, [], argparse.SUPPRESS) and action.nargs != 0
    return given and str(action.default) not in text


def _sentence(text: str) -> str:
    """The text as a sentence with a capital letter and a full stop; `<` is escaped."""
    text = " ".join(text.split()).replace("<", "\\<")
    begins = text.partition(" ")[0]
    first = text[:1] if NAME.search(begins) else text[:1].upper()
    return first + text[1:] + ("" if text.endswith((".", ":")) else ".")


if __name__ == "__main__":
    print(markdown(), end="")
