"""No program escapes from its jail, survives it, hangs the judge, or is paid for anything but the right answer."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import tempfile
import threading
import time
import uuid
from ast import literal_eval
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from mugrpo_megatron.extras.sandbox import jail, kernel
from mugrpo_megatron.extras.sandbox.code import Grader, grade
from mugrpo_megatron.extras.sandbox.limits import Limits, Mode
from mugrpo_megatron.extras.sandbox.programs import run_program
from tests.forked import fork
from tests.hostile.programs import FUNCTIONS, PROGRAMS
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.process

FEW = (
    "a fork bomb",
    "a daemon",
    "a kill of its parent",
    "endless stdout",
    "a file without end",
    "TCP",
    "the answer's file",
)
WALL_S = 3.0
"""For one program on a busy machine; no limit of a program comes near it."""


@dataclass(frozen=True)
class Bait:
    """Where the right answer is, and what programs are told about it."""

    answer: str
    names: str
    directories: str
    """Where the judge makes those of its programs: not with other workers', so that what is left is this test's."""

    def response(self, text: str) -> str:
        return f"```python\n{self.names}\n{text}\n```"


@pytest.fixture
def bait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bait]:
    answer = f"answer-{uuid.uuid4().hex}"
    home = tmp_path / "home"
    home.mkdir()
    file = home / "answer.txt"
    file.write_text(answer)
    monkeypatch.setenv("ANSWER", answer)
    marker = f"left_{uuid.uuid4().hex}"
    directories = tempfile.mkdtemp()
    os.chmod(directories, 0o1777)
    places = [str(home), "/var/tmp", "/dev/shm", directories, tempfile.gettempdir(), os.getcwd()]
    # Every process of a program has it, and so each is found.
    monkeypatch.setattr(jail, "_ENVIRONMENT", {"HOME": "/tmp", "LANG": "C.UTF-8", "MARKER": marker})
    with ExitStack() as opened:
        opened.callback(shutil.rmtree, directories)
        addresses: list[Any] = [("127.0.0.1", 0), str(home / "socket"), f"\0{marker}"]
        servers = [_server(opened, address, answer) for address in addresses]
        told = {
            "ANSWER_FILE": str(file), "PORT": servers[0], "SOCKET": str(home / "socket"), "ABSTRACT": marker,
            "JUDGE": os.getpid(), "MARKER": marker, "PLACES": places,
        }  # fmt: skip
        before = [_attributes(path) for path in (file, home)]
        yield Bait(answer, "; ".join(f"{name} = {value!r}" for name, value in told.items()), directories)
        assert [_attributes(path) for path in (file, home)] == before
        assert file.read_text() == answer
        assert [place for place in places if (Path(place) / marker).exists()] == []
        assert not list(Path("/dev/shm").glob(f"{marker}*"))
        assert _alive(marker) == []


def _attributes(path: Path) -> tuple[object, ...]:
    """What a program may change of a file without opening it."""
    status = path.stat()
    return status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, os.listxattr(path)


def _server(opened: ExitStack, address: Any, answer: str) -> int:
    """Tells everybody who connects the answer; returns its port."""
    listener = socket.socket(socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX)
    listener.bind(address)
    listener.listen()

    def tell() -> None:
        while True:
            try:
                with listener.accept()[0] as connection:
                    connection.sendall(answer.encode())
            except OSError:
                return

    threading.Thread(target=tell, daemon=True).start()
    opened.callback(listener.close)
    opened.callback(listener.shutdown, socket.SHUT_RDWR)
    return int(listener.getsockname()[1]) if isinstance(address, tuple) else 0


def _alive(marker: str) -> list[str]:
    """What runs with the marker in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARKER") == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def options(mode: Mode, wall_s: float = WALL_S) -> Grader:
    return Grader(Limits(mode=mode, test_s=1.0, memory_mb=256, wall_s=wall_s), False, 0, PATIENCE_S)


def judged(bait: Bait, text: str, tests: str, mode: Mode) -> None:
    start = time.monotonic()
    with mock.patch.object(tempfile, "tempdir", bait.directories):
        reward, why = grade(bait.response(text), tests, {}, options(mode))
    assert reward == 0.0, why
    assert time.monotonic() - start < PATIENCE_S
    assert os.listdir(bait.directories) == []


