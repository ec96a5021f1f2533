"""The filter's BPF program, executed by a small interpreter of its own: no system call is made here."""

from __future__ import annotations

import errno
import os
import struct

import pytest

from mugrpo_megatron.extras.sandbox.filter import build

PID = 77
ALLOWED, REFUSED, MISSING = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBERS = {
    "x86_64": {"read": 0, "execve": 59, "kill": 62, "clone": 56, "fcntl": 72, "socket": 41, "prlimit64": 302,
               "fork": 57},
    "aarch64": {"read": 63, "execve": 221, "kill": 129, "clone": 220, "fcntl": 25, "socket": 198, "prlimit64": 261},
}  # fmt: skip
SAME = {"clone3": 435, "io_uring_setup": 425, "pidfd_send_signal": 424}


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the program returns for a system call (bpf(4), linux/seccomp.h)."""
    six = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("iIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *six)
    program = build(machine, PID)
    lines = [struct.unpack_from("HBBI", program, 8 * place) for place in range(len(program) // 8)]
    register, place = 0, 0
    while True:
        operation, yes, no, operand = lines[place]
        place += 1
        if operation == 0x06:
            return int(operand)
        if operation == 0x20:
            register = struct.unpack_from("I", data, operand)[0]
        else:
            holds = {0x15: register == operand, 0x35: register >= operand, 0x45: bool(register & operand)}[operation]
            place += yes if holds else no


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_is_allowed(machine: str) -> None:
    number = NUMBERS[machine] | SAME
    thread = 0x003D0F00  # the flags of pthread_create
    assert verdict(machine, number["read"], 1) == ALLOWED
    assert verdict(machine, number["execve"]) == ALLOWED
    assert verdict(machine, number["clone"], thread) == ALLOWED
    assert verdict(machine, number["clone"], 17) == REFUSED
    assert verdict(machine, number["clone3"], thread) == MISSING
    assert verdict(machine, number["socket"], 2) == REFUSED
    assert verdict(machine, number["io_uring_setup"]) == REFUSED
    assert verdict(machine, number["pidfd_send_signal"], PID) == REFUSED


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_a_process_may_signal_and_limit_itself_only(machine: str) -> None:
    number = NUMBERS[machine]
    for pid in (0, 1, PID + 1, 0xFFFFFFFF, 0xFFFFFFFF - PID):
        assert verdict(machine, number["kill"], pid, 9) == REFUSED
    assert verdict(machine, number["kill"], PID, 9) == ALLOWED
    assert [verdict(machine, number["prlimit64"], pid) for pid in (0, PID, 1)] == [ALLOWED, ALLOWED, REFUSED]


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_no_signals_through_descriptors(machine: str) -> None:
    fcntl = NUMBERS[machine]["fcntl"]
    assert [verdict(machine, fcntl, 3, command) for command in (1, 2, 3, 4)] == [ALLOWED] * 4
    assert [verdict(machine, fcntl, 3, command) for command in (8, 10, 15)] == [REFUSED] * 3


CHANGES = {
    "x86_64": (90, 91, 268, 92, 94, 132, 280, 188, 197, 76, 452),
    "aarch64": (52, 53, 54, 55, 88, 5, 14, 45, 452),
}
"""chmod, chown, utime, setxattr, removexattr and truncate in their several forms."""


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_no_file_is_changed_without_being_opened_to_write(machine: str) -> None:
    """N4: Landlock restricts none of these, and truncation since its third version alone."""
    assert {verdict(machine, number) for number in CHANGES[machine]} == {REFUSED}
    place, openat = {"x86_64": ([1, 1], 257), "aarch64": ([1, 1], 56)}[machine]
    flags = {os.O_RDONLY: ALLOWED, os.O_RDONLY | os.O_TRUNC: REFUSED, os.O_WRONLY | os.O_TRUNC: ALLOWED}
    assert {flag: verdict(machine, openat, *place, flag) for flag in flags} == flags
    ioctl = {"x86_64": 16, "aarch64": 29}[machine]
    assert [verdict(machine, ioctl, 3, command) for command in (0x40086602, 0x401C5820)] == [REFUSED] * 2


def test_calls_of_other_architectures_are_refused() -> None:
    assert verdict("x86_64", 0, architecture=0x40000003) == REFUSED  # 32-bit calls have other numbers
    assert verdict("x86_64", 0x40000000 + 57) == REFUSED  # x32
    assert verdict("x86_64", NUMBERS["x86_64"]["fork"]) == REFUSED
