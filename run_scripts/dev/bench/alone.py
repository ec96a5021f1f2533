"""Runs one part of a benchmark in a process of its own, with a time limit, and keeps the logs of one that fails."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """The outcome of a part that has ended."""

    code: int | None
    """Exit code; None if the part was killed at its time limit."""
    output: str
    """Its output."""
    scratch: Path
    """Folder of its temporary files; what it printed is in `output.log` and `errors.log`."""

    @property
    def failure(self) -> str:
        """The reason why the part failed, in one line; "" if it did not."""
        if self.code == 0:
            return ""
        if self.code is None:
            return "not done at its time limit"
        lines = (self.scratch / "errors.log").read_text(errors="replace").strip().splitlines()[-1:]
        if self.code < 0:  # such a process may have said nothing of it, so its last line may be about something else
            return ": ".join([f"ended by {signal.Signals(-self.code).name}", *lines])
        return lines[0] if lines else f"ended with code {self.code}"


@contextmanager
def run_alone(arguments: Sequence[str], limit_s: float) -> Iterator[Ended]:
    """Run `python *arguments` in its own process group to its end or its time limit; then yield the outcome.

    The folder of its temporary files exists until the block ends, so that the logs of a part that was killed can be
    read.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        scratch = Path(folder)
        with (scratch / "output.log").open("w") as output, (scratch / "errors.log").open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=output,
                stderr=errors,
                start_new_session=True,
                env={"TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/inductor", **os.environ, "TMPDIR": folder},
            )
            code: int | None = None
            try:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(limit_s)
            finally:  # also after Ctrl-C
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        yield Ended(code, (scratch / "output.log").read_text(errors="replace"), scratch)


def keep_logs(scratch: Path, logs: Path, part: str) -> list[str]:
    """Copy every log under `scratch` into `logs`, under names that begin with the part's; returns the names."""
    names = []
    for log in sorted(scratch.rglob("*.log")):
        if log.stat().st_size:
            logs.mkdir(parents=True, exist_ok=True)
            names.append("-".join([part, *log.relative_to(scratch).parts]))
            shutil.copy(log, logs / names[-1])
    return names
