"""What tests cost: seconds of each test and fixture, starts of engines. Figures to look at: no test fails for them.

    python -m tests.costs [FILE]      sums by tier and room, the tests and fixtures that cost most, of the last run

Every run of pytest writes the seconds to FILE (`--seconds=FILE`, by default .pytest_cache/seconds.tsv): wall-clock and
CPU seconds, those of all processes that were started included. A fixture's cost is its own, not that of the test that
happens to come first. Engines are forked from a server that all workers share: the total has their seconds, no test.
"""

from __future__ import annotations

import csv
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from time import monotonic, process_time  # a test may exchange `time.monotonic`
from typing import Any, NamedTuple

import pytest

from tests.checkout import ROOT
from tests.cpu_seconds import Slowness, cpu_seconds
from tests.engine_server import server_seconds

SLOW_S = 30.0
"""CPU seconds from which a test is to be marked `slow`."""
TOP = 10
LEAST_S = 0.02
"""A fixture that takes less is not noted: looking at all processes takes milliseconds itself."""
SECONDS = ROOT / ".pytest_cache" / "seconds.tsv"
STARTS_FILE = "ENGINE_STARTS_OF_TESTS"
"""Environment variable: the file to which each process that hosts an engine adds a line."""
TIERS = ("night", "slow", "process")


class Reading(NamedTuple):
    """Wall-clock and CPU seconds."""

    wall: float
    cpu: float

    def since(self, earlier: Reading) -> Reading:
        return Reading(self.wall - earlier.wall, self.cpu - earlier.cpu)


@dataclass(frozen=True)
class Cost:
    """One line of the file."""

    kind: str
    """`test` or `fixture`."""
    name: str
    """Node id of a test; `name of module` of a fixture."""
    tier: str
    wall: float
    cpu: float

    @property
    def room(self) -> str:
        path = self.name.split("::")[0].split(" of ")[-1]
        return str(Path(path).parent) if path.endswith(".py") else path.replace(".", "/")


def tier_of(markers: Iterable[str]) -> str:
    """`night`, `slow`, `process` or `quick`."""
    names = set(markers)
    return next((tier for tier in TIERS if tier in names), "quick")


def engine_starts() -> str:
    """How many processes have hosted an engine since this session of pytest began, and how many of them were forked."""
    kinds = Path(os.environ[STARTS_FILE]).read_text(encoding="utf-8").splitlines()
    return f"{len(kinds)} engine starts ({kinds.count('forked')} forked)"


