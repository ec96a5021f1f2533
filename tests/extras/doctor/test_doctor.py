"""The doctor: imports judged from outside, two packages called apex told apart."""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from mugrpo_megatron.extras.doctor.doctor import (
    CheckResult,
    Package,
    State,
    apex,
    doctor,
    importing,
    results,
    stack,
    view,
)

TEXT = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]) | st.just(" "), min_size=1, max_size=120)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages in front of the installed ones, in this process and in those it starts."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.mark.process
def test_imports_that_fail_or_crash_are_told_and_spare_the_ones_before(site: Path) -> None:
    (site / "sound.py").write_text("print('imports may print')")
    (site / "broken.py").write_text("raise RuntimeError('operator nms does not exist')")
    (site / "crashing.py").write_text("import os; os._exit(7)")
    modules = ("sound", "broken", "not_there", "crashing", "later")
    with importing(modules) as told:
        errors = dict(zip(modules, told, strict=False))
    assert errors["sound"] == ""
    assert errors["broken"] == "RuntimeError: operator nms does not exist"
    assert errors["not_there"].startswith("ModuleNotFoundError")
    assert "status 7" in errors["crashing"]
    assert "status 7" in errors["later"]


@pytest.mark.process
def test_nvidias_apex_is_told_apart_from_the_unrelated_package(site: Path) -> None:
    package = site / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("")
    unrelated = apex()
    assert unrelated.state == "broken"
    assert "pip uninstall apex" in unrelated.remedy
    (package / "multi_tensor_apply").mkdir()
    assert apex().state == "ok"


def printed(result: CheckResult, width: int = 80) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(view(result))
    return capture.get()


def test_a_part_names_the_way_out_of_what_is_missing_and_only_that() -> None:
    absent = CheckResult("sglang", "absent", "not installed", "samples", needed=True, remedy="run setup")
    assert "get it: run setup" in printed(absent)
    assert "never shown" not in printed(
        CheckResult("triton", "ok", "3.7.1", "kernels", needed=True, remedy="never shown")
    )


@settings(max_examples=25)
@given(part=TEXT, found=TEXT, use=TEXT, remedy=TEXT, state=st.sampled_from(["ok", "absent", "broken"]))
def test_a_part_fits_80_columns_and_loses_nothing(part: str, found: str, use: str, remedy: str, state: State) -> None:
    told = printed(CheckResult(part, state, found, use, needed=False, remedy=remedy))
    assert all(cell_len(line) <= 80 for line in told.splitlines())
    for text in (part, found, use, *([remedy] if state != "ok" else [])):
        for character in set(text) - {" "}:
            assert told.count(character) >= text.count(character)


@pytest.mark.parametrize(
    ("megatron", "sglang", "state", "name"),
    [
        ("0.16.1", "0.5.15.post1", "ok", "pinned"),
        ("0.19.2", "0.5.23", "ok", "new"),
        ("0.19.2", "0.5.15.post1", "broken", "not a tested pair"),
        ("0.16.1", None, "broken", "not a tested pair"),
    ],
)
def test_only_a_pair_that_was_tested_is_a_stack(megatron: str, sglang: str | None, state: State, name: str) -> None:
    result = stack(megatron, sglang)
    assert result.state == state
    assert result.detail.startswith(name)
    assert ("--stack new" in printed(result)) == (state == "broken")
    assert not result.needed, "it may well run"


@pytest.mark.process
def test_parts_are_told_while_the_imports_are_still_under_way(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first package waits for ever; what is known before it is there all the same."""
    (site / "waiting.py").write_text("import signal; signal.pause()")
    package = Package("pip", "waiting", "never imported", "", "never")
    monkeypatch.setattr("mugrpo_megatron.extras.doctor.doctor.PACKAGES", (package,))
    monkeypatch.setattr("mugrpo_megatron.extras.doctor.doctor.installed_version", lambda distribution: "1")
    with closing(results()) as told:
        before = [next(told).name for _ in range(9)]
    assert before == ["Python", "cores", "memory", "/dev/shm", "devices", "torch", "gloo", "NCCL", "stack"]


@pytest.mark.process
@pytest.mark.night
def test_this_machine_has_what_it_needs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"model_type": "qwen2", "unsloth_fixed": True, "max_position_embeddings": 64, "vocab_size": 16}
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), 2)
    (tmp_path / "config.json").write_text(json.dumps(config | sizes | {"head_dim": 2}))
    assert doctor(argparse.Namespace(model=tmp_path, fix=False)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "model: qwen2, 2 layers" in said
    assert "fields that change nothing in transformers or in SGLang: unsloth_fixed" in said
    assert "megatron-core" in said
    assert "code sandbox" in said
