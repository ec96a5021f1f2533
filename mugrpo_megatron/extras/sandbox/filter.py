"""Refuses system calls of a program with a seccomp filter, written in BPF.

The program can start no process, open no socket, signal no other process, and take no memory that its limits do not
count. It can also not change a file's mode, owner, times or attributes, which Landlock does not restrict. A refused
call fails with EPERM, as in a container, and the program sees an OSError; clone3 and openat2 fail with ENOSYS, as on a
kernel without them. The filter also holds for everything that the program executes. Machines other than x86-64 and
arm64 have no filter.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

from mugrpo_megatron.extras.sandbox.kernel import PR_SET_SECCOMP, prctl

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _MISSING = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_THREAD = 0x00010000  # CLONE_THREAD
_X32 = 0x40000000
_MODE_FILTER = 2
_NUMBER, _ARCH, _FIRST = 0, 4, 16
"""Offsets in `struct seccomp_data`; an argument has eight bytes, the low half first."""

# fmt: off
_SAME = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434, "clone3": 435, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "memfd_secret": 447, "process_mrelease": 448,
    "openat2": 437, "fchmodat2": 452, "map_shadow_stack": 453, "setxattrat": 463, "removexattrat": 466,
    "file_setattr": 469,
}
"""Calls that have one number on every architecture."""
_X86_64 = {
    "open": 2, "openat": 257,
    "fork": 57, "vfork": 58, "clone": 56, "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129,
    "rt_tgsigqueueinfo": 297, "fcntl": 72, "ioctl": 16, "prlimit64": 302, "socket": 41, "ptrace": 101,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "shmget": 29, "semget": 64, "msgget": 68,
    "mq_open": 240, "memfd_create": 319, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "chroot": 161,
    "pivot_root": 155, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "keyctl": 250, "add_key": 248,
    "request_key": 249, "setpriority": 141, "sched_setaffinity": 203, "sched_setscheduler": 144,
    "sched_setparam": 142, "sched_setattr": 314, "ioprio_set": 251, "migrate_pages": 256, "move_pages": 279,
    "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304, "syslog": 103, "io_setup": 206,
    "splice": 275, "vmsplice": 278, "tee": 276, "chmod": 90, "fchmod": 91, "fchmodat": 268, "chown": 92, "fchown": 93,
    "lchown": 94, "fchownat": 260, "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280, "setxattr": 188,
    "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "truncate": 76,
}
_ARM64 = {
    "openat": 56,
    "clone": 220, "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240,
    "fcntl": 25, "ioctl": 29, "prlimit64": 261, "socket": 198, "ptrace": 117, "process_vm_readv": 270,
    "process_vm_writev": 271, "kcmp": 272, "shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180,
    "memfd_create": 279, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "chroot": 51, "pivot_root": 41,
    "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "keyctl": 219, "add_key": 217, "request_key": 218,
    "setpriority": 140, "sched_setaffinity": 122, "sched_setscheduler": 119, "sched_setparam": 118,
    "sched_setattr": 274, "ioprio_set": 30, "migrate_pages": 238, "move_pages": 239, "fanotify_init": 262,
    "name_to_handle_at": 264, "open_by_handle_at": 265, "syslog": 116, "io_setup": 0, "splice": 76, "vmsplice": 75,
    "tee": 77, "fchmod": 52, "fchmodat": 53, "fchown": 55, "fchownat": 54, "utimensat": 88, "setxattr": 5,
    "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16, "truncate": 45,
}
# fmt: on
_MACHINES = {"x86_64": (0xC000003E, _X86_64 | _SAME), "aarch64": (0xC00000B7, _ARM64 | _SAME)}
_TO_ITSELF = ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
_OWNERS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to any process when a descriptor is ready
_IOCTLS = (0x8901, 0x8902, 0x40086602, 0x401C5820)
"""FIOSETOWN and SIOCSPGRP, which send signals as `_OWNERS` do, FS_IOC_SETFLAGS and FS_IOC_FSSETXATTR, which change a
file's attributes."""


def available() -> bool:
    """Whether this machine's system calls are known here."""
    return platform.machine() in _MACHINES


def refuse_calls() -> None:
    """Install the filter in this process, for good; it needs PR_SET_NO_NEW_PRIVS. Raises OSError."""
    program = build(platform.machine(), os.getpid())
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program) // 8, ctypes.addressof(code)))
    prctl(PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(header))


def build(machine: str, pid: int) -> bytes:
    """The filter as a BPF program, eight bytes an instruction; the process `pid` may signal and limit itself."""
    architecture, numbers = _MACHINES[machine]
    special = {"clone", "clone3", "openat2", "open", "openat", "fcntl", "ioctl", "prlimit64", *_TO_ITSELF}
    lines = [
        *_if_not(_EQUAL, _ARCH, architecture, _REFUSE),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32 if machine == "x86_64" else 0xFFFFFFFF),
        (_RETURN, 0, 0, _REFUSE),
        *(line for name, number in numbers.items() if name not in special for line in _call(number, [])),
        # ENOSYS makes the C library call clone instead. Its flags are in a register, where a filter can see them.
        *_call(numbers["clone3"], [], _MISSING),
        *_call(numbers["openat2"], [], _MISSING),
        *_call(numbers["clone"], [(_LOAD, 0, 0, _FIRST), (_ANY_BIT, 0, 1, _THREAD), (_RETURN, 0, 0, _ALLOW)]),
        *_call(numbers["prlimit64"], _allowed_for(0, pid)),
    ]
    for name in _TO_ITSELF:
        lines += _call(numbers[name], _allowed_for(pid))
    for name, offset in (("open", _FIRST + 8), ("openat", _FIRST + 16)):
        # Opening a file to read with O_TRUNC empties it, which Landlock restricts only from its third version on.
        if name in numbers:
            checks = [(_LOAD, 0, 0, offset), (_ANY_BIT, 0, 2, os.O_TRUNC), (_ANY_BIT, 1, 0, os.O_ACCMODE)]
            lines += _call(numbers[name], [*checks, (_RETURN, 0, 0, _REFUSE)], _ALLOW)
    for name, commands in (("fcntl", _OWNERS), ("ioctl", _IOCTLS)):
        checks = [(_LOAD, 0, 0, _FIRST + 8)]
        for command in commands:
            checks += [(_EQUAL, 0, 1, command), (_RETURN, 0, 0, _REFUSE)]
        lines += _call(numbers[name], checks, _ALLOW)
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


_Line = tuple[int, int, int, int]
"""A BPF instruction: (operation, instructions to skip if its test is true, to skip if it is false, operand)."""


def _call(number: int, checks: list[_Line], verdict: int = _REFUSE) -> list[_Line]:
    """Instructions for the system call `number`: the checks, then the verdict. For any other call they are skipped, and
    the call's number, which was loaded before, stays loaded for the next comparison."""
    return [(_EQUAL, 0, len(checks) + 1, number), *checks, (_RETURN, 0, 0, verdict)]


def _allowed_for(*values: int) -> list[_Line]:
    """Instructions that allow a call whose first argument is one of the values."""
    lines: list[_Line] = [(_LOAD, 0, 0, _FIRST)]
    for value in values:
        lines += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return lines


def _if_not(operation: int, offset: int, operand: int, verdict: int) -> list[_Line]:
    return [(_LOAD, 0, 0, offset), (operation, 1, 0, operand), (_RETURN, 0, 0, verdict)]
