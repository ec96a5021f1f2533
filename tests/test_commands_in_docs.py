"""Every `mugrpo` command of every page parses; on `PAGES` its recipe is what the command's words say."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.cli import command_parser
from mugrpo_megatron.recipe import load_recipe
from tests.checkout import ROOT

pytestmark = pytest.mark.usefixtures("in_checkout")

PAGES = ("README.md", "docs/quickstart.md", "docs/paper.md")
GENERATED = {"docs/recipe.md", "docs/metrics.md", "docs/cli.md", "docs/recipes.md", "docs/python.md"}
EVERY = sorted({str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))} - GENERATED)
PLACEHOLDERS = {
    "RECIPE": "run_scripts/recipes/quickstart.toml",
    "RUN_DIR": "runs/quickstart",
    "MODEL": "models/some",
    "SETS": "math500",
    "IN": "responses.jsonl",
    "OUT": "scored.jsonl",
    "N": "2",
    "K": "1",
    "SEED": "1",
    "RUN": "runs/quickstart",
    "NAME": "owner/name",
    "DIR": "models/some",
    "HF_DIR": "models/some",
    "TEXT_DIR": "models/text",
    "TYPE": "bfloat16",
}
"""What a word in capitals stands for: alone, or as a part of `key=value` or of a path."""

BLOCK = re.compile(r"^```\w*\n(.*?)^```|((?:^ {4}[^\n]*\n|^\n)+)", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
PROGRAM = re.compile(r"\bmugrpo\b|run_scripts/[\w/]+\.sh")
QUICKSTART = "run_scripts/quickstart.sh"

STRICT = {"clip_low": 0.8, "clip_high": 1.2, "veto": "none"}
GRPO = {"name": "grpo", "reduction": "token_mean", **STRICT}
MU_GRPO = {"name": "mu_grpo", "reduction": "token_mean", "clip_low": 0.0, "clip_high": 5.0, "trigger_ratio": 1e-4}


def objective_of(command: str) -> dict[str, Any]:
    """What the words of a command say that it trains with."""
    if "off_policy_grpo/" in command:
        return {"name": "off_policy_grpo", "zero_variance": "mask"}
    if re.search(r"objective\.name=grpo\b|\.grpo(_mu1024)?\.toml", command):
        return GRPO
    return MU_GRPO | {"veto": "response" if ".response.toml" in command else "suffix_non_trigger"}


def code_of(page: str) -> tuple[list[str], list[str]]:
    """(lines of code blocks, code spans) of a Markdown page; continued lines are joined."""
    blocks = [fenced or indented for fenced, indented in BLOCK.findall(page)]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return lines, SPAN.findall(BLOCK.sub("\n", page))


def command_in(code: str) -> list[str]:
    """The words of the command that starts at `mugrpo` or at a script of run_scripts; empty without one."""
    if not PROGRAM.search(code):
        return []
    words = [word.removeprefix(".venv/bin/") for word in shlex.split(code, comments=True)]
    starts = [place for place, word in enumerate(words) if PROGRAM.fullmatch(word)]
    return words[starts[0] :] if starts else []


def commands_of(page: str) -> Iterator[str]:
    """Every command of a page. In running text, the name of a program or subcommand alone is no command."""
    lines, spans = code_of(page)
    yield from (" ".join(words) for line in lines if (words := command_in(line)))
    for span in spans:
        words = command_in(span)
        if words and not (words[0] == "mugrpo" and _only_named(words[1:])):
            yield " ".join(words)


def _only_named(words: Sequence[str]) -> bool:
    """Whether these words after `mugrpo` name a subcommand that needs arguments, or nothing."""
    subcommands = next(a.choices for a in command_parser()._actions if isinstance(a, argparse._SubParsersAction))
    needs = {name for name, one in subcommands.items() if any(action.required for action in one._actions)}
    return not words or (len(words) == 1 and words[0] in needs)


def filled(word: str) -> str:
    """A word with its placeholders filled in; KeyError where a word in capitals has no rule."""
    return re.sub(r"(?<![A-Za-z0-9])[A-Z][A-Z_]*(?![A-Za-z0-9])", lambda found: PLACEHOLDERS[found[0]], word)


def mugrpo_commands(command: str) -> list[list[str]]:
    """The arguments of each `mugrpo` that a command of a page runs, placeholders filled in."""
    program, *words = (filled(word) for word in shlex.split(command))
    if program == "mugrpo":
        return [words]
    if program.endswith("torchrun.sh"):
        return [words[1:]]  # after the number of ranks; no page gives its options
    if program == QUICKSTART:
        lines = re.findall(r"^\.venv/bin/mugrpo (.*)$", Path(QUICKSTART).read_text(encoding="utf-8"), re.MULTILINE)
        assert lines[-1].endswith('"$@"')
        given = [line.replace('"${precision[@]}"', "").replace('"$@"', shlex.join(words)) for line in lines]
        return [shlex.split(line) for line in given]
    return []


PUBLISHED = [(page, command) for page in PAGES for command in commands_of(Path(page).read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("page", "command"), PUBLISHED)
def test_a_command_of_a_page_resolves_to_what_its_words_say(page: str, command: str) -> None:
    program = shlex.split(command)[0]
    assert program == "mugrpo" or Path(program).is_file()
    for options in map(command_parser().parse_args, mugrpo_commands(command)):
        if not hasattr(options, "overrides"):
            continue
        if options.command.name == "sweep":  # each value of an axis is a run's
            for name, _, values in (override.partition("=") for override in options.overrides):
                for value in values.split(","):
                    assert str(attrgetter(name)(load_recipe(None, [f"{name}={value}"]))) == value
            continue
        recipe = load_recipe(getattr(options, "recipe", None), options.overrides)
        for override in options.overrides:
            name, _, value = override.partition("=")
            assert str(attrgetter(name)(recipe)) == value, name
        if options.command.name in ("train", "optimize"):
            expected = objective_of(command)
            assert {name: getattr(recipe.objective, name) for name in expected} == expected


@pytest.mark.parametrize("page", EVERY)
def test_every_mugrpo_command_of_a_page_parses(page: str) -> None:
    for command in commands_of(Path(page).read_text(encoding="utf-8")):
        if "torchrun.sh" not in command and "COMMAND" not in command:
            for arguments in mugrpo_commands(command.replace("--nodes N", "--nodes 2")):
                command_parser().parse_args(arguments)


def test_commands_are_found_in_blocks_and_in_text() -> None:
    page = """Say `mugrpo train` or `mugrpo`, then `.venv/bin/mugrpo doctor`.

    mugrpo train a.toml \\
      --set run.seed=1      # a remark

```sh
cd x
run_scripts/quickstart.sh
```
Then `run_scripts/quickstart.sh --set
run.seed=SEED`.
"""
    assert list(commands_of(page)) == [
        "mugrpo train a.toml --set run.seed=1",
        "run_scripts/quickstart.sh",
        "mugrpo doctor",
        "run_scripts/quickstart.sh --set run.seed=SEED",
    ]
    assert filled("runs/quickstart-SEED") == "runs/quickstart-1"
    assert mugrpo_commands("run_scripts/quickstart.sh --set run.seed=SEED")[-1][-2:] == ["--set", "run.seed=1"]
