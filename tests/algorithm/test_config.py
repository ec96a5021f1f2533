"""Presets and what an objective says of itself."""

from __future__ import annotations

from typing import get_args

import pytest
from pydantic import ValidationError

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import ObjectiveSection, load_recipe
from mugrpo_megatron.recipe.objective import PRESETS, ObjectiveName


def test_every_name_has_a_preset() -> None:
    assert set(PRESETS) == set(get_args(ObjectiveName))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_field_in_the_recipe_wins_over_the_preset(name: str) -> None:
    preset, changed = ObjectiveSection(name=name), ObjectiveSection(name=name, clip_high=7.0)
    assert changed.clip_high == 7.0
    assert changed.model_copy(update={"clip_high": preset.clip_high}) == preset


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_resolved_section_reads_back_as_itself(name: str) -> None:
    section = ObjectiveSection(name=name)
    assert ObjectiveSection(**section.model_dump()) == section


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("proximal_every=4", "objective.proximal_every` = 4: .*without a proximal policy"),
        ("proximal_every=0", "objective.proximal_every` = 0"),
    ],
)
def test_a_clip_that_cannot_be_is_refused_in_a_sentence(override: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_recipe(None, ["objective.name=grpo", f"objective.{override}"])


def test_mu_grpo_is_the_default() -> None:
    section = ObjectiveSection()
    assert (section.name, section.clip_low, section.clip_high) == ("mu_grpo", 0.0, 5.0)
    assert (section.veto, section.trigger_ratio, section.dual_clip) == ("suffix_non_trigger", 1e-4, None)


@pytest.mark.parametrize("fields", [{"trigger_ratio": 1.5}, {"clip_low": 1.1}, {"name": "nonsense"}, {"clip_hi": 2}])
def test_impossible_fields_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ObjectiveSection(**fields)
