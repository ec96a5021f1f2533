"""The `mugrpo` command: parses arguments, calls the function of a command, and turns failures into exit codes.

The functions of a command are imported when the command is called, because some import Megatron and SGLang, which takes
seconds.
"""

from __future__ import annotations

import argparse
import difflib
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from mugrpo_megatron import __version__
from mugrpo_megatron.commands.common import say
from mugrpo_megatron.cpu.heap import keep_freed_memory
from mugrpo_megatron.cuda import may_find_cuda
from mugrpo_megatron.errors import (
    NO_ROOM,
    REFUSALS,
    CollectiveFailure,
    EngineFailure,
    TrainingFailure,
    UserError,
    refused_by_system,
)
from mugrpo_megatron.files.home import expanded_words
from mugrpo_megatron.observe.environment import commit, ignore_library_warnings, rank_of_environment
from mugrpo_megatron.pages import page_address
from mugrpo_megatron.run.stopping import Stopped, Terminated, stoppable, terminable
from mugrpo_megatron.terminal import drop_output, ending_at_once, ignore_broken_pipe, in_utf8, visible

CONTINUES = "the same command continues the run"
STARTS_OVER = "nothing was written, the same command starts over"
LINE_BREAK = re.compile(r"\s*\n\s*")
SUMMARY = """\
Trains language models with mu-GRPO, GRPO and other objectives: samples the responses of many updates (a stage), scores
them, takes the updates, and repeats."""
EXAMPLES = """\
  mugrpo train quickstart.toml --dry-run          check a bundled recipe
  mugrpo train my.toml --set optimizer.lr=1e-6    train with one value changed
  mugrpo report runs/mine                         a page about what it does"""


Functions = tuple[Callable[[argparse.Namespace], int], Callable[[argparse.ArgumentParser], None]]
"""The two functions of a command: the first runs it with the parsed options and returns the exit code, the second adds
its arguments to a parser."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `mugrpo`."""

    group: str
    """Heading under which `mugrpo --help` lists the command."""
    name: str
    help: str
    """What the command does, in at most 67 characters."""
    load: Callable[[], Functions]
    """Imports the command's two functions and returns them."""
    interrupted: str = STARTS_OVER
    """What the message after Ctrl-C or SIGTERM says about running the command again."""
    long: bool = False
    """Whether the command goes on if the reader of its output has ended; if not, it exits with 0 (`mugrpo rollouts |
    head`)."""
    stops: bool = False
    """Whether SIGTERM ends the command with exit code 0 at any time, and the same command continues what it did."""

    def run(self, options: argparse.Namespace) -> int:
        """Run the command, and return its exit code; `_run` handles what it raises."""
        run, _ = self.load()
        return run(options)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _, add_arguments = self.load()
        add_arguments(parser)


def _trains(group: str, name: str, help: str, load: Callable[[], Functions]) -> Command:
    """Make a command that SIGTERM may stop at any time, and that continues its run when it is called again."""
    return Command(group, name, help, load, CONTINUES, long=True, stops=True)


def _sft() -> Functions:
    from mugrpo_megatron.commands.training import sft, sft_arguments

    return sft, sft_arguments


def _sweep() -> Functions:
    from mugrpo_megatron.extras.sweep.command import sweep, sweep_arguments

    return sweep, sweep_arguments


def _seal() -> Functions:
    from mugrpo_megatron.commands.training import seal, seal_arguments

    return seal, seal_arguments


def _doctor() -> Functions:
    from mugrpo_megatron.extras.doctor.doctor import doctor, doctor_arguments

    return doctor, doctor_arguments


def _plan() -> Functions:
    from mugrpo_megatron.extras.plan.command import plan, plan_arguments

    return plan, plan_arguments


def _score() -> Functions:
    from mugrpo_megatron.commands.reading import score, score_arguments

    return score, score_arguments


def _report() -> Functions:
    from mugrpo_megatron.commands.reading import report, report_arguments

    return report, report_arguments


def _rollouts() -> Functions:
    from mugrpo_megatron.commands.reading import rollouts, rollouts_arguments

    return rollouts, rollouts_arguments


def _evaluate() -> Functions:
    from mugrpo_megatron.commands.reading import evaluate, evaluate_arguments

    return evaluate, evaluate_arguments


def _publish_stage() -> Functions:
    from mugrpo_megatron.extras.exchange.commands import publish_stage, publish_stage_arguments

    return publish_stage, publish_stage_arguments


def _import_stage() -> Functions:
    from mugrpo_megatron.extras.exchange.commands import import_stage, import_stage_arguments

    return import_stage, import_stage_arguments


def _convert() -> Functions:
    from mugrpo_megatron.commands.reading import convert, convert_arguments

    return convert, convert_arguments


def _train() -> Functions:
    from mugrpo_megatron.commands.training import train, train_arguments

    return train, train_arguments


def _generate() -> Functions:
    from mugrpo_megatron.commands.training import generate, generate_arguments

    return generate, generate_arguments


def _optimize() -> Functions:
    from mugrpo_megatron.commands.training import optimize, optimize_arguments

    return optimize, optimize_arguments


