"""An engine without a model: answers by a function of the ids, at once or when told to."""

from __future__ import annotations

import multiprocessing.connection
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.engine.wire import Request, Sampling
from mugrpo_megatron.samples import Response

TOKENIZER = build_arithmetic_tokenizer()
EOS = int(TOKENIZER.eos_token_id)
Says = Callable[[str], str]
"""The context as text -> what the model says next; it ends its turn unless that ends with a stop text."""


class FakeEngine:
    """As much of `Engine` as episodes call. Every request is answered in the next call that waits."""

    version = 7

    def __init__(self, says: Says, slots: int = 64) -> None:
        self._says, self._slots = says, slots
        self.slot = SimpleNamespace(local_engines=1)
        self.asked: list[Request] = []
        self.aborted: list[int] = []
        self._waiting: list[Request] = []
        self.most = 0
        """Most requests at a time."""

    def slots(self, n: int) -> int:
        return self._slots

    @contextmanager
    def generation(self, sampling: Sampling) -> Iterator[None]:
        self._sampling = sampling
        yield
        self._waiting.clear()

    def submit(self, work: list[Request]) -> None:
        self.asked += work
        self._waiting += work
        self.most = max(self.most, len(self._waiting))

    def abort(self, keys: Collection[int]) -> None:
        self.aborted += keys
        self._waiting = [request for request in self._waiting if request.key not in keys]

    def poll_groups(self, others: Sequence[Any], timeout_s: float) -> list[tuple[int, list[Response]]] | None:
        if not self._waiting:
            multiprocessing.connection.wait(others, min(timeout_s, 0.05)) if others else time.sleep(0.01)
            return None
        work, self._waiting = self._waiting, []
        return [(request.key, [self._response(request)]) for request in work]

    def _response(self, work: Request) -> Response:
        text = self._says(str(TOKENIZER.decode(work.ids)))
        ids = TOKENIZER.encode(text, add_special_tokens=False)
        if not any(text.endswith(stop) for stop in (*self._sampling.stop, *work.stop)):
            ids.append(EOS)
        cut = ids[: work.max_tokens]
        return Response(
            np.array(cut, np.int32),
            -np.arange(1, len(cut) + 1, dtype=np.float32),
            "stop" if len(cut) == len(ids) else "length",
            self.version,
        )