class Costs:
    """A plugin of pytest that notes what each test and fixture costs, and reports it at the end.

    With several workers each notes its own; the notes travel with pytest's reports to the controller, which writes.
    """

    def __init__(self, config: pytest.Config, slowness: Slowness) -> None:
        self.worker = "PYTEST_XDIST_WORKER" in os.environ
        self.slowness = slowness
        self.file = Path(config.option.seconds or SECONDS)
        self.most_s: float = config.option.most_seconds
        self.costs: list[Cost] = []
        self.of_workers: float | None = None
        self.total = 0.0
        self._fixtures: list[Cost] = []
        self._last = Reading(0.0, 0.0)
        self._of_children = True
        self._begin = monotonic()
        if not self.worker:
            descriptor, name = tempfile.mkstemp(prefix="engine_starts_")
            os.close(descriptor)
            os.environ[STARTS_FILE] = name

    def _read(self) -> Reading:
        return Reading(monotonic(), cpu_seconds(of_children=self._of_children))

    def pytest_runtest_setup(self) -> None:
        """Begin no test after `--most-seconds`."""
        if self.most_s and monotonic() - self._begin > self.most_s:
            pytest.skip("no time left")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Begin to count."""
        self._of_children = item.get_closest_marker("process") is not None
        self._last = self._read()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[Any]:
        """Note what a fixture costs without those that it asks for."""
        begin = monotonic()
        try:
            return (yield)
        finally:
            if monotonic() - begin > LEAST_S:
                now = self._read()
                where = fixturedef.baseid.removesuffix("/conftest.py") or "tests"
                cost = now.since(self._last)
                self._fixtures.append(Cost("fixture", f"{fixturedef.argname} of {where}", "", *cost))
                self._last = now

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Note what a test costs without its fixtures."""
        before = self._read()
        try:
            return (yield)
        finally:
            self._last = self._read()
            tier = tier_of(mark.name for mark in item.iter_markers())
            spent = Cost("test", item.nodeid, tier, *self._last.since(before))
            item.user_properties.append(("cost", astuple(spent)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """Hand over what was noted; a fixture's end is charged to no one, and shows in the total."""
        try:
            return (yield)
        finally:
            item.user_properties.extend(("cost", astuple(cost)) for cost in self._fixtures)
            self._fixtures.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what has come; the last report of a test has all."""
        if report.when == "teardown":
            self.costs += [Cost(*values) for name, values in report.user_properties if name == "cost"]  # type: ignore[misc]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Add what a worker and its processes took: its fork server outlives it, so nobody could ask later."""
        self.of_workers = (self.of_workers or 0.0) + getattr(node, "workeroutput", {}).get("cpu_seconds", 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file. A worker reports what it took."""
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["cpu_seconds"] = cpu_seconds()
            return
        self.total = cpu_seconds()
        if self.of_workers is not None:  # workers have ended, and their seconds are among those of ended children
            self.total = process_time() + self.of_workers + server_seconds()
        write(self.file, self.costs)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The suite's CPU seconds and starts of engines, and the tests that took the most."""
        if self.worker:
            return
        starts = engine_starts()
        Path(os.environ[STARTS_FILE]).unlink(missing_ok=True)
        terminalreporter.write_line(
            f"{self.total:.0f} CPU seconds in all processes, about {self.total / self.slowness.factor:.0f} on a "
            f"processor of 3.5 GHz; {monotonic() - self._begin:.0f} s, {starts}"
        )
        if self.total > SLOW_S:
            terminalreporter.section("most CPU seconds")
            for line in top(self.costs, TOP):
                terminalreporter.write_line(line)
            terminalreporter.write_line(f"python -m tests.costs {self.file} has the others")


def write(file: Path, costs: list[Cost]) -> None:
    """One line for each cost, the highest first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream, delimiter="\t", lineterminator="\n")
        for cost in sorted(costs, key=lambda cost: -cost.cpu):
            rows.writerow([cost.kind, cost.name, cost.tier, f"{cost.wall:.3f}", f"{cost.cpu:.3f}"])


def read(file: Path) -> list[Cost]:
    """What `write` has written."""
    with file.open(encoding="utf-8", newline="") as stream:
        rows = csv.reader(stream, delimiter="\t")
        return [Cost(kind, name, tier, float(wall), float(cpu)) for kind, name, tier, wall, cpu in rows]


def top(costs: list[Cost], count: int, kind: str = "test") -> list[str]:
    """The costs of a kind that took the most CPU seconds, a line each."""
    chosen = sorted((cost for cost in costs if cost.kind == kind), key=lambda cost: -cost.cpu)[:count]
    return [
        f"{cost.cpu:6.1f} {cost.wall:6.1f}  {cost.name}"
        f"{'  (not marked slow)' * (kind == 'test' and cost.cpu > SLOW_S and cost.tier not in ('slow', 'night'))}"
        for cost in chosen
    ]


def sums(costs: list[Cost], key: str) -> list[str]:
    """CPU and wall-clock seconds of the costs that share an attribute, the highest first."""
    cpu, wall, number = defaultdict[str, float](float), defaultdict[str, float](float), defaultdict[str, int](int)
    for cost in costs:
        name = getattr(cost, key) or cost.kind
        cpu[name], wall[name], number[name] = cpu[name] + cost.cpu, wall[name] + cost.wall, number[name] + 1
    return [
        f"{cpu[name]:6.1f} {wall[name]:6.1f} {number[name]:5}  {name}" for name in sorted(cpu, key=lambda n: -cpu[n])
    ]


def main() -> None:
    costs = read(Path(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)
    sections = {
        "by tier": sums(costs, "tier"),
        "by room": sums(costs, "room"),
        "fixtures": top(costs, TOP, "fixture"),
        "tests": top(costs, 40),
    }
    for title, lines in sections.items():
        print(f"\n   CPU   wall  {title}", *lines, sep="\n")


if __name__ == "__main__":
    main()
