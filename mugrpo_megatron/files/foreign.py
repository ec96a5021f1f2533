"""Files that another library reads: its exceptions become one-sentence errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mugrpo_megatron.errors import UserError

SHOWN = 200
"""Characters of the library's own message."""


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Raise UserError, "`path` is not `what`", for anything but a UserError that the block raises.

    Also for what is no Exception: a panic of a library in Rust derives from BaseException.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:SHOWN] or type(error).__name__
        raise UserError(f"{path} is not {what} ({reason}); restore it from its source") from None