TRAIN, PARTS, BEFORE, LOOK, EXCHANGE = "Train", "A run in parts", "Before a run", "Look at a run", "Exchange"
COMMANDS = (
    _trains(TRAIN, "train", "train a model as a recipe says; the same command resumes", _train),
    Command(TRAIN, "sft", "fine-tune a model on your rows, or make a small one", _sft, long=True),
    Command(
        TRAIN,
        "sweep",
        "compare objectives and rates on the responses of one stage",
        _sweep,
        "the same command continues the sweep",
        long=True,
        stops=True,
    ),
    _trains(PARTS, "generate", "only sample, score and seal the stage at which a run stands", _generate),
    Command(PARTS, "seal", "close a stage of `generate --engine-only` processes", _seal),
    _trains(PARTS, "optimize", "only take the updates of a sealed stage, without an engine", _optimize),
    Command(BEFORE, "doctor", "say what this machine has, needs and lacks", _doctor),
    Command(BEFORE, "plan", "estimate memory, hours and layouts of a run without running it", _plan),
    Command(BEFORE, "score", "score a file of responses with a reward function", _score),
    Command(LOOK, "report", "write a page about one run or several", _report),
    Command(LOOK, "rollouts", "show and search a stage's responses, and what the veto drops", _rollouts),
    Command(
        LOOK,
        "eval",
        "measure a checkpoint on data sets: mean@k, pass@k, majority@k",
        _evaluate,
        "the same command continues the evaluation",
        long=True,
    ),
    Command(EXCHANGE, "publish", "write a stage as a data set that others can train on", _publish_stage),
    Command(EXCHANGE, "import", "make a stage of another program's rollouts", _import_stage),
    Command(EXCHANGE, "convert", "convert checkpoints between Hugging Face and Megatron", _convert),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    It is 0 when done or when SIGTERM has stopped a command with `Command.stops`, 2 after a user's mistake or where the
    system lacks space or refuses a file, 1 if training, an engine or a collective failed, 130 after Ctrl-C, and 143
    after SIGTERM in any other command. Any other failure is a bug: the command prints a traceback and exits with 1.
    """
    if arguments is not None:
        return _main(arguments)
    in_utf8()
    with ending_at_once() as ending:
        ending.code = _main(sys.argv[1:])
        return ending.code


def _main(arguments: Sequence[str]) -> int:
    words = expanded_words(list(arguments))
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
        code = command.run(options)
        sys.stdout.flush()  # on a full disk the error of the last lines is raised here
        return code
    except UserError as error:
        _complain(LINE_BREAK.sub(" ", str(error)))  # the error may quote a library's message of several lines
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
        if rank_of_environment() == 0:  # torchrun sends SIGTERM to every rank, and one message is enough
            _complain(f"terminated; {command.interrupted}")
        return 128 + signal.SIGTERM
    except BrokenPipeError:  # the reader of the output has ended, as in `mugrpo rollouts RUN_DIR | head`
        drop_output(sys.stdout)
        return 0
    except OSError as error:
        if error.errno in NO_ROOM and error.filename is None:
            drop_output(sys.stdout)
            _complain(f"the output cannot be written ({error.strerror}); send it elsewhere, or {REFUSALS[error.errno]}")
            return 2
        if (sentence := refused_by_system(error)) is None:
            raise
        _complain(sentence)
        return 2


def _complain(text: str) -> None:
    print(f"mugrpo: {visible(text)}", file=sys.stderr)


def overview() -> str:
    """The text of `mugrpo --help`: the commands by group, examples, and the address of the pages."""
    paragraphs = ["usage: mugrpo COMMAND [ARGUMENTS]", "\n".join(textwrap.wrap(SUMMARY, 80))]
    for group, commands in groupby(COMMANDS, attrgetter("group")):
        paragraphs.append("\n".join([f"{group}:", *(f"  {command.name:12}{command.help}" for command in commands)]))
    paragraphs += [
        f"Examples:\n{EXAMPLES}",
        f"mugrpo COMMAND --help lists the command's arguments.\nPages: {page_address('README')}",
    ]
    return "\n\n".join(paragraphs)


def _no_command(word: str) -> str:
    """The message about the first argument `word` if it names no command, with a guess at what was meant."""
    if close := difflib.get_close_matches(word, [command.name for command in COMMANDS], n=1):
        return f"there is no command `{word}`; did you mean `mugrpo {close[0]}`?"
    way_out = f"did you mean `mugrpo train {word}`?" if word.endswith(".toml") else "`mugrpo --help` lists all"
    return f"there is no command `{word}`; {way_out}"


def _options(command: Command, words: Sequence[str]) -> argparse.Namespace:
    """Parse the command's arguments `words`; if one is unknown, print a hint and exit with code 2."""
    parser = command_parser(command.name)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        _complain("; ".join([f"unrecognized arguments: {' '.join(unknown)}", *filter(None, map(_hint, unknown))]))
        sys.exit(2)
    return options


def _hint(word: str) -> str:
    """A sentence about what was probably meant by an unknown argument; empty if nothing is known."""
    # Not at the top: it imports pydantic, which takes a fifth of a second.
    from mugrpo_megatron.recipe.other_trainers import translate_key

    if word.startswith("--"):
        return translate_key(word.partition("=")[0])
    return f"each key needs its own --set: `--set {word}`" if "=" in word else ""


def command_parser(name: str | None = None) -> argparse.ArgumentParser:
    """Make the parser of `mugrpo`, with the arguments of the command `name` or, with None, of all commands."""
    parser = argparse.ArgumentParser(prog="mugrpo")
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = parsers.add_parser(command.name, description=f"{command.help[0].upper()}{command.help[1:]}.")
        if name in (None, command.name):
            command.add_arguments(subparser)
        subparser.set_defaults(command=command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
