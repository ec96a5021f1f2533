"""Opens a safetensors file, whose header the library checks. Importing this module imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mugrpo_megatron.errors import UserError


@contextmanager
def open_weights(path: Path, framework: str = "numpy") -> Iterator[Any]:
    """Yield the library's handle of a file. Raises UserError if the file is damaged or cannot be read.

    `framework`: `numpy`, or `pt` for tensors of torch; the library imports it when the file is opened.
    """
    try:
        with safe_open(path, framework=framework) as opened:
            yield opened
    except SafetensorError as error:
        raise UserError(f"{path} is truncated or not a safetensors file ({error}); download it again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); check its permissions") from None
