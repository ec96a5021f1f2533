"""The picture of a run, for any number of stages and for runs that broke off."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from mugrpo_megatron.report.figure import write_figure
from tests.report.synthetic import recipe_of, rows_of, write_run


@pytest.mark.parametrize(("stages", "updates", "rows"), [(1, 1, None), (2, 8, 3), (40, 2, None)])
def test_picture_is_drawn_on_its_background(stages: int, updates: int, rows: int | None, tmp_path: Path) -> None:
    run = write_run(tmp_path, rows_of(stages, updates)[:rows], recipe_of(stages, updates))
    light = Image.open(write_figure(run, tmp_path / "light.png")).convert("RGB")
    dark = Image.open(write_figure(run, tmp_path / "docs" / "dark.png", dark=True)).convert("RGB")
    assert light.size == dark.size
    assert light.getpixel((0, 0)) == (255, 255, 255)
    assert dark.getpixel((0, 0)) == (13, 17, 23)


def test_sets_are_drawn_under_their_mean(tmp_path: Path) -> None:
    run = write_run(tmp_path, rows_of(2, 4, sets=("math500", "aime24")), recipe_of(2, 4))
    picture = write_figure(run, tmp_path / "a.svg").read_text()
    assert all(f"<!-- {name} -->" in picture for name in ("math500", "aime24", "held-out accuracy, mean of 2 sets"))


def test_vector_picture_is_the_same_every_time(tmp_path: Path) -> None:
    run = write_run(tmp_path, rows_of(2, 4), recipe_of(2, 4))
    first = write_figure(run, tmp_path / "a.svg").read_bytes()
    assert first.count(b"<path") > 10
    assert first == write_figure(run, tmp_path / "b.svg").read_bytes()
