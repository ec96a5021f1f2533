"""The exceptions that end a command, with their exit codes."""

from __future__ import annotations

import errno

REFUSALS = {
    errno.EACCES: "choose a place that this user may read and write",
    errno.EPERM: "choose a place that this user may read and write",
    errno.EROFS: "choose a place that can be written",
    errno.ENOSPC: "free some space and run the same command again",
    errno.EDQUOT: "free some space and run the same command again",
    errno.EFBIG: "raise this shell's limit of file sizes (`ulimit -f`) and run the same command again",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "remove the loop of symbolic links",
    errno.ENOTDIR: "choose a path whose parents are all directories",
    errno.EISDIR: "choose the path of a file",
}
"""Number of a system error that only the user can mend -> what to do, the end of the message."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the system errors of a write that finds no space. Such an error may lack the name of its file."""


def way_out(error: OSError, otherwise: str) -> str:
    """What the user can do about a system error, from `REFUSALS`; `otherwise` for an error that is not in it."""
    return REFUSALS.get(error.errno or 0, otherwise)


class UserError(Exception):
    """Raised for a mistake that the user can fix; the text says what is wrong, where, and the way out.

    Commands print it as one sentence on stderr, without a traceback, and exit with 2.
    """


class RewardFailure(UserError):
    """Raised when a reward function fails on too many responses."""

    def __init__(self, sentence: str, key: str) -> None:
        """`key` is the recipe's key that names the function."""
        super().__init__(sentence)
        self.key = key


class TrainingFailure(Exception):
    """Raised when training cannot continue; the text says what happened, what was saved, and what to try. Commands exit
    with 1."""


class FunctionFailure(UserError, TrainingFailure):
    """Raised when a user's function for the loss fails or returns something wrong. Commands exit with 2."""


class CollectiveFailure(RuntimeError):
    """Raised when a collective or barrier fails; the text names this rank, the phase, the likely cause, and each rank's
    last activity."""


class EngineFailure(Exception):
    """Raised when an engine dies, hangs or answers with an error; the text has the cause and the end of its log."""


def refused_by_system(error: OSError) -> str | None:
    """A sentence about a system error that only the user can mend: rights, space or names.

    None for other errors, and for an error that names no file, unless it is about space.
    """
    if error.errno not in REFUSALS or not (isinstance(error.filename, str | bytes) or error.errno in NO_ROOM):
        return None
    name = error.filename or "a file"
    name = name if isinstance(name, str) else name.decode("utf-8", "backslashreplace")
    return f"{name}: {error.strerror}; {REFUSALS[error.errno]}"


class EngineStopped(EngineFailure):
    """Raised when the run is asked to stop while it waits for an engine. The run has then ended the engine.

    The engine did not fail.
    """
