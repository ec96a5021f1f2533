"""The `mugrpo` command: parses, calls one function, turns failures into exit codes.

Megatron and SGLang take seconds to import, so a command's functions are named here and imported when it is called.
The names are text: the core imports no extra.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from mugrpo_megatron import __version__
from mugrpo_megatron.commands.common import say
from mugrpo_megatron.cpu.heap import keep_freed_memory
from mugrpo_megatron.engine.placement import rank_of_environment
from mugrpo_megatron.errors import CollectiveFailure, EngineFailure, TrainingFailure, UserError, refused_by_system
from mugrpo_megatron.observe.environment import leave_out_library_warnings, may_find_cuda
from mugrpo_megatron.observe.streams import lasting_output, visible
from mugrpo_megatron.recipe.other_trainers import translated
from mugrpo_megatron.run.stopping import Stopped, Terminated, stoppable, terminable

CORE, EXTRAS = "mugrpo_megatron.commands", "mugrpo_megatron.extras"
CONTINUES = "the same command continues the run"
STARTS_OVER = "nothing was written, the same command starts over"
LINE_BREAK = re.compile(r"\s*\n\s*")


@dataclass(frozen=True, slots=True)
class Command:
    """One command."""

    name: str
    help: str
    door: str
    """`module:function`: function(options) returns the exit code; `function_arguments(parser)` adds its arguments."""
    interrupted: str = STARTS_OVER
    """What a user who pressed Ctrl-C may do next."""
    long: bool = False
    """Whether it goes on when nothing reads its output any more; else it ends with 0: `mugrpo rollouts | head`."""
    stops: bool = False
    """Whether SIGTERM ends it with exit code 0 at any time, and the same command goes on."""

    def run(self, options: argparse.Namespace) -> int:
        """The exit code; raises as `main` describes."""
        return int(self._function()(options))

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add its arguments to its parser."""
        self._function("_arguments")(parser)

    def _function(self, suffix: str = "") -> Callable[..., Any]:
        module, _, name = self.door.partition(":")
        function: Callable[..., Any] = getattr(import_module(module), name + suffix)
        return function


def _trains(name: str, help: str) -> Command:
    """A command that continues a run, and that a batch system may stop."""
    return Command(name, help, f"{CORE}.training:{name}", CONTINUES, long=True, stops=True)


COMMANDS = (
    _trains("train", "stages of generate -> optimize, from a recipe"),
    _trains("generate", "only generate, score and seal the stage at which a run stands"),
    Command("seal", "close a stage that `generate --engine-only` processes have generated", f"{CORE}.training:seal"),
    _trains("optimize", "only take the updates of a sealed stage, without an engine"),
    Command(
        "sweep",
        "objectives, rates, thresholds and scopes compared on one sealed stage",
        f"{EXTRAS}.sweep.command:sweep",
        "the same command continues the sweep",
        long=True,
        stops=True,
    ),
    Command(
        "sft",
        "supervised learning: a model on your rows, or a new one as a warm start",
        f"{CORE}.training:sft",
        long=True,
    ),
    Command(
        "eval",
        "accuracy of a checkpoint on data sets: mean@k, pass@k, majority@k",
        f"{CORE}.reading:evaluate",
        "the same command continues the evaluation",
        long=True,
    ),
    Command("score", "score a file of responses: rows {response, answer} gain a reward", f"{CORE}.reading:score"),
    Command("plan", "memory, time and layouts of a run on any cluster, on paper", f"{EXTRAS}.plan.command:plan"),
    Command(
        "rollouts",
        "show and search a stage's responses, and what the veto takes out of them",
        f"{CORE}.reading:rollouts",
    ),
    Command(
        "publish", "a stage as a data set that trains again, with a card", f"{EXTRAS}.exchange.commands:publish_stage"
    ),
    Command("import", "rollouts of another program as a stage to train on", f"{EXTRAS}.exchange.commands:import_stage"),
    Command("report", "a page about a run, or about several; live while a run goes on", f"{CORE}.reading:report"),
    Command("doctor", "what this machine has, what it is used for, what is missing", f"{CORE}.reading:doctor"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns 0 when done, 2 on the user's mistake, 1 when training or an engine failed, 130 after
    Ctrl-C and 143 after SIGTERM where that cannot be continued.

    Any other failure is a bug: traceback and 1.
    """
    if not may_find_cuda():
        keep_freed_memory()
    options = _options(sys.argv[1:] if arguments is None else arguments)
    leave_out_library_warnings()
    command: Command = options.command
    with ExitStack() as stack:
        if command.long:
            stack.enter_context(lasting_output())
        stack.enter_context(stoppable(rank_of_environment() == 0) if command.stops else terminable())
        return _run(command, options)


def _run(command: Command, options: argparse.Namespace) -> int:
    """`main` for one command."""
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
    except Terminated:
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


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed arguments; exits with 2 for one that no command takes, and says which key it is of a recipe."""
    parser = command_parser(next((word for word in arguments if not word.startswith("-")), ""))
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        meanings = filter(None, (translated(word.partition("=")[0]) for word in unknown if word.startswith("--")))
        parser.error("; ".join([f"unrecognized arguments: {' '.join(unknown)}", *meanings]))
    return options


def command_parser(name: str | None = None) -> argparse.ArgumentParser:
    """The parser of `mugrpo`, with the arguments of the command `name` alone, or of all commands."""
    parser = argparse.ArgumentParser(prog="mugrpo", description="mu-GRPO with Megatron-core and SGLang")
    parser.add_argument("--version", action="version", version=f"mugrpo {__version__}")
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = parsers.add_parser(command.name, help=command.help)
        if name in (None, command.name):
            command.add_arguments(subparser)
        subparser.set_defaults(command=command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
