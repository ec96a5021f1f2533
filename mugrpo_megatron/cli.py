"""The `mugrpo` command: parses arguments, calls a function, turns failures into exit codes.

Functions are named as text and imported when their command is called: Megatron and SGLang take seconds to import, and
the core imports no extra.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from mugrpo_megatron import __version__
from mugrpo_megatron.commands.common import say
from mugrpo_megatron.cpu.heap import keep_freed_memory
from mugrpo_megatron.cuda import may_find_cuda
from mugrpo_megatron.errors import CollectiveFailure, EngineFailure, TrainingFailure, UserError, refused_by_system
from mugrpo_megatron.observe.environment import commit, ignore_library_warnings, rank_of_environment
from mugrpo_megatron.run.stopping import Stopped, Terminated, stoppable, terminable
from mugrpo_megatron.terminal import ignore_broken_pipe, visible

CORE, EXTRAS = "mugrpo_megatron.commands", "mugrpo_megatron.extras"
CONTINUES = "the same command continues the run"
STARTS_OVER = "nothing was written, the same command starts over"
LINE_BREAK = re.compile(r"\s*\n\s*")
SUMMARY = """\
Trains language models with mu-GRPO, GRPO and other objectives: samples the responses of many updates (a stage), scores
them, takes the updates, and repeats."""
EXAMPLES = """\
  mugrpo train quickstart.toml --dry-run          check a bundled recipe
  mugrpo train my.toml --set optimizer.lr=1e-6    train with one value changed
  mugrpo report runs/mine --live                  look while it trains"""
PAGES = Path(__file__).parents[1] / "docs/README.md"
"""Index of the pages, in a checkout."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `mugrpo`."""

    group: str
    """Heading in the overview."""
    name: str
    help: str
    """Line of at most 67 characters."""
    entry_point: str
    """`module:function`: `function(options)` returns the exit code, `function_arguments(parser)` adds arguments."""
    interrupted: str = STARTS_OVER
    """Hint after Ctrl-C."""
    long: bool = False
    """Whether it continues after its output's reader ends; else it ends with 0, as `mugrpo rollouts | head`."""
    stops: bool = False
    """Whether SIGTERM ends it with exit code 0 at any time, and the same command continues."""

    def run(self, options: argparse.Namespace) -> int:
        """Returns the exit code; raises what `_run` handles."""
        return int(self._function()(options))

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        self._function("_arguments")(parser)

    def _function(self, suffix: str = "") -> Callable[..., Any]:
        module, _, name = self.entry_point.partition(":")
        function: Callable[..., Any] = getattr(import_module(module), name + suffix)
        return function


def _trains(group: str, name: str, help: str) -> Command:
    """Returns a command that continues a run, and that a batch system may stop."""
    return Command(group, name, help, f"{CORE}.training:{name}", CONTINUES, long=True, stops=True)


