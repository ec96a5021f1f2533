"""Verifiers that kill no worker because the machine is busy: only one whose function has said that it hangs is late."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mugrpo_megatron.rewards import calls, dispatch
from tests.rewards.functions import NOTES


class PatientWorker(calls.Worker):
    """Of the dispatcher, which looks for late ones whenever the first may be so."""

    __slots__ = ()

    @property
    def deadline(self) -> float:  # type: ignore[override]
        hangs = Path(os.environ[NOTES], str(self.process.process.pid)).exists()
        return 0.0 if hangs else time.monotonic() + 0.05

    @deadline.setter
    def deadline(self, _: float) -> None:
        pass

    def is_late(self, limit_s: float) -> bool:
        return True


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NOTES, str(tmp_path_factory.mktemp("hangs")))
        patch.setattr(dispatch, "Worker", PatientWorker)
        yield
