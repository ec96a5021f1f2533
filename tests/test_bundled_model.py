"""The model that the package brings along is the one that its README describes, and its recipe makes it again."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from mugrpo_megatron.files.bundled import MODELS, bundled_model
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.recipe.policy import ModelSection
from mugrpo_megatron.run.record import check_model_path
from tests.checkout import ROOT
from tests.tiny import mugrpo

NAME = Path("arithmetic-364k")
QUICKSTART = Path(ROOT, "run_scripts/recipes/quickstart.toml")


def test_the_quickstart_starts_from_it_and_its_sum_is_the_readmes() -> None:
    directory = load_recipe(QUICKSTART).model.directory
    assert directory == MODELS / NAME
    assert {path.name for path in directory.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    sums = re.findall(r"`([0-9a-f]{64})`", (MODELS / "README.md").read_text(encoding="utf-8"))
    assert sums == [hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()]


def test_a_directory_of_its_name_comes_first_and_other_names_are_none(tmp_path: Path) -> None:
    for other in ("arithmetic", "runs/arithmetic-364k", ".", "..", "", "README.md"):
        assert bundled_model(Path(other)) is None
    Path(NAME).mkdir()  # each test begins in an empty directory
    assert bundled_model(NAME) is None
    assert ModelSection(path=NAME).directory == NAME
    check_model_path(NAME, tmp_path / "hf")


@pytest.mark.process
@pytest.mark.night
def test_its_recipe_makes_a_model_that_can_do_as_much(tmp_path: Path) -> None:
    """The training stops at its first check above 40 %, which an accuracy that rises fast may pass by 8 points."""
    made = tmp_path / "made"
    mugrpo("sft", str(QUICKSTART), "--set", f"sft.output={made}")
    accuracies: list[float] = []
    for model in (made / "hf", MODELS / NAME):
        out = tmp_path / f"eval-{len(accuracies)}"
        mugrpo("eval", str(model), "--data", "arithmetic", "--recipe", str(QUICKSTART), "--out", str(out))
        [row] = json.loads((out / "summary.json").read_text(encoding="utf-8"))["sets"]
        accuracies.append(row["mean"]["value"])
    assert all(0.36 <= accuracy <= 0.56 for accuracy in accuracies), accuracies
    config, again = (json.loads((path / "config.json").read_text()) for path in (MODELS / NAME, made / "hf"))
    assert {key: again[key] for key in config if key != "transformers_version"} == {
        key: config[key] for key in config if key != "transformers_version"
    }
