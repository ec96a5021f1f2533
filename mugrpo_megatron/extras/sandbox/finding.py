"""What `mugrpo doctor` says about programs of responses."""

from __future__ import annotations

from mugrpo_megatron.commands.doctor import Finding
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.sandbox.jail_check import check_jail
from mugrpo_megatron.extras.sandbox.limits import Limits, Mode


def jail() -> Finding:
    """In what programs of `reward.function = "code"` run here: the way in which one of a line has just run."""
    use = 'reward.function = "code": programs of responses'
    remedy = 'allow user namespaces to this user (docs/rewards.md); until then reward.code.sandbox = "limits"'
    if _jailed("namespaces"):
        return Finding("code sandbox", "ok", "namespaces", use, needed=False)
    if _jailed("limits"):
        return Finding("code sandbox", "broken", "no namespaces, limits alone", use, needed=False, remedy=remedy)
    return Finding("code sandbox", "absent", "programs cannot be held", use, needed=False, remedy="docs/rewards.md")


def _jailed(mode: Mode) -> bool:
    try:
        check_jail(Limits(mode))
    except (UserError, OSError):
        return False
    return True
