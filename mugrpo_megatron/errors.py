"""The kinds of failure a command can end with, and their exit codes."""

from __future__ import annotations

import errno

REFUSALS = {
    errno.EACCES: "choose a place that this user may read and write",
    errno.EPERM: "choose a place that this user may read and write",
    errno.EROFS: "choose a place that can be written",
    errno.ENOSPC: "free some space and run the same command again",
    errno.EDQUOT: "free some space and run the same command again",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "remove the loop of symbolic links",
    errno.ENOTDIR: "one of its parents is a file",
    errno.EISDIR: "it is a directory",
}
"""What the operating system refuses for reasons that only the user can change -> the way out."""


class UserError(Exception):
    """A mistake that the user can fix: says what is wrong, where, and how to fix it.

    Commands print it as one sentence on stderr and exit with 2; it never shows a traceback.
    """


class RewardFailure(UserError):
    """A reward function failed on too many responses."""

    def __init__(self, sentence: str, key: str) -> None:
        """`key` is the recipe's that names the function."""
        super().__init__(sentence)
        self.key = key


class TrainingFailure(Exception):
    """Training cannot continue: says what happened, what was saved, and what to try. Commands exit with 1."""


class CollectiveFailure(RuntimeError):
    """A collective or barrier failed: names this rank, its phase, the likely cause and what each rank did last."""


class EngineFailure(Exception):
    """The generation engine died, hung or answered with an error; carries the cause and the end of the engine's log."""


def refused_by_system(error: OSError) -> str | None:
    """One sentence for an error that only the user can remove: rights, space, names. None for any other."""
    if error.errno not in REFUSALS or not isinstance(error.filename, str | bytes):
        return None
    name = error.filename if isinstance(error.filename, str) else error.filename.decode("utf-8", "backslashreplace")
    return f"{name}: {error.strerror}; {REFUSALS[error.errno]}"


class EngineStopped(EngineFailure):
    """The run was asked to stop while it waited for the engine, which was ended: not a failure of the engine."""
