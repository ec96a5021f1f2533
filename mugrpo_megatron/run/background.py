"""One piece of work at a time in a thread, while training continues; its error is raised where the run waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Work in a thread called `name`. The process may end without it: the thread is a daemon."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin `work`; call `wait` before the next."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the last work has ended; raises what it raised."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