def stdin_test(bait: Bait) -> str:
    return json.dumps({"inputs": ["3\n4\n"], "outputs": [bait.answer]})


def function_test(bait: Bait) -> str:
    return json.dumps({"inputs": ['"a"'], "outputs": [json.dumps(bait.answer)], "fn_name": "f"})


def assert_test(bait: Bait) -> str:
    equal = f"str(result) == {bait.answer!r} and result == str(result)"
    return f"result = f('a')\nassert abs(len(result) - 39) < 1 and {equal}"


@pytest.mark.parametrize("name", FEW)
def test_the_worst(bait: Bait, name: str) -> None:
    judged(bait, PROGRAMS[name], stdin_test(bait), "namespaces")


@pytest.mark.night
@pytest.mark.parametrize("mode", ["namespaces", "limits"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_all(bait: Bait, name: str, mode: Mode) -> None:
    judged(bait, PROGRAMS[name], stdin_test(bait), mode)


@pytest.mark.night
@pytest.mark.parametrize("mode", ["namespaces", "limits"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(bait: Bait, name: str, mode: Mode) -> None:
    judged(bait, FUNCTIONS[name], function_test(bait), mode)
    judged(bait, FUNCTIONS[name], assert_test(bait), mode)


@pytest.mark.night
def test_all_without_capabilities(bait: Bait) -> None:
    """As a user who may make namespaces only inside a user namespace of his own."""
    process = fork(_unprivileged, bait)
    process.join()
    assert process.exitcode == 0


def _unprivileged(bait: Bait) -> None:
    if os.geteuid() == 0:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        held = int(status.partition("CapPrm:")[2].split()[0], 16) & ~(1 << 21)
        # All but CAP_SYS_ADMIN; a process that maps user 0 needs CAP_SETFCAP.
        sets = struct.pack("6I", *(2 * [held & 0xFFFFFFFF]), 0, *(2 * [held >> 32]), 0)
        assert kernel.LIBC.capset(struct.pack("Ii", 0x20080522, 0), sets) == 0
    for text in PROGRAMS.values():
        judged(bait, text, stdin_test(bait), "namespaces")


def test_the_right_answer_is_paid(bait: Bait) -> None:
    """Or else nothing above says anything."""
    for text, tests in (
        (f"print({bait.answer!r})", stdin_test(bait)),
        (f"def f(x):\n    return {bait.answer!r}", function_test(bait)),
        (f"def f(x):\n    return {bait.answer!r}", assert_test(bait)),
    ):
        assert grade(bait.response(text), tests, {}, options("namespaces", PATIENCE_S)) == (1.0, "passed")
        assert grade(bait.response(text), tests, {}, options("limits", PATIENCE_S)) == (1.0, "passed")


@pytest.mark.parametrize("mode", ["namespaces", "limits"])
def test_a_program_finds_the_standard_library_and_no_package(mode: Mode) -> None:
    """Whatever this machine's interpreter has: numpy, or nothing at all; and whatever files the judge has open."""
    look = (
        "import contextlib, glob, importlib.metadata, pkgutil, sys\n"
        "print([one.name for one in importlib.metadata.distributions()])\n"
        "print([one.name for one in pkgutil.iter_modules() if one.ispkg and one.name not in sys.stdlib_module_names])\n"
        "found = [path for top in ('/usr', sys.base_prefix) for path in glob.glob(top + '/lib/*/*-packages/*/*.py')]\n"
        "def readable(path):\n"
        "    with contextlib.suppress(OSError): return open(path)\n"
        "print(list(filter(readable, found)))\n"
        "try: import numpy\n"
        "except ModuleNotFoundError: exit(3)\n"
    )
    with ExitStack() as opened:
        list(map(opened.enter_context, (socket.socket() for _ in range(64))))
        outcome = run_program(look, "", Limits(mode))
    packages, others, files = outcome.output.decode().splitlines()
    assert (packages, files, outcome.code) == ("[]", "[]", 3), outcome
    assert set(literal_eval(others)) <= {"__phello__", "test"}
