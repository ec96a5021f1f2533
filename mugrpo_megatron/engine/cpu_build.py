"""Compiles the C functions of `cpu_source` at an engine's start, next to the imports of SGLang, which take longer.

Nothing is kept on disk: a library built before could be of another machine.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mugrpo_megatron.engine.cpu_source import SOURCE

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"]
"""Sums in any order, so that they are vectorised; `-ffast-math` would also change how torch rounds tiny numbers."""
SHARED = "-fopenmp"
"""Threads that share a call. Not every compiler has them; without, each call runs on one thread."""
WIDE = ["-mprefer-vector-width=512"]
"""On x86, where compilers take half of a register by default."""
BUILD_SECONDS = 60.0


class Build:
    """A compiler at work."""

    def __init__(self) -> None:
        """Start the compiler; returns at once."""
        self._folder = tempfile.TemporaryDirectory(prefix="mugrpo-kernels-")
        self._library = Path(self._folder.name) / "kernels.so"
        self._compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
        self._process = self._start(self._compiler, SHARED) if self._compiler else None

    def wait(self) -> ctypes.CDLL | None:
        """The library; None, with a line in the engine's log, where it cannot be built."""
        cause = f"no C compiler ({', '.join(COMPILERS)}) was found"
        with self._folder:
            if self._compiler and self._process:
                try:
                    code = self._ended(self._process) and self._ended(self._start(self._compiler))
                    if code == 0:
                        return ctypes.CDLL(str(self._library))
                    cause = f"the C compiler ended with {code}"
                except subprocess.TimeoutExpired:
                    cause = f"the C compiler did not end within {BUILD_SECONDS:g} s"
                except OSError as error:
                    cause = f"the compiled library cannot be loaded ({error})"
        print(f"{cause}: torch's operations decode instead, at a fraction of the speed", file=sys.stderr)
        return None

    def _start(self, compiler: str, *flags: str) -> subprocess.Popen[bytes]:
        source = self._library.with_suffix(".c")
        source.write_text(SOURCE, encoding="utf-8")
        wide = WIDE if platform.machine() == "x86_64" else []
        return subprocess.Popen(
            [compiler, *FLAGS, *flags, *wide, "-shared", "-fPIC", str(source), "-o", str(self._library), "-lm"]
        )

    def _ended(self, process: subprocess.Popen[bytes]) -> int:
        """The compiler's exit code; ends it where it takes too long."""
        try:
            return process.wait(BUILD_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
