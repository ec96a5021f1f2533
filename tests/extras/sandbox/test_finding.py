"""What the doctor says about programs of responses."""

from __future__ import annotations

import pytest

from mugrpo_megatron.commands.doctor import State
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.sandbox.finding import jail
from mugrpo_megatron.extras.sandbox.limits import Limits


@pytest.mark.parametrize(
    ("works", "state", "found", "says"),
    [
        ({"namespaces", "limits"}, "ok", "namespaces", ""),
        ({"limits"}, "broken", "limits alone", 'reward.code.sandbox = "limits"'),
        (set(), "absent", "cannot be held", "docs/rewards.md"),
    ],
)
def test_programs_are_held_as_well_as_this_machine_can(
    works: set[str], state: State, found: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(limits: Limits) -> None:
        if limits.mode not in works:
            raise UserError("refused")

    monkeypatch.setattr("mugrpo_megatron.extras.sandbox.finding.check_jail", check)
    finding = jail()
    assert (finding.state, finding.needed) == (state, False)
    assert found in finding.found
    assert says in finding.remedy
