"""The kinds of failure a command can end with, and their exit codes."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend: says what is wrong, where, and the way out.

    Commands print it as one sentence on stderr and exit with 2; it never shows a traceback.
    """


class TrainingFailure(Exception):
    """Training cannot go on: says what happened, what was saved, and what to try. Commands exit with 1."""


class CollectiveFailure(RuntimeError):
    """Ranks lost each other: names this rank, the phase it was in, the likely cause and what each rank did last."""


class EngineFailure(Exception):
    """The generation engine died, hung or answered with an error; carries the cause and the engine's log tail."""
