"""A share of the night tests: CI takes one after the suite, so that none rots unseen.

Next to them a twelfth of the properties of the quick tests, with more examples than the suite takes.

    python -m tests.nights [NUMBER]        runs share NUMBER modulo 12; by default NUMBER is how many commits there are
    python -m tests.nights --write FILE    distributes the tests by what a run of all of them took (tests.costs)

`nights.tsv` has the share and the expected seconds of each test function, or of each of its cases where all together
take long. A test that is not in it belongs to the share that its name's checksum says.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

from tests.checkout import ROOT
from tests.costs import read

SHARES = 12
LONGEST_S = 15 * 60.0
"""Expected seconds of a share, at most, when the table is written."""
MOST_S = 20 * 60
"""Seconds after which a share begins no further test: CI has 90 minutes for everything."""
UNKNOWN_S = 10.0
"""Expected of a test that has not been measured."""
TABLE = Path(__file__).with_name("nights.tsv")
Shares = dict[str, tuple[int, float]]
"""Test function or case -> share, expected seconds."""


def read_shares(table: Path = TABLE) -> Shares:
    """What `write_shares` has written."""
    rows = (line.split("\t") for line in table.read_text(encoding="utf-8").splitlines())
    return {name: (int(share), float(seconds)) for share, seconds, name in rows}


def function_of(case: str) -> str:
    """A test's node id without its parameters."""
    return case.partition("[")[0]


def share_of(case: str, shares: Shares) -> tuple[int, float]:
    """The share that a case of a test belongs to, and its expected seconds where it is a row of its own."""
    known = shares.get(case) or shares.get(function_of(case))
    return known or (crc32(function_of(case).encode()) % SHARES, UNKNOWN_S)


def chosen(cases: Iterable[str], number: int, shares: Shares) -> tuple[list[str], float]:
    """The cases of a share, and the seconds that they are expected to take."""
    seconds: dict[str, float] = {}
    own = []
    for case in cases:
        share, expected = share_of(case, shares)
        if share == number % SHARES:
            own.append(case)
            seconds[case if case in shares else function_of(case)] = expected
    return own, sum(seconds.values())


def own_files(root: Path, number: int) -> list[Path]:
    """The test files whose names' checksums belong to a share."""
    files = (root / "tests").rglob("test_*.py")
    return [path for path in files if crc32(str(path.relative_to(root)).encode()) % SHARES == number % SHARES]


def distribute(seconds: dict[str, float]) -> Shares:
    """Shares of about the same length: the longest test first, each to the share that has the least."""
    functions: dict[str, float] = defaultdict(float)
    for case, spent in seconds.items():
        functions[function_of(case)] += spent
    units = {name: spent for name, spent in functions.items() if spent <= LONGEST_S / 4}
    units |= {case: spent for case, spent in seconds.items() if function_of(case) not in units}
    loads = [0.0] * SHARES
    found: Shares = {}
    for name, spent in sorted(units.items(), key=lambda unit: (-unit[1], unit[0])):
        share = loads.index(min(loads))
        loads[share] += max(spent, 1.0)
        found[name] = (share, spent)
    return found


def write_shares(costs: Path, table: Path = TABLE) -> None:
    """Distribute the tests of a run of all of them."""
    shares = distribute({cost.name: cost.wall for cost in read(costs) if cost.kind == "test"})
    lines = [f"{share}\t{seconds:.0f}\t{name}\n" for name, (share, seconds) in sorted(shares.items())]
    table.write_text("".join(lines), encoding="utf-8")


def collect() -> list[str]:
    """Node ids of all night tests."""
    command = [sys.executable, "-m", "pytest", "-m", "night", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return [line for line in done.stdout.splitlines() if "::" in line]


def main() -> int:
    if sys.argv[1:2] == ["--write"]:
        write_shares(Path(sys.argv[2]))
        return 0
    count = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    number = int(sys.argv[1] if len(sys.argv) > 1 else count.stdout)
    cases, seconds = chosen(collect(), number, read_shares())
    functions = sorted({function_of(case) for case in cases})
    print(
        f"night tests, share {number % SHARES} of {SHARES}, about {seconds / 60:.0f} minutes:", *functions, sep="\n  "
    )
    properties = sorted(path for path in own_files(ROOT, number) if "from hypothesis import" in path.read_text("utf-8"))
    more = ["-m", "not process and not slow and not night", "--hypothesis-profile", "thorough", "-q"]
    code = subprocess.run([sys.executable, "-m", "pytest", *more, *properties], cwd=ROOT, check=False).returncode
    first = number // SHARES % max(1, len(cases))  # so that no test is always the one that there is no time for
    command = [sys.executable, "-m", "pytest", "-m", "night", "--most-seconds", str(MOST_S)]
    return code or subprocess.run([*command, *cases[first:], *cases[:first]], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
