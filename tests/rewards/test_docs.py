"""The worked example of docs/verifier.md works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.pool import Verifier

PAGE = Path(__file__).parents[2] / "docs" / "verifier.md"


@pytest.mark.process
def test_the_example_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    (tmp_path / "my_rewards.py").write_text(found[1], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with Verifier(RewardSection(function="my_rewards:last_number", workers=1)) as verifier:
        scores = verifier.score(["it is 41, no, 42", "43", "none", "12"], ["42"] * 4)
    assert [score.reward for score in scores] == [1.0, 0.5, 0.0, 0.0]
