"""What every room shares: fixtures, and what a test may cost.

Only a test marked `process` starts one, so the quick tier, which leaves those out, starts none. `tests.costs` notes
what tests cost, and holds no one to it.
"""

from __future__ import annotations

import getpass
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, settings

from tests.checkout import ROOT
from tests.costs import Costs
from tests.cpu_seconds import Slowness
from tests.engine_server import start_server
from tests.forked import STARTED
from tests.remembered import remember_problems

# A property fails for what is wrong, never for a machine that is busy. The suite tries the same examples every time, so
# that no change fails by chance; the nights look for new ones.
USUAL: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("suite", max_examples=30, derandomize=True, **USUAL)
settings.register_profile("thorough", max_examples=100, derandomize=False, **USUAL)  # `make night`
# `pytest -m night tests/hostile --hypothesis-profile long`: an hour of fuzzing.
settings.register_profile(
    "long", deadline=None, max_examples=20_000, suppress_health_check=list(HealthCheck), print_blob=True
)
settings.load_profile("suite")

# Engines have temporary folders of their own, in which each would compile the same C++ again.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")

# Rewards of tests are `tests.rewards.functions:...`; no test runs in the checkout, so processes find it by this.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(ROOT), str(ROOT / "tests" / "site"), os.environ.get("PYTHONPATH")))
)

# Compiled once, for every worker, process and run, whatever the environment says.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

remember_problems()

# As many workers as cores run side by side; what is computed here is too small to share out.
torch.set_num_threads(1)

PROGRAMS = ("python", "bash", "sh", "mugrpo", "node", "chrom", "ip", "mount")
"""What counts as a process of a test; libraries ask others (ldconfig, fc-list) something at their first import."""

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


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory in which a socket's path is short enough."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real problem sets beside the checkout; tests that need it skip where it is absent."""
    directory = Path(__file__).parents[2] / "shared" / "data"
    if not directory.is_dir():
        pytest.skip(f"no data sets at {directory}")
    return directory


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `tests.tiny.save_model`, to be read only; rooms with another model have one of this name."""
    from tests.tiny import save_model

    return save_model(tmp_path_factory.mktemp("model"))


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--most-seconds", type=float, default=0.0, help="begin no test after so long; 0: no limit")
    parser.addoption("--seconds", metavar="=FILE", help="write what each test and fixture costs here (tests/costs.py)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Among several workers the costly modules go first, so that all end at about the same time.

    The first makes the finished run; those that need it come once it is there, so that no worker waits for it.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    costs = {item.path: 0 for item in items}
    needy: list[Path] = []
    for item in items:
        cost = 1 + (item.get_closest_marker("slow") is not None) if item.get_closest_marker("process") else 0
        costs[item.path] = max(costs[item.path], cost)
        if "finished_run" in getattr(item, "fixturenames", ()) and item.path not in needy:
            needy.append(item.path)
    first = max(needy, key=lambda path: costs[path], default=None)
    items.sort(key=lambda item: (item.path != first, -costs[item.path], item.path in needy))


def pytest_configure(config: pytest.Config) -> None:
    """Take note of every process that this one starts, of how slow it is, and of what tests cost."""
    starts = config.stash[STARTS] = []
    slowness = Slowness()
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(slowness)
    config.pluginmanager.register(Costs(config, slowness))
    if "not process" not in config.option.markexpr:
        start_server()  # here, for all workers

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
    """`gpu` tests skip where there is none. What a test draws does not depend on those before it in its worker."""
    item.config.stash[STARTS].clear()
    torch.manual_seed(0)
    random.seed(0)
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that passes fails all the same when it started a process without being marked so."""
    result = yield
    starts = item.config.stash[STARTS]
    if starts and item.get_closest_marker("process") is None:
        pytest.fail(f"it started {starts[0]}: mark it `process`", pytrace=False)
    return result
