"""Starts programs in jails: each jail has a keeper process and the process that becomes the program.

`start` forks the keeper, which forks the program's process and waits for it. The keeper ends all of its descendants
when the program ends, when it gets the signal guard.END, or when the worker dies. With namespaces, the program's
process has number 1 and sees no other process.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mugrpo_megatron.extras.sandbox import filter as calls
from mugrpo_megatron.extras.sandbox import kernel
from mugrpo_megatron.extras.sandbox.limits import Limits, set_limits
from mugrpo_megatron.rewards import guard

NOBODY = 65534
_UNUSED = 1 << 30
"""User ids from here on belong to nobody. Each program gets a random one, so that the kernel counts its threads
alone."""
_NAMESPACES = kernel.NEW_MOUNTS | kernel.NEW_UTS | kernel.NEW_IPC | kernel.NEW_PIDS | kernel.NEW_NETWORK
_ROOT = "/sys"
"""Mount point of the program's root, in a mount namespace of its own; no interpreter lies below it."""
_DEVICES = ("null", "zero", "urandom", "random")
_HIGH = 200
_ESCAPED = re.compile(rb"\\([0-7]{3})")
"""Matches a space or another character as /proc/PID/mountinfo escapes it, see proc(5)."""
_ENVIRONMENT = {"HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}

PYTHON = os.path.realpath(sys.executable)
"""The interpreter that this virtual environment links to: with it a program has the standard library alone."""
VENV_PYTHON = "/bin/python"


def start(
    arguments: list[str], files: Mapping[str, str], channels: Mapping[int, int], limits: Limits
) -> tuple[int, int]:
    """Start the interpreter with `arguments` in a jail; returns (the keeper's pid, a descriptor of errors).

    files: path -> text, in the program's root; with mode "limits" only the paths are used, which the program may read.
    channels: the program's descriptors -> this process's.

    If the program could not be started, a sentence can be read from the descriptor of errors. Once it runs, that
    descriptor is at its end.
    """
    errors, error_pipe = os.pipe()
    worker = os.getpid()
    keeper = os.fork()
    if keeper:
        os.close(error_pipe)
        return keeper, errors
    try:
        _keep(worker, arguments, files, channels, limits, error_pipe)
    except BaseException as error:
        _report_error(error_pipe, error)
    finally:
        os._exit(1)


def _keep(
    worker: int,
    arguments: list[str],
    files: Mapping[str, str],
    channels: Mapping[int, int],
    limits: Limits,
    error_pipe: int,
) -> None:
    """Be the keeper: start the program's process, wait for it, and end all that is left. It never returns."""
    signal.pthread_sigmask(signal.SIG_BLOCK, guard.WAITED_FOR)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, guard.END)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != worker:
        os._exit(0)
    os.setsid()
    user, alone = _separate() if limits.mode == "namespaces" else (None, False)
    program = os.fork()
    if program == 0:
        try:
            _become(arguments, files, channels, limits, user, alone, error_pipe)
        except BaseException as error:
            _report_error(error_pipe, error)
        finally:
            os._exit(1)
    os.closerange(0, _HIGH)
    code = guard.wait_for(program)
    with suppress(ChildProcessError):  # raised if the process has been waited for already
        os.waitid(os.P_PID, program, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        os.kill(program, signal.SIGKILL)
        os.waitpid(program, 0)  # process 1 of a PID namespace ends after the kernel has killed the others
    with suppress(ChildProcessError):  # raised when no child is left
        os.waitpid(-1, os.WNOHANG)
        guard.kill_descendants()
    os._exit(code)


def _separate() -> tuple[int | None, bool]:
    """Enter new namespaces; returns (user id to become, or None; whether the kernel counts this program's processes
    apart from all others).

    Root that may create the namespaces needs no new namespace of users: it becomes a user that has no other process, or
    NOBODY if its own namespace of users lacks such ids.
    """
    user, group = os.geteuid(), os.getegid()
    if user == 0 and _try(_NAMESPACES):
        unused = _UNUSED + int.from_bytes(os.urandom(3), "big")
        return (unused, True) if _maps(unused) else (NOBODY, False)
    kernel.unshare(_NAMESPACES | kernel.NEW_USERS)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {user} 1"),
        ("gid_map", f"{NOBODY} {group} 1"),
    ):
        Path(f"/proc/self/{name}").write_bytes(text.encode())
    return None, _counts_by_namespace()


def _maps(user: int) -> bool:
    """Whether the user namespace of this process contains a user id; the namespace of a container without root's rights
    has few ids."""
    ranges = [map(int, line.split()) for line in Path("/proc/self/uid_map").read_text("ascii").splitlines()]
    return any(first <= user < first + count for first, _, count in ranges)


