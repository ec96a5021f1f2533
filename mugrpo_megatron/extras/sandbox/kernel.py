"""Calls of the kernel that Python 3.11 lacks, made through ctypes: namespaces, mounts, capabilities, Landlock."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

LIBC = ctypes.CDLL(None, use_errno=True)

NEW_MOUNTS = 0x00020000
NEW_UTS = 0x04000000
NEW_IPC = 0x08000000
NEW_USERS = 0x10000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_LANDLOCK = 444
"""Number of the system call landlock_create_ruleset(2) on every architecture; landlock_add_rule(2) and
landlock_restrict_self(2) have the next two."""
_READ, _LIST = 0b1101, 0b1000  # bits of linux/landlock.h: execute, read a file, list a directory
_ACCESSES = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Version of Landlock -> number of kinds of file access that it restricts, which are the lowest bits of a mask."""


def unshare(flags: int) -> None:
    """Call unshare(2); raises OSError."""
    _checked(LIBC.unshare(flags), "unshare")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Call mount(2); raises OSError, which names the target."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    _checked(LIBC.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def make_root(directory: str) -> None:
    """Make the mount point `directory` the root of this mount namespace, and unmount the old root."""
    os.chdir(directory)
    _checked(LIBC.syscall(_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    _checked(LIBC.umount2(b".", _DETACH), "umount the old root")
    os.chdir("/")


def prctl(option: int, *values: int) -> None:
    """Call prctl(2); raises OSError."""
    arguments = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    _checked(LIBC.prctl(option, *arguments), f"prctl {option}")


def give_up_rights(user: int | None, group: int) -> None:
    """Drop every capability for this process and all programs that it executes; with a `user`, also take this user id
    and the id `group`."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):
        if LIBC.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0):
            break  # the number is above the last capability, or this process has none to drop
    if user is not None:
        os.setgroups([])
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _checked(LIBC.capset(header, bytes(24)), "capset")


def landlock_version() -> int:
    """Version of Landlock in the kernel; 0 if it is missing or refused to this process."""
    return max(0, int(LIBC.syscall(_LANDLOCK, None, ctypes.c_size_t(0), 1)))


def see_only(paths: list[str], folders: list[str]) -> None:
    """Restrict this process and its children with Landlock: they read files beneath `paths` only, and write none.

    Beneath `folders` they may list the names of files.
    """
    version = landlock_version()
    handled = (1 << _ACCESSES.get(version, 16)) - 1
    network = 0b11 if version >= 4 else 0  # bind and connect of TCP
    scoped = 0b11 if version >= 6 else 0  # abstract sockets of processes outside, and signals to them
    attributes = struct.pack("QQQ", handled, network, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = _checked(LIBC.syscall(_LANDLOCK, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock")
    for path, access in [*((path, _READ) for path in paths), *((folder, _LIST) for folder in folders)]:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = access if os.path.isdir(path) else access & ~_LIST
        _checked(LIBC.syscall(_LANDLOCK + 1, rules, 1, struct.pack("=Qi", allowed, opened), 0), f"landlock {path}")
        os.close(opened)
    _checked(LIBC.syscall(_LANDLOCK + 2, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _checked(returned: int, what: str) -> int:
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return returned
