"""A checkpoint is data: no command runs what is in one. Every payload is shown to run when it is unpickled freely."""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from checkpoints_convert import hf_to_megatron, megatron_to_hf, verify
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner import checkpoint
from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.run.checkpoints import restore_newest
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.record import RunRecord
from tests import models
from tests.hostile.payloads import HARMLESS, INDEXES, ITEMS, attacks, with_items
from tests.learner.tiny import recipe, save_model
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hf")
    models.save_model(directory, num_hidden_layers=2)
    return directory


@pytest.fixture(scope="module")
def megatron(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted") / "megatron"
    hf_to_megatron.convert(hf, directory)
    return directory


def spoiled(clean: Path, folder: Path, marker: Path) -> Iterator[tuple[str, Path]]:
    """A copy of the checkpoint for each attack."""
    for number, (name, attack) in enumerate(attacks(marker)):
        copy = folder / f"attack-{number}"
        shutil.copytree(clean, copy)
        attack(copy)
        yield name, copy


def test_the_payloads_run_where_they_are_unpickled_freely(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    loaded = [pickle.loads] * len(INDEXES) + [lambda item: torch.load(io.BytesIO(item), weights_only=False)] * len(
        ITEMS
    )
    for load, make in zip(loaded, [*INDEXES.values(), *ITEMS.values()], strict=True):
        with suppress(Exception):  # of what comes after it ran
            load(make(marker))
        marker.rmdir()


def test_no_conversion_runs_what_a_checkpoint_holds(
    hf: Path, megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "ran"
    for name, directory in spoiled(megatron, tmp_path, marker):
        out = directory.with_name(f"{directory.name}-hf")
        expected = 0 if name.startswith(HARMLESS) else 2
        given = ["--megatron", str(directory)]
        assert megatron_to_hf.main([*given, "--out", str(out), "--like", str(hf)]) == expected, name
        assert verify.main([*given, "--hf", str(hf), "--no-logits"]) == expected, name
        assert capsys.readouterr().err.count("\n") == (2 if expected else 0), name
        assert not marker.exists(), name
        assert out.exists() == (expected == 0), name


def verified(hf: Path, megatron: Path) -> str:
    return verify.verify(hf, megatron)


@pytest.mark.process
def test_verify_does_not_run_an_object_of_the_model(hf: Path, megatron: Path, tmp_path: Path) -> None:
    copy, marker = tmp_path / "copy", tmp_path / "ran"
    shutil.copytree(megatron, copy)
    with_items(copy, ITEMS["torch.save"](marker), of_tensors=False, declared=False)
    [line] = run_ranks(1, verified, hf, copy)
    assert line.startswith("equal: ")
    assert not marker.exists()


RUN = "0123456789abcdef"


def save(model: Path, directory: Path) -> None:
    checkpoint.begin_save(build_learner(recipe(model)), directory, {"run": RUN, "cursor": asdict(Cursor(0, 1, 1))})()


def resume_from_each(model: Path, folders: list[Path]) -> list[str]:
    """The cursor that a run resumes at, or the sentence that it ends with."""
    learner = build_learner(recipe(model))
    told = []
    for folder in folders:
        try:
            told.append(str(restore_newest(learner, folder, RunRecord(RUN), print)))
        except UserError as error:
            told.append(str(error))
    return told


@pytest.mark.process
def test_no_run_resumes_with_what_a_checkpoint_holds(tmp_path: Path) -> None:
    model, clean, marker = save_model(tmp_path / "model", layers=2), tmp_path / "clean", tmp_path / "ran"
    run_ranks(1, save, model, clean)
    names: list[str] = []
    folders: list[Path] = []
    for name, directory in spoiled(clean, tmp_path, marker):
        folders.append(tmp_path / f"run-{len(names)}")
        folders[-1].mkdir()
        directory.rename(folders[-1] / "stage00000-age00001")
        names.append(name)
    [told] = run_ranks(1, resume_from_each, model, folders)
    assert not marker.exists()
    for name, sentence in zip(names, told, strict=True):
        if name.startswith(HARMLESS):
            assert sentence == str(Cursor(0, 1, 1)), name
        elif name.startswith("tensor"):
            assert "__0_0.distcp is damaged" in sentence, name
        elif name.startswith("declared"):
            assert "which this model needs" in sentence, name
        else:
            assert "every checkpoint in" in sentence, name
            assert "it names" in sentence, name
