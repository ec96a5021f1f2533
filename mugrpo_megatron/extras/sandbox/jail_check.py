"""Checks, before the first response and in `mugrpo doctor`, that this machine supports the recipe's sandbox."""

from __future__ import annotations

from mugrpo_megatron.checks.toolchain import CheckResult
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.sandbox import filter as calls
from mugrpo_megatron.extras.sandbox import kernel
from mugrpo_megatron.extras.sandbox.limits import Limits, Mode
from mugrpo_megatron.extras.sandbox.programs import run_program
from mugrpo_megatron.pages import page_address


def weakness(mode: str) -> str:
    """A sentence on how the sandbox `mode` is weaker than namespaces; empty for namespaces.

    A kernel before 5.13 has no Landlock, and some containers refuse its calls.
    """
    if mode == "namespaces":
        return ""
    if not sees_files(mode):
        return (
            'reward.code.sandbox = "limits": programs have neither network, files nor other processes, but only the '
            "filter of system calls and Landlock see to that; there are no namespaces besides"
        )
    return (
        'reward.code.sandbox = "limits" on a kernel without Landlock: programs have neither network nor other '
        "processes, but they can read what this user can, and create or delete files where this user may"
    )


def sees_files(mode: str) -> bool:
    """Whether programs can read this user's files in the sandbox `mode`."""
    return mode == "limits" and not kernel.landlock_version()


def check_jail(limits: Limits) -> None:
    """Run a program of one line; raises UserError with the way out if that fails."""
    if limits.mode == "limits" and not calls.available():
        raise UserError(
            'reward.code.sandbox = "limits" knows the system calls of x86-64 and arm64 only: use namespaces'
        )
    try:
        outcome = run_program("print(6 * 7)", "", limits)
    except UserError as error:
        raise UserError(f"{error}; {_way_out(limits)}") from None
    if outcome.output != b"42\n":
        words = outcome.errors.decode("utf-8", "replace").strip()[-300:]
        why = outcome.why_failed() or "it wrote something else"
        raise UserError(f"a program of one line did not run in its jail ({why}; {words}); {_way_out(limits)}")


def _way_out(limits: Limits) -> str:
    if limits.mode == "limits":
        return f"raise reward.worker_memory_mb, or see {page_address('rewards', 'programs')}"
    return (
        f"allow user namespaces to this user ({page_address('rewards', 'programs')}), "
        'or accept a weaker sandbox: reward.code.sandbox = "limits"'
    )


def jail() -> CheckResult:
    """Try the sandbox: the strongest mode in which a program of one line runs on this machine."""
    use = 'reward.function = "code": programs of responses'
    walls = page_address("rewards", "programs")
    remedy = f'allow user namespaces to this user ({walls}); until then reward.code.sandbox = "limits"'
    if _jailed("namespaces"):
        return CheckResult("code sandbox", "ok", "namespaces", use, needed=False)
    if _jailed("limits"):
        return CheckResult("code sandbox", "broken", "no namespaces, limits alone", use, needed=False, remedy=remedy)
    return CheckResult("code sandbox", "absent", "works in no mode", use, needed=False, remedy=walls)


def _jailed(mode: Mode) -> bool:
    try:
        check_jail(Limits(mode))
    except (UserError, OSError):
        return False
    return True
