"""Every `mugrpo` command of every page parses; on `PAGES` its recipe is what the page says it is.

`STATED` says what each command of `PAGES` stands for. One that is missing there fails, and so does a line there that no
page has any more.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.cli import command_parser
from mugrpo_megatron.recipe import Recipe, load_recipe
from tests.checkout import ROOT

pytestmark = pytest.mark.usefixtures("in_checkout")

PAGES = ("README.md", "docs/quickstart.md", "docs/paper.md")
GENERATED = {"docs/recipe.md", "docs/metrics.md"}
EVERY = sorted({str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))} - GENERATED)
PLACEHOLDERS = {
    "RECIPE": "run_scripts/recipes/quickstart.toml",
    "RUN_DIR": "runs/quickstart",
    "MODEL": "models/some",
    "SETS": "math500",
    "IN": "responses.jsonl",
    "OUT": "scored.jsonl",
    "N": "2",
    "SEED": "1",
    "RUN": "runs/quickstart",
    "NAME": "owner/name",
}
"""What a word in capitals stands for: alone, or as a part of `key=value` or of a path."""

BLOCK = re.compile(r"^```\w*\n(.*?)^```|((?:^ {4}[^\n]*\n|^\n)+)", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
PROGRAM = re.compile(r"\bmugrpo\b|run_scripts/[\w/]+\.sh")
QUICKSTART = "run_scripts/quickstart.sh"

SAME = {"objective.reduction": "token_mean"}
STRICT = {"objective.clip_low": 0.8, "objective.clip_high": 1.2, "objective.veto": "none"}
GRPO = SAME | {"objective.name": "grpo"} | STRICT
RELAXED = SAME | {"objective.name": "mu_grpo", "objective.clip_low": 0.0, "objective.clip_high": 5.0}
MU_GRPO = RELAXED | {"objective.veto": "suffix_non_trigger", "objective.trigger_ratio": 1e-4}
WHOLE_RESPONSE = MU_GRPO | {"objective.veto": "response"}


def schedule(stages: int, mu: int) -> dict[str, Any]:
    return {"schedule.stages": stages, "schedule.updates_per_stage": mu}


QWEN = "run_scripts/recipes/paper/qwen2.5-math-7b"
INSIDE = {"eval.every_updates": 64}
SAVED = {"checkpoint.every_updates": 64, "checkpoint.keep": 16}
STATED: dict[str, Mapping[str, Any]] = {
    # README.md
    "run_scripts/quickstart.sh": schedule(4, 64) | MU_GRPO,
    "run_scripts/test.sh": {},
    "mugrpo train RECIPE --set schedule.stages=1024 --set schedule.updates_per_stage=4 --set objective.name=grpo"
    " --set objective.reduction=token_mean": schedule(1024, 4) | GRPO,
    "mugrpo train RECIPE --set schedule.stages=4 --set schedule.updates_per_stage=1024 --set objective.name=mu_grpo"
    " --set objective.reduction=token_mean": schedule(4, 1024) | MU_GRPO,
    # docs/quickstart.md
    "run_scripts/setup.sh": {},
    "mugrpo sft run_scripts/recipes/quickstart.toml": {"sft.target_accuracy": 0.4},
    "mugrpo train run_scripts/recipes/quickstart.toml": schedule(4, 64)
    | MU_GRPO
    | {"run.dir": Path("runs/quickstart")},
    "run_scripts/quickstart.sh --set run.dir=runs/grpo --set objective.name=grpo"
    " --set objective.reduction=token_mean --set schedule.stages=64 --set schedule.updates_per_stage=4": (
        schedule(64, 4) | GRPO | {"run.dir": Path("runs/grpo")}
    ),
    "run_scripts/quickstart.sh --set run.seed=SEED --set run.dir=runs/quickstart-SEED": (
        schedule(4, 64) | MU_GRPO | {"run.seed": 1, "run.dir": Path("runs/quickstart-1")}
    ),
    "mugrpo train run_scripts/recipes/gsm8k_smoke.toml --set data.train=gsm8k_train.jsonl": (
        schedule(2, 4) | MU_GRPO | {"data.train": "gsm8k_train.jsonl"}
    ),
    # docs/paper.md
    f"mugrpo plan {QWEN}.mu_grpo.toml --gpus-per-node 4": schedule(4, 1024) | MU_GRPO | {"nodes": 1, "gpu": "h200"},
    f"run_scripts/torchrun.sh 4 train {QWEN}.mu_grpo.toml": schedule(4, 1024) | MU_GRPO,
    "mugrpo report runs/paper/qwen2.5-math-7b.mu_grpo": {"run_dir": [Path("runs/paper/qwen2.5-math-7b.mu_grpo")]},
    f"run_scripts/torchrun.sh 4 train {QWEN}.grpo.toml --set schedule.stages=256 --set eval.every_stages=16"
    " --set run.dir=runs/paper/one-stage.grpo": schedule(256, 4) | GRPO | {"eval.every_stages": 16},
    f"run_scripts/torchrun.sh 4 train {QWEN}.grpo_mu1024.toml --set schedule.stages=1 --set eval.every_updates=64"
    " --set run.dir=runs/paper/one-stage.grpo_mu1024": schedule(1, 1024) | GRPO | INSIDE,
    f"run_scripts/torchrun.sh 4 train {QWEN}.mu_grpo.toml --set schedule.stages=1 --set eval.every_updates=64"
    " --set run.dir=runs/paper/one-stage.mu_grpo": schedule(1, 1024) | MU_GRPO | INSIDE,
    f"run_scripts/torchrun.sh 4 optimize {QWEN}.response.toml --from runs/paper/one-stage.mu_grpo --stage 0"
    " --set schedule.stages=1 --set checkpoint.every_updates=64 --set checkpoint.keep=16"
    " --set run.dir=runs/paper/one-stage.response": (
        schedule(1, 1024) | WHOLE_RESPONSE | SAVED | {"source": Path("runs/paper/one-stage.mu_grpo"), "stage": 0}
    ),
}
"""Command -> what it resolves to: fields of the recipe (`section.key`) and options of the command."""


def code_of(page: str) -> tuple[list[str], list[str], str]:
    """(lines of code blocks, code spans, prose without either) of a Markdown page; continued lines are joined."""
    blocks = [fenced or indented for fenced, indented in BLOCK.findall(page)]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    rest = BLOCK.sub("\n", page)
    return lines, SPAN.findall(rest), SPAN.sub(" ", rest)


def command_in(code: str) -> list[str]:
    """The words of the command that starts at `mugrpo` or at a script of run_scripts; empty without one."""
    if not PROGRAM.search(code):
        return []
    words = [word.removeprefix(".venv/bin/") for word in shlex.split(code, comments=True)]
    starts = [place for place, word in enumerate(words) if PROGRAM.fullmatch(word)]
    return words[starts[0] :] if starts else []


def commands_of(page: str) -> Iterator[str]:
    """Every command of a page. In running text, the name of a program or subcommand alone is no command."""
    lines, spans, _ = code_of(page)
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


@pytest.mark.process
@pytest.mark.parametrize(("page", "command"), PUBLISHED)
def test_a_command_of_a_page_is_stated_and_resolves_as_stated(page: str, command: str) -> None:
    assert command in STATED, f"{page}: say in STATED what `{command}` resolves to"
    program = shlex.split(command)[0]
    if program != "mugrpo":
        subprocess.run(["bash", "-n", program], check=True)
    ran = mugrpo_commands(command)
    options = [command_parser().parse_args(arguments) for arguments in ran]
    recipes = [load_recipe(getattr(one, "recipe", None), one.overrides) for one in options if hasattr(one, "overrides")]
    for name, value in STATED[command].items():
        assert resolved(name, options[-1], recipes) == value, name


def resolved(name: str, options: argparse.Namespace, recipes: list[Recipe]) -> object:
    return attrgetter(name)(recipes[-1]) if "." in name else getattr(options, name)


def test_nothing_is_stated_of_a_command_that_no_page_has() -> None:
    assert set(STATED) == {command for _, command in PUBLISHED}


@pytest.mark.parametrize("page", EVERY)
def test_every_mugrpo_command_of_a_page_parses(page: str) -> None:
    for command in commands_of(Path(page).read_text(encoding="utf-8")):
        if "torchrun.sh" not in command and "COMMAND" not in command:
            for arguments in mugrpo_commands(command.replace("--nodes N", "--nodes 2")):
                command_parser().parse_args(arguments)


def test_no_page_has_a_command_outside_of_code() -> None:
    for page in PAGES:
        _, _, prose = code_of(Path(page).read_text(encoding="utf-8"))
        assert not re.search(r"\bmugrpo [a-z]|run_scripts/\w+\.sh\b", re.sub(r"\]\([^)]*\)", "]", prose)), page


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
