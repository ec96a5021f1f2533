"""The `mugrpo` command: parses, calls one function, turns failures into exit codes."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from mugrpo_megatron import __version__
from mugrpo_megatron.commands.command import Command, say
from mugrpo_megatron.commands.table import COMMANDS
from mugrpo_megatron.cpu.heap import keep_freed_memory
from mugrpo_megatron.engine.placement import rank_of_environment
from mugrpo_megatron.errors import CollectiveFailure, EngineFailure, TrainingFailure, UserError, refused_by_system
from mugrpo_megatron.observe.environment import leave_out_library_warnings, may_find_cuda
from mugrpo_megatron.observe.streams import lasting_output, visible
from mugrpo_megatron.recipe.other_trainers import translated
from mugrpo_megatron.run.stopping import Stopped, stoppable

LINE_BREAK = re.compile(r"\s*\n\s*")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns 0 when done, 2 on the user's mistake, 1 when training or an engine failed.

    Any other failure is a bug: traceback and 1.
    """
    if not may_find_cuda():
        keep_freed_memory()
    options = _options(arguments)
    leave_out_library_warnings()
    command: Command = options.command
    with ExitStack() as stack:
        if command.long:
            stack.enter_context(lasting_output())
        if command.stops:
            stack.enter_context(stoppable(rank_of_environment() == 0))
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
    except BrokenPipeError:  # `mugrpo rollouts RUN_DIR | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if (said := refused_by_system(error)) is None:
            raise
        _complain(said)
        return 2


def _complain(text: str) -> None:
    print(f"mugrpo: {visible(text)}", file=sys.stderr)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed arguments; exits with 2 for one that no command takes, and says which key it is of a recipe."""
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        meant = filter(None, (translated(word.partition("=")[0]) for word in unknown if word.startswith("--")))
        parser.error("; ".join([f"unrecognized arguments: {' '.join(unknown)}", *meant]))
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mugrpo", description="mu-GRPO with Megatron-core and SGLang")
    parser.add_argument("--version", action="version", version=f"mugrpo {__version__}")
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        own = parsers.add_parser(command.name, help=command.help)
        command.takes(own)
        own.set_defaults(command=command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
