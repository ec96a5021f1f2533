"""A training checkpoint on a full disk: one sentence at whatever byte it fills, and what was complete is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner import checkpoint
from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.run.checkpoints import complete_checkpoints
from tests.hostile.places import disk
from tests.learner.tiny import recipe, save_model
from tests.ranks import run_ranks

START = {"stage": 0, "age": 0, "updates": 0}

pytestmark = pytest.mark.process

PAGE = 4096
FIRST, SECOND = "stage00000-age00001", "stage00000-age00002"


def save_on_disks_of(pages: list[int], model: Path, folder: Path) -> list[tuple[str, list[str], str | None]]:
    """For each size: what the second of two saves says, which checkpoints are complete, and damage to the first."""
    learner = build_learner(recipe(model))
    checkpoint.create_empty_directory = lambda partial, needed: partial.mkdir()  # type: ignore[attr-defined]
    told = []
    for size in pages:
        with disk(folder, size * PAGE) as place:
            said = ""
            try:
                for name in (FIRST, SECOND):
                    checkpoint.begin_save(
                        learner, place / name, {"run": "run", "cursor": {"stage": 0, "age": 0, "updates": 0}}
                    )()
            except UserError as error:
                said = str(error)
            whole = [path.name for path in complete_checkpoints(place)]
            told.append((said, whole, checkpoint.find_damage(learner, place / FIRST) if whole else None))
    return told


def test_a_save_on_a_full_disk(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", layers=1)
    pages = [*range(1, 40, 8), *range(40, 280, 16)]
    [told] = run_ranks(1, save_on_disks_of, pages, model, tmp_path / "disk")
    for said, whole, damage in told:
        assert ("no space left" in said) == (len(whole) < 2)
        assert "\n" not in said
        assert damage is None
    assert {len(whole) for _, whole, _ in told} == {0, 1, 2}, "it filled in either save, and in none"
