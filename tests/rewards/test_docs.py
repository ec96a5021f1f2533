"""The examples of docs/rewards.md do what the page says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.pool import Verifier

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
TERSE = [{"terse": True}] * 4
GIVEN = (["42", "it is 41, no, 42", "43", "7"], ["42"] * 4, TERSE, ["4 what?"] * 4)
EXPECTED = {
    "my_rewards:last_number": [1.0, 1.0, 0.5, 0.0],
    "group_rewards:shortest": [0.0, 0.0, 0.0, 1.0],
    "group_rewards:judged": [1.0, 0.0, 1.0, 0.0],
    "any_of:any_of": [1.0, 1.0, 0.0, 0.0],
    "from_trl:correctness": [2.0, 0.0, 0.0, 0.0],
    "from_verl:compute_score": [1.0, -1.0, -1.0, -1.0],
    "from_slime:reward": [1.0, 0.0, 0.0, 0.0],
}


def test_every_example_is_tried() -> None:
    functions = {
        f"{name.removesuffix('.py')}:{function}"
        for name, text in FILES.items()
        for function in re.findall(r"^(?:async )?def (\w+)", text, re.MULTILINE)
    }
    assert functions == EXPECTED.keys()


@pytest.mark.process
def test_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for function, rewards in EXPECTED.items():
        with Verifier(RewardSection(function=function, workers=1)) as verifier:
            assert [score.reward for score in verifier.score(*GIVEN)] == rewards, function


def test_the_recipe_of_several_functions() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    section = RewardSection.model_validate(tomllib.loads(text)["reward"])
    assert section.functions_of("gsm8k") == ("correct", "terse", "acc")
    assert section.functions_of("code_contests") == ("correct", "terse", "acc", "programs")
