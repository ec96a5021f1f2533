"""The doctor: imports judged from outside, two packages called apex told apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from mugrpo_megatron.commands.doctor import Finding, apex, doctor, findings_table, import_errors


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
    errors = import_errors(["sound", "broken", "not_there", "crashing", "later"], cuda=False)
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


def test_table_names_the_way_out_of_what_is_missing_and_only_that() -> None:
    console = Console(width=160)
    found = [
        Finding("sglang", "absent", "not installed", "samples", needed=True, remedy="run setup"),
        Finding("triton", "ok", "3.7.1", "kernels", needed=True, remedy="never shown"),
    ]
    with console.capture() as capture:
        console.print(findings_table(found))
    assert "run setup" in capture.get()
    assert "never shown" not in capture.get()


@pytest.mark.process
def test_this_machine_has_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor() == 0
    assert "megatron-core" in capsys.readouterr().out