def _counts_by_namespace() -> bool:
    """Whether RLIMIT_NPROC counts only the user's processes in this user namespace; before Linux 5.14 it counted
    those in all namespaces."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)))) >= (5, 14)


def _try(flags: int) -> bool:
    try:
        kernel.unshare(flags)
    except PermissionError:
        return False
    return True


def _become(
    arguments: list[str],
    files: Mapping[str, str],
    channels: Mapping[int, int],
    limits: Limits,
    user: int | None,
    alone: bool,
    error_pipe: int,
) -> None:
    """Become the program: with namespaces enter its root, then drop all rights and execute the interpreter."""
    error_pipe = _place(channels, error_pipe)
    os.setsid()
    apart = limits.mode == "namespaces"
    if apart:
        _enter_root(files, limits)
    os.chdir("/tmp" if apart else "/")
    kernel.give_up_rights(user, NOBODY)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # set again, because a change of user clears it
    if not apart and kernel.landlock_version():
        libraries, folders = _libraries_alone()
        kernel.see_only([*libraries, PYTHON, *files, *(f"/dev/{name}" for name in _DEVICES)], folders)
    # From here on no file can be opened: the worker's descriptors, which close when the program is executed, may
    # already be more than the program's limit.
    set_limits(limits, alone)
    guard.default_signals()
    if calls.available():
        calls.refuse_calls()
    python = PYTHON if apart else next(iter(files)) + VENV_PYTHON
    os.execve(python, [python, "-I", "-B", "-X", "utf8", *arguments], _ENVIRONMENT)


def _place(channels: Mapping[int, int], error_pipe: int) -> int:
    """Move the channels to the program's descriptors, and mark everything else close-on-exec."""
    error_pipe = fcntl.fcntl(error_pipe, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    moved = {name: fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, _HIGH) for name, ours in channels.items()}
    for name in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # one of the listed descriptors was that of the listing, which is closed by now
            os.set_inheritable(name, False)
    for name, high in moved.items():
        os.dup2(high, name, inheritable=True)
    return error_pipe


def _libraries() -> list[str]:
    """Paths that the interpreter reads: its own library and the system's."""
    # Links are resolved, as in PYTHON: sys.base_prefix may name a link to the newest version's folder.
    interpreter = [os.path.join(os.path.realpath(sys.base_prefix), name) for name in ("lib", "lib64")]
    system = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache"]
    return [path for path in dict.fromkeys([*system, *interpreter]) if os.path.exists(path)]


def _packages() -> list[str]:
    """Folders of packages inside `_libraries`; the program's root shows empty folders in their place."""
    libraries = [Path(path) for path in _libraries() if os.path.isdir(path) and not os.path.islink(path)]
    return [str(path) for folder in libraries for path in folder.glob("python*/*-packages") if not path.is_symlink()]


def _libraries_alone() -> tuple[list[str], list[str]]:
    """(paths of `_libraries` that a program may read, folders that it may only list, since `_packages` are in them)."""
    packages = {Path(path).resolve() for path in _packages()}
    folders = {folder for path in packages for folder in path.parents[:2]}
    paths = {Path(path).resolve() for path in _libraries()}
    paths |= {path for folder in folders for path in folder.iterdir() if not path.is_symlink()}
    return list(map(str, paths - packages - folders)), list(map(str, folders))


def write_environment(directory: str) -> None:
    """Make `directory` a virtual environment without packages, for a program that shares this machine's root."""
    write_files(directory, {"/pyvenv.cfg": f"home = {os.path.dirname(PYTHON)}\ninclude-system-site-packages = false\n"})
    os.mkdir(f"{directory}/bin")
    os.symlink(PYTHON, directory + VENV_PYTHON)


def _enter_root(files: Mapping[str, str], limits: Limits) -> None:
    """Enter a root with the interpreter, its libraries, `files` and an empty /tmp of `scratch_mb` MiB; nothing but /tmp
    can be written."""
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    safe = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", _ROOT, "tmpfs", safe, "size=4m,mode=755")
    os.mkdir(f"{_ROOT}/tmp")
    for source in [*_libraries(), PYTHON, *(f"/dev/{name}" for name in _DEVICES)]:
        _bind(source, _ROOT + source)
    for packages in _packages():
        kernel.mount("none", _ROOT + packages, "tmpfs", safe, "size=4k,mode=755")
    write_files(_ROOT, files)
    for mounted, flags in _mounts(_ROOT):
        device = kernel.MS_NOSUID if mounted.startswith(f"{_ROOT}/dev/") else safe
        kernel.mount(None, mounted, None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | flags | device)
    kernel.mount("none", f"{_ROOT}/tmp", "tmpfs", safe, f"size={limits.scratch_mb}m,nr_inodes=1024,mode=1777")
    kernel.make_root(_ROOT)


def write_files(root: str, files: Mapping[str, str]) -> None:
    """Write each file, `/`-separated path -> text, below `root`."""
    for name, text in files.items():
        path = Path(root + name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")


def _bind(source: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):  # as on systems where /lib is a link to usr/lib
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        Path(target).touch()
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)


def _mounts(root: str) -> list[tuple[str, int]]:
    """Mount points in `root`, each with the flags that a user namespace may not remove."""
    points: list[str] = []
    inside: set[bytes] = set()
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        number, parent, _device, _source, where = line.split()[:5]
        point = os.fsdecode(_ESCAPED.sub(lambda code: bytes([int(code[1], 8)]), where))
        if point == root:  # this mount hides what was mounted at `root` before, and every mount inside that
            inside, points = {number}, [point]
        elif parent in inside:
            inside.add(number)
            points.append(point)
    mounts = []
    for point in points:
        status = os.statvfs(point).f_flag
        locked_flags = status & (kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV | os.ST_NOEXEC)
        mounts.append((point, locked_flags | _times(status)))
    return mounts


def _times(status: int) -> int:
    """mount(2)'s flags for the access times in `status`, the flags of statvfs(3). The two calls have the same numbers
    for noatime and nodiratime, and different ones for relatime."""
    return status & (os.ST_NOATIME | os.ST_NODIRATIME) | (1 << 21 if status & os.ST_RELATIME else 0)


def _report_error(descriptor: int, error: BaseException) -> None:
    with suppress(OSError):
        os.write(descriptor, f"{type(error).__name__}: {error}".encode("utf-8", "replace")[:1000])
