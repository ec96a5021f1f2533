"""The failures that end a command, and their exit codes."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can fix: says what is wrong, where, and how to fix it.

    Commands print it as one sentence on stderr and exit with 2; never as a traceback.
    """


class TrainingFailure(Exception):
    """Training cannot continue: says what happened, what was saved, and what to try. Commands exit with 1."""


class CollectiveFailure(RuntimeError):
    """Ranks lost contact: names this rank, the phase it was in, the likely cause and what each rank was doing."""


class EngineFailure(Exception):
    """The generation engine died, hung or answered with an error; carries the cause and the engine's log tail."""
