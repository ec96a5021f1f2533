"""The state of a checkpoint: what a checksum does not catch is still one sentence."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from string import ascii_letters
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.checkpoint_state import (
    STATE,
    create_empty_directory,
    file_checksums,
    first_damage,
    publish,
    read_state,
)
from mugrpo_megatron.files.durable import write_checksummed_json
from mugrpo_megatron.run.cursor import Cursor

WHOLE = {"stage": 1, "age": 2, "updates": 5, "repeated": 0}


def write(directory: Path, cursor: Any) -> Path:
    body = {"cursor": cursor, "updates_done": 5, "steps_done": 5, "model": {}, "files": {}}
    write_checksummed_json(directory / STATE, "state", body)
    return directory


@pytest.mark.parametrize("cursor", [WHOLE, {name: WHOLE[name] for name in ("stage", "age", "updates")}])
def test_a_cursor_is_read(cursor: dict[str, int], tmp_path: Path) -> None:
    assert Cursor(**read_state(write(tmp_path, cursor))["cursor"]) == Cursor(1, 2, 5)


@settings(max_examples=30)
@given(
    st.one_of(
        st.sampled_from(["stage", "age", "updates"]).map(lambda name: {k: v for k, v in WHOLE.items() if k != name}),
        st.text(ascii_letters, min_size=1).filter(lambda name: name not in WHOLE).map(lambda name: {**WHOLE, name: 1}),
        st.sampled_from(sorted(WHOLE)).flatmap(
            lambda name: st.sampled_from([-1, 1.5, "2", None, [], {}, True]).map(lambda bad: {**WHOLE, name: bad})
        ),
        st.sampled_from([None, [], 3, "stage"]),
    )
)
def test_another_cursor_is_damage(cursor: Any) -> None:
    """With a checksum that is right: the state was written by something else."""
    with tempfile.TemporaryDirectory() as folder:
        directory = write(Path(folder), cursor)
        with pytest.raises(UserError, match=r"state.json is damaged: cursor.* use an older checkpoint"):
            read_state(directory)
        assert "is damaged: cursor" in str(first_damage(directory, 0, 1))


def test_a_file_that_no_rank_has_listed_gets_its_checksum(tmp_path: Path) -> None:
    """Ranks share the files out by their listings, and one node's may lack what another has just written."""
    partial, directory = tmp_path / ".partial", tmp_path / "checkpoint"
    partial.mkdir()
    for name in ("a", "b", "c"):
        (partial / name).write_text(name)
    listed = file_checksums(partial, 0, 2) | file_checksums(partial, 1, 2)
    state = {"cursor": WHOLE, "updates_done": 5, "steps_done": 5, "model": {}}
    publish(partial, directory, {**state, "files": {name: listed[name] for name in ("a", "c")}})
    assert read_state(directory)["files"] == listed


def test_a_full_disk_is_told_in_megabytes(tmp_path: Path) -> None:
    """0.0 GiB of 0.0 GiB said nothing."""
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(UserError, match=r"a checkpoint takes about [\d,]+\.\d MiB and [\d,]+\.\d MiB are free"):
        create_empty_directory(tmp_path / "partial", free + (300 << 20))
    assert not list(tmp_path.iterdir())