TRAIN, PARTS, BEFORE, LOOK, EXCHANGE = "Train", "A run in parts", "Before a run", "Look at a run", "Exchange"
COMMANDS = (
    _trains(TRAIN, "train", "train a model as a recipe says; the same command resumes"),
    Command(TRAIN, "sft", "fine-tune a model on your rows, or make a small one", f"{CORE}.training:sft", long=True),
    Command(
        TRAIN,
        "sweep",
        "compare objectives and rates on the responses of one stage",
        f"{EXTRAS}.sweep.command:sweep",
        "the same command continues the sweep",
        long=True,
        stops=True,
    ),
    _trains(PARTS, "generate", "only sample, score and seal the stage at which a run stands"),
    Command(PARTS, "seal", "close a stage of `generate --engine-only` processes", f"{CORE}.training:seal"),
    _trains(PARTS, "optimize", "only take the updates of a sealed stage, without an engine"),
    Command(BEFORE, "doctor", "what this machine has, needs and lacks", f"{EXTRAS}.doctor.doctor:doctor"),
    Command(BEFORE, "plan", "memory, hours and layouts of a run, on paper", f"{EXTRAS}.plan.command:plan"),
    Command(BEFORE, "score", "score a file of responses with a reward function", f"{CORE}.reading:score"),
    Command(LOOK, "report", "a page about one run or several; live while one trains", f"{CORE}.reading:report"),
    Command(LOOK, "rollouts", "read and search a stage's responses and what is vetoed", f"{CORE}.reading:rollouts"),
    Command(
        LOOK,
        "eval",
        "accuracy of a checkpoint on data sets: mean@k, pass@k, majority@k",
        f"{CORE}.reading:evaluate",
        "the same command continues the evaluation",
        long=True,
    ),
    Command(
        EXCHANGE, "publish", "a stage as a data set that trains again", f"{EXTRAS}.exchange.commands:publish_stage"
    ),
    Command(EXCHANGE, "import", "another program's rollouts as a stage", f"{EXTRAS}.exchange.commands:import_stage"),
    Command(EXCHANGE, "convert", "checkpoints of Hugging Face and Megatron", f"{CORE}.reading:convert"),
    Command(
        "Shell",
        "completion",
        "Tab completes commands, options and recipe keys (bash, zsh)",
        "mugrpo_megatron.cli:completion",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0 when done, 2 after a user's mistake, 1 if training or an engine failed, 130 after
    Ctrl-C, and 143 after SIGTERM if that cannot be continued.

    Any other failure is a bug: traceback and 1.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] == "--version":
        print(f"mugrpo {__version__}" + (f" (commit {revision})" if (revision := commit()) else ""))
        return 0
    command = next((command for command in COMMANDS if command.name == words[0]), None)
    if command is None:
        _complain(_no_command(words[0]))
        return 2
    if not may_find_cuda():
        keep_freed_memory()
    options = _options(command, words)
    ignore_library_warnings()
    with ExitStack() as stack:
        if command.long:
            stack.enter_context(ignore_broken_pipe())
        stack.enter_context(stoppable(rank_of_environment() == 0) if command.stops else terminable())
        return _run(command, options)


def _run(command: Command, options: argparse.Namespace) -> int:
    try:
        return command.run(options)
    except UserError as error:
        _complain(LINE_BREAK.sub(" ", str(error)))  # a library's message inside it may have several lines
        return 2
    except Stopped as stopped:
        say(f"mugrpo: stopped as asked: {stopped}. The same command continues the run")
        return stopped.code
    except TrainingFailure as error:
        _complain(str(error))
        return 1
    except (EngineFailure, CollectiveFailure) as error:
        _complain(f"{error}\nThe same command continues the run.")
        return 1
    except KeyboardInterrupt:
        _complain(f"interrupted; {command.interrupted}")
        return 130
    except Terminated:  # torchrun sends it to every rank when one has failed
        if rank_of_environment() == 0:
            _complain(f"terminated; {command.interrupted}")
        return 128 + signal.SIGTERM
    except BrokenPipeError:  # `mugrpo rollouts RUN_DIR | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if (sentence := refused_by_system(error)) is None:
            raise
        _complain(sentence)
        return 2


def _complain(text: str) -> None:
    print(f"mugrpo: {visible(text)}", file=sys.stderr)


def overview() -> str:
    """Returns the text of `mugrpo --help`: commands by group, examples, and the path of the pages."""
    paragraphs = ["usage: mugrpo COMMAND [ARGUMENTS]", "\n".join(textwrap.wrap(SUMMARY, 80))]
    for group, commands in groupby(COMMANDS, attrgetter("group")):
        paragraphs.append("\n".join([f"{group}:", *(f"  {command.name:12}{command.help}" for command in commands)]))
    pages = PAGES if PAGES.exists() else "docs/README.md of the source"
    paragraphs += [f"Examples:\n{EXAMPLES}", f"mugrpo COMMAND --help lists the command's arguments.\nPages: {pages}"]
    return "\n\n".join(paragraphs)


def _no_command(word: str) -> str:
    """Returns the message for a first word that is no command."""
    if close := difflib.get_close_matches(word, [command.name for command in COMMANDS], n=1):
        return f"there is no command `{word}`; did you mean `mugrpo {close[0]}`?"
    way_out = f"did you mean `mugrpo train {word}`?" if word.endswith(".toml") else "`mugrpo --help` lists all"
    return f"there is no command `{word}`; {way_out}"


def _options(command: Command, words: Sequence[str]) -> argparse.Namespace:
    """Returns the parsed arguments; exits with 2 and a hint for an unknown one."""
    parser = command_parser(command.name)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        _complain("; ".join([f"unrecognized arguments: {' '.join(unknown)}", *filter(None, map(_hint, unknown))]))
        sys.exit(2)
    return options


def _hint(word: str) -> str:
    """Returns the likely meaning of an unknown argument; "" if there is none."""
    from mugrpo_megatron.recipe.other_trainers import translate_key  # pydantic takes a fifth of a second

    if word.startswith("--"):
        return translate_key(word.partition("=")[0])
    return f"each key needs its own --set: `--set {word}`" if "=" in word else ""


def command_parser(name: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of `mugrpo`, with the arguments of the command `name`, or of all commands."""
    parser = argparse.ArgumentParser(prog="mugrpo")
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = parsers.add_parser(command.name, description=f"{command.help[0].upper()}{command.help[1:]}.")
        if name in (None, command.name):
            command.add_arguments(subparser)
        subparser.set_defaults(command=command)
    return parser


def completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Put `source <(mugrpo completion bash)` into ~/.bashrc, or the same with zsh into ~/.zshrc."
    parser.add_argument("shell", choices=("bash", "zsh"))


def completion(options: argparse.Namespace) -> int:
    """Print a shell script that completes commands, options, files, and the recipe's keys after --set."""
    from mugrpo_megatron.recipe.load import dotted_keys

    choices = next(action.choices for action in command_parser()._actions if isinstance(action.choices, dict))
    cases = (f"    {name}) words='{' '.join(command._option_string_actions)}' ;;" for name, command in choices.items())
    if options.shell == "zsh":
        print("autoload -U +X compinit && compinit && autoload -U +X bashcompinit && bashcompinit")
    keys = " ".join(f"{key}=" for key in dotted_keys())
    print(COMPLETION.format(commands=" ".join(choices), keys=keys, cases="\n".join(cases)))
    return 0


COMPLETION = """\
_mugrpo() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words=
  if [ "$COMP_CWORD" -eq 1 ]; then words='{commands}'
  elif [ "${{COMP_WORDS[COMP_CWORD-1]}}" = --set ]; then words='{keys}'; compopt -o nospace 2>/dev/null
  elif [ "${{word#-}}" != "$word" ]; then
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _mugrpo mugrpo"""


if __name__ == "__main__":
    sys.exit(main())
