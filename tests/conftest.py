"""What every room shares: fixtures, and what a test may cost.

Only a test marked `process` starts one, so the quick tier, which leaves those out, starts none. The suite ends with the
tests that took the most CPU seconds, and says which of them took more than `SLOW_S` without being marked `slow`. That
fails nothing: an older processor takes twice as long for the same test.
"""

from __future__ import annotations

import getpass
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, settings

from tests.checkout import ROOT
from tests.cpu_seconds import Slowness, cpu_seconds
from tests.forked import STARTED

# A property fails for what is wrong, never for a machine that is busy.
settings.register_profile("untimed", deadline=None)
# `pytest -m night tests/hostile --hypothesis-profile long`: an hour of fuzzing.
settings.register_profile(
    "long", deadline=None, max_examples=20_000, suppress_health_check=list(HealthCheck), print_blob=True
)
settings.load_profile("untimed")

# Engines have temporary folders of their own, in which each would compile the same C++ again.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")

# Rewards of tests are `tests.rewards.functions:...`; no test runs in the checkout, so processes find it by this.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

# As many workers as cores run side by side; what is computed here is too small to share out.
torch.set_num_threads(1)

SLOW_S = 30.0
SLOWEST = 10
BUDGET_S = 600.0
"""CPU seconds of the whole suite, all processes together: the goal."""
LIMIT_S = 1500.0
"""Above it the suite fails, on a processor that is not slow; a slower one (`Slowness`) has as many times more."""
PROGRAMS = ("python", "bash", "sh", "mugrpo", "node", "chrom", "ip", "mount")
"""What counts as a process of a test; libraries ask others (ldconfig, fc-list) something at their first import."""

CPU_SECONDS = "CPU seconds"
TOTAL = pytest.StashKey[float]()
LIMIT = pytest.StashKey[float]()
SLOWNESS = pytest.StashKey[Slowness]()
OF_WORKERS = pytest.StashKey[float]()
STARTS = pytest.StashKey[list[str]]()
"""What the current test has started."""


@pytest.fixture(autouse=True)
def _own_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test meets what a command left in the checkout: each begins in an empty directory."""
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


@pytest.fixture
def in_checkout(monkeypatch: pytest.MonkeyPatch, _own_directory: None) -> None:
    """For what a page says to type in the checkout; it reads only."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real problem sets beside the checkout; tests that need it skip where it is absent."""
    directory = Path(__file__).parents[2] / "shared" / "data"
    if not directory.is_dir():
        pytest.skip(f"no data sets at {directory}")
    return directory


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tests.tiny.finish_run`, once for all workers: to be looked at and copied, never written to.

    What the command said is in the file `output` next to it.
    """
    from tests.tiny import finish_run

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "finished"
    with FileLock(f"{folder}.lock"):
        if not (folder / "output").exists():
            shutil.rmtree(folder, ignore_errors=True)
            output = finish_run(folder).stdout
            (folder / "output").write_text(output, encoding="utf-8")
    return folder / "run"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Among several workers the costly modules go first, so that all end at about the same time."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    costs = {item.path: 0 for item in items}
    for item in items:
        cost = 1 + (item.get_closest_marker("slow") is not None) if item.get_closest_marker("process") else 0
        costs[item.path] = max(costs[item.path], cost)
    items.sort(key=lambda item: -costs[item.path])


def pytest_configure(config: pytest.Config) -> None:
    """Take note of every process that this one starts, and of how slow it is."""
    starts = config.stash[STARTS] = []
    slowness = config.stash[SLOWNESS] = Slowness()
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(slowness)

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == STARTED:
            starts.append("a fork")
        elif event == "subprocess.Popen":
            program = os.path.basename(os.fsdecode(arguments[0]))
            if program.startswith(PROGRAMS) or program.endswith(".sh"):
                starts.append(program)

    sys.addaudithook(note)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """`gpu` tests skip where there is none."""
    item.config.stash[STARTS].clear()
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that passes fails all the same when it started a process without being marked so; its cost is noted.

    The cost is the test's own: a fixture that others share is not charged to whichever test comes first.
    """
    may_start = item.get_closest_marker("process") is not None
    before = cpu_seconds(of_children=may_start)
    result = yield
    spent = cpu_seconds(of_children=may_start) - before
    item.user_properties.append((CPU_SECONDS, spent))
    starts = item.config.stash[STARTS]
    if starts and not may_start:
        pytest.fail(f"it started {starts[0]}: mark it `process`", pytrace=False)
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Add what a worker says that it and its processes took: its fork server outlives it, so nobody could ask later."""
    config = node.config
    config.stash[OF_WORKERS] = config.stash.get(OF_WORKERS, 0.0) + getattr(node, "workeroutput", {}).get(
        CPU_SECONDS, 0.0
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The suite fails where it costs more than `LIMIT_S`; `night` has no limit. Workers leave it to the controller."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output[CPU_SECONDS] = cpu_seconds()
        return
    if session.config.option.markexpr == "night":
        return
    of_workers = session.config.stash.get(OF_WORKERS, None)
    own = time.process_time() + of_workers if of_workers is not None else cpu_seconds()
    total = session.config.stash[TOTAL] = own
    limit = session.config.stash[LIMIT] = LIMIT_S * session.config.stash[SLOWNESS].factor
    if total > limit and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The suite's CPU seconds, and the tests that took the most."""
    if total := config.stash.get(TOTAL, 0.0):
        limit = config.stash[LIMIT]
        over = ": over the limit, so the suite fails" if total > limit else ""
        terminalreporter.write_line(
            f"{total:.0f} CPU seconds in all processes (goal {BUDGET_S:.0f}, limit {limit:.0f} on this processor){over}"
        )
    spent = [
        (value, report.nodeid, value > SLOW_S and not {"slow", "night"} & report.keywords.keys())
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == CPU_SECONDS and report.when == "call"
    ]
    if sum(value for value, *_ in spent) > SLOW_S:
        terminalreporter.section("most CPU seconds")
        for value, nodeid, unmarked in sorted(spent, reverse=True)[:SLOWEST]:
            terminalreporter.write_line(f"{value:6.1f}  {nodeid}{'  (not marked slow)' * unmarked}")
