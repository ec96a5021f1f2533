"""What an engine's process needs before it is started."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from mugrpo_megatron.engine.process import HostProcess
from mugrpo_megatron.errors import UserError
from tests.hostile.places import disk


def test_a_full_disk_of_temporary_files_is_told_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder can still be made there, so that SGLang would put its files elsewhere."""
    with disk(tmp_path / "small", 1 << 16) as small:
        (small / "fill").write_bytes(bytes((1 << 16) - 4096))
        monkeypatch.setattr(tempfile, "tempdir", str(small))
        with pytest.raises(UserError, match=f"written to {small} .*No space left on device.*TMPDIR"):
            HostProcess(dict(os.environ), cuda=False)
        assert [path.name for path in small.iterdir()] == ["fill"]


def test_no_directory_for_temporary_files_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    with pytest.raises(UserError, match=r"No usable temporary directory found.*TMPDIR"):
        HostProcess(dict(os.environ), cuda=False)
