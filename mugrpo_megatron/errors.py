"""The kinds of failure a command can end with, and their exit codes."""

from __future__ import annotations


class UserError(Exception):
    """A mistake that the user can fix: says what is wrong, where, and how to fix it.

    Commands print it as one sentence on stderr and exit with 2; it never shows a traceback.
    """


class TrainingFailure(Exception):
    """Training cannot continue: says what happened, what was saved, and what to try. Commands exit with 1."""


class CollectiveFailure(RuntimeError):
    """A collective or barrier failed: names this rank, its phase, the likely cause and what each rank did last."""


class EngineFailure(Exception):
    """The generation engine died, hung or answered with an error; carries the cause and the end of the engine's log."""


class EngineStopped(EngineFailure):
    """The run was asked to stop while it waited for the engine, which was ended: not a failure of the engine."""
