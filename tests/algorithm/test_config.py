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


def test_the_reference_is_refreshed_before_every_update_unless_asked_otherwise() -> None:
    section = ObjectiveSection(name="off_policy_grpo")
    assert (section.clip_centre, section.reference_every) == ("reference", 1)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("reference_every=4", "objective.reference_every` = 4: .*without a reference policy"),
        ("reference_every=0", "objective.reference_every` = 0"),
    ],
)
def test_a_clip_that_cannot_be_is_refused_in_a_sentence(override: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_recipe(None, ["objective.name=grpo", f"objective.{override}"])


def test_mu_grpo_is_the_default() -> None:
    section = ObjectiveSection()
    assert (section.name, section.clip_low, section.clip_high) == ("mu_grpo", 0.0, 5.0)
    assert (section.veto, section.trigger_ratio, section.dual_clip) == ("suffix_non_trigger", 1e-4, None)


@pytest.mark.parametrize(
    ("fields", "dependence"),
    [
        ({"name": "grpo"}, "token"),
        ({"veto": "trigger"}, "token"),
        ({"name": "mu_grpo"}, "prefix"),
        ({"veto": "suffix"}, "prefix"),
        ({"veto": "response"}, "response"),
        ({"name": "gspo"}, "response"),
        ({"name": "opsm"}, "response"),
        ({"name": "m2po"}, "token"),
        ({"name": "grpo", "surrogate": "own.losses:clip"}, "response"),
    ],
)
def test_dependence(fields: dict[str, str], dependence: str) -> None:
    assert ObjectiveSection(**fields).dependence == dependence


def test_only_update_wide_numbers_need_a_pass_before() -> None:
    needing = {name for name in PRESETS if ObjectiveSection(name=name).needs_statistics}
    assert needing == {"m2po", "m2po_drop"}


@pytest.mark.parametrize("fields", [{"trigger_ratio": 1.5}, {"clip_low": 1.1}, {"name": "nonsense"}, {"clip_hi": 2}])
def test_impossible_fields_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ObjectiveSection(**fields)
