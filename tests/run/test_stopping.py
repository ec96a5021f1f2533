"""SIGTERM and Ctrl-C as a request: who hears of it, and what ends at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mugrpo_megatron.run import stopping
from mugrpo_megatron.run.stopping import Stopped, StopRequest, handle_signals, stoppable


@pytest.fixture(autouse=True)
def in_the_foreground() -> Iterator[None]:
    """A suite in the background ignores Ctrl-C, and one under nohup SIGHUP; these tests do not."""
    usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 130)])
def test_a_signal_is_a_request(number: signal.Signals, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with handle_signals(is_main=True) as request:
        assert not request.poll()
        signal.raise_signal(number)
        assert request.requested
        assert request.poll()
        signal.raise_signal(number)  # torchrun passes on what the terminal has sent to its ranks as well
    said = capfd.readouterr().err
    assert said == stopping.signal_message(number), "it is said once"
    assert ("Ctrl-C" in said) is (number == signal.SIGINT)
    assert signal.getsignal(number) is before
    stopped = request.stopped("this")
    assert (str(stopped), stopped.code) == ("this", code)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_stays_ignored(number: signal.Signals) -> None:
    """Ctrl-C in a command in the background, SIGHUP under nohup."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with handle_signals(is_main=True) as request:
            signal.raise_signal(number)
        assert not request.requested
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_signal_is_a_request_when_nothing_reads_its_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `mugrpo train RECIPE 2>&1 | tee log`, where Ctrl-C ends tee as well."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as unread, handle_signals(is_main=True) as request:
        monkeypatch.setattr(sys, "stderr", unread)
        signal.raise_signal(signal.SIGTERM)
        assert request.requested


@pytest.mark.parametrize("is_main", [True, False])
def test_sigterm_before_and_after_a_run_ends_with_0(is_main: bool, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, stoppable(is_main):  # noqa: PT012
        with handle_signals(is_main=False) as request:
            signal.raise_signal(signal.SIGTERM)
            assert request.requested, "an open run is asked, and saves"
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 0
    assert capfd.readouterr().err == stopping.STOPPED_MESSAGE * is_main
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_later_ctrl_c_ends_at_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(stopping, "REPEAT_AFTER_S", -1.0)
    with handle_signals(is_main=False):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == "", "only the main rank says so"


def test_where_nothing_has_to_be_saved_a_signal_ends_the_run_at_once() -> None:
    with handle_signals(is_main=False) as request:
        with pytest.raises(Stopped, match="all is on disk"), request.at_once("all is on disk"):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped, match="on disk too"), request.at_once("on disk too"):
            raise AssertionError("it began although it was asked before")
    with handle_signals(is_main=False) as later:
        with later.at_once("all is on disk"):
            pass
        signal.raise_signal(signal.SIGTERM)  # after such a part it only asks
        assert later.requested


@pytest.mark.parametrize("asked", [True, False])
def test_a_collective_that_fails_because_another_rank_has_stopped(asked: bool) -> None:
    """This rank heard of the request in another way than by a signal."""
    request = StopRequest()
    with pytest.raises(Stopped if asked else RuntimeError), request.at_once("kept"):  # noqa: PT012
        request.requested = asked
        raise RuntimeError("connection closed by peer")


class Peers:
    """The counter that ranks share."""

    def __init__(self) -> None:
        self.asked = 0
        self.looks = 0

    def __call__(self, announce: bool) -> bool:
        self.asked += announce
        self.looks += 1
        return self.asked > 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_a_rank_hears_of_a_request_to_another(clock: Callable[[float], None]) -> None:
    peers = Peers()
    one, two = StopRequest(peers=peers), StopRequest(peers=peers)
    assert not one.poll()
    assert not two.poll()
    two.request()
    assert two.poll()
    assert not one.poll(), "it looks once a second"
    clock(stopping.POLL_INTERVAL_S)
    assert one.poll()


def test_a_rank_that_ends_asks_no_other(clock: Callable[[float], None]) -> None:
    """What it closes then may look once more."""
    peers = Peers()
    request = StopRequest(peers=peers)
    request.detach()
    assert not request.poll()
    request.request()
    assert request.poll()
    assert peers.looks == 0


def test_a_request_is_told_once_and_looked_for_once_a_second(clock: Callable[[float], None]) -> None:
    peers = Peers()
    request = StopRequest(peers=peers)
    for _ in range(10):
        request.poll()
    assert peers.looks == 1
    request.request()
    for _ in range(10):
        request.poll()
    assert peers.looks == 2
    for _ in range(3):
        clock(stopping.POLL_INTERVAL_S)
        request.poll()
    assert (peers.looks, peers.asked) == (5, 1), "it still hears of failures"
