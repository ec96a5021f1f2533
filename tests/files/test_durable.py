"""Atomic writes with several writers and full disks; `tests/hostile/test_full_and_killed.py` kills at every step."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.errors import NO_ROOM, UserError, refused_by_system
from mugrpo_megatron.files.durable import (
    durable_directory,
    durable_file,
    open_nofollow,
    publish,
    read_checksummed_json,
    remove_leftovers,
    resumable,
    write_checksummed_json,
    write_json,
    write_text,
)
from tests.refusals import refuses

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_content_is_synced_before_it_has_the_name_and_the_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        kind = "directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        events.append(f"fsync {kind} of {os.fstat(descriptor).st_size if kind == 'file' else 0} bytes")
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        events.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    write_text(tmp_path / "a", "12345")
    assert events == ["fsync file of 5 bytes", "rename", "fsync directory of 0 bytes"]


def fill(path: Path, text: str) -> None:
    with durable_directory(path) as partial:
        for name in ("config", "weights"):
            (partial / name).write_text(text)
        assert not path.exists() or (path / "weights").read_text() == "old", "the old one is there until the new one is"


@pytest.mark.parametrize("writes", ["file", "directory"])
def test_what_fails_leaves_nothing_and_keeps_the_old(writes: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if writes == "file":
        write_text(path, "old")
    else:
        fill(path, "old")
    with contextlib.suppress(ZeroDivisionError):
        if writes == "file":
            with durable_file(path) as file:
                file.write(b"half")
                raise ZeroDivisionError
        with durable_directory(path) as partial:
            (partial / "config").write_text("half")
            raise ZeroDivisionError
    assert names(tmp_path) == {"x"}
    assert (path if writes == "file" else path / "config").read_text() == "old"


def test_what_another_has_made_meanwhile_stays_and_so_does_the_work(tmp_path: Path) -> None:
    path = tmp_path / "x"
    taken = pytest.raises(UserError, match="was created meanwhile")
    with taken as refused, durable_directory(path, replace=False) as partial:
        (partial / "mine").touch()
        path.mkdir()
        (path / "theirs").touch()
    assert names(path) == {"theirs"}
    assert names(partial) == {"mine"}
    assert str(partial) in str(refused.value)


@pytest.mark.process
def test_a_writer_that_is_killed_leaves_what_only_its_own_name_removes(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from mugrpo_megatron.files.durable import durable_file\n"
        "with durable_file(Path(sys.argv[1])) as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "shard-00000.parquet")], check=False)
    assert killed.returncode == -signal.SIGKILL
    (leftover,) = names(tmp_path)
    for other in ("shard-00001.parquet", "00000.parquet", "shard-*", "[0-9]*"):
        remove_leftovers(tmp_path, other) if other != "shard-*" else None
        assert names(tmp_path) == {leftover}
    (tmp_path / "shard-00000.parquet.partial").write_text("a user's")
    resumable(tmp_path / "shard-00000.parquet").write_text("somebody goes on with it")
    remove_leftovers(tmp_path, "shard-*.parquet")
    assert leftover not in names(tmp_path)
    assert len(names(tmp_path)) == 2


def test_writers_of_one_path_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    with durable_file(path) as slow:
        slow.write(b"a" * 9)
        write_text(path, "b")
        slow.write(b"a" * 9)
    assert path.read_text() == "a" * 18  # the last to finish
    failures: list[BaseException] = []

    def write(letter: str) -> None:
        try:
            for _ in range(30):
                write_text(path, letter * 5000)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=[letter]) for letter in "cdef"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    text = path.read_text()
    assert text in {letter * 5000 for letter in "cdef"}
    assert names(tmp_path) == {"report.html"}


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_are_those_of_a_plain_open(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        (tmp_path / "plain").write_text("")
        write_text(tmp_path / "new", "")
        assert mode(tmp_path / "new") == mode(tmp_path / "plain")
        (tmp_path / "new").chmod(0o640)
        write_text(tmp_path / "new", "again")
        assert mode(tmp_path / "new") == 0o640
        (tmp_path / "made").mkdir()
        with durable_directory(tmp_path / "d") as partial:
            (partial / "inside").write_text("")
        assert mode(tmp_path / "d") == mode(tmp_path / "made")
        assert mode(tmp_path / "d" / "inside") == mode(tmp_path / "plain")
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("target", ["file", "nothing"])
def test_a_link_is_replaced_and_its_target_kept(tmp_path: Path, target: str) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "file").write_text("precious")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "far" / target)
    write_text(link, "new")
    assert not link.is_symlink()
    assert link.read_text() == "new"
    assert (tmp_path / "far" / "file").read_text() == "precious"
    assert names(tmp_path / "far") == {"file"}


@pytest.mark.parametrize("mode", ["ab", "a+b", "r+b"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "directory"])
def test_a_file_of_a_fixed_name_is_never_opened_through_a_link(tmp_path: Path, kind: str, mode: str) -> None:
    path, target = tmp_path / "engine.log", tmp_path / "precious"
    path.symlink_to(target) if "link" in kind else path.mkdir()
    if kind == "link":
        target.write_text("precious")
    refuses(r"engine\.log cannot be written: it is a link", open_nofollow, path, mode, buffering=0)
    assert target.exists() == (kind == "link")
    assert kind != "link" or target.read_text() == "precious"


def test_a_pipe_of_a_fixed_name_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "engine.log")
    refuses("not a regular file", open_nofollow, tmp_path / "engine.log", "ab")


def test_a_linked_directory_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere", "old")
    (tmp_path / "hf").symlink_to(tmp_path / "elsewhere")
    fill(tmp_path / "hf", "new")
    assert (tmp_path / "hf" / "config").read_text() == "new"
    assert (tmp_path / "elsewhere" / "config").read_text() == "old"
    assert names(tmp_path) == {"hf", "elsewhere"}


@pytest.mark.parametrize("place", ["directory", "fifo", "below a file", "nowhere"])
def test_a_path_that_cannot_be_written_is_refused_before_anything_is_written(place: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if place == "directory":
        path.mkdir()
    elif place == "fifo":
        os.mkfifo(path)
    elif place == "below a file":
        (tmp_path / "file").write_text("")
        path = tmp_path / "file" / "x"
    else:
        path = tmp_path / "missing" / "x"
    before = names(tmp_path)
    wanted = pytest.raises(UserError, match=r"x (exists and is not a regular file|cannot be written \()")
    with wanted, durable_file(path):
        pytest.fail("the block ran")
    assert names(tmp_path) == before


@pytest.mark.parametrize("number", NO_ROOM)
def test_a_full_disk_is_one_sentence_even_where_a_library_hides_it(number: int, tmp_path: Path) -> None:
    class Full:
        """A stream on a full disk, as torch.save sees it."""

        def write(self, data: bytes) -> int:
            raise OSError(number, "full")

        def flush(self) -> None: ...

    said = r"(no space left for {0}|{0} is larger than a file may be)"
    with pytest.raises(UserError, match=said.format(r"a\.pt")), durable_file(tmp_path / "a.pt"):
        torch.save(torch.zeros(8), Full())  # type: ignore[arg-type]  # as much of a file as torch asks for
    wanted = pytest.raises(UserError, match=said.format("hf"))
    with wanted, durable_directory(tmp_path / "hf") as partial, durable_file(partial / "weights"):
        raise OSError(number, "full")
    with pytest.raises(UserError, match=said.format("b")), durable_file(tmp_path / "b"):
        raise ValueError(f"I/O error: full (os error {number})")  # as safetensors says it
    assert not names(tmp_path)
    assert (refused_by_system(OSError(number, "full")) or "").startswith("a file: full; ")


@pytest.mark.process
def test_a_limit_of_file_sizes_is_named(tmp_path: Path) -> None:
    """The real limit, at a write and in torch's writer."""
    if (child := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        held = 0
        for write in (lambda file: file.write(bytes(8192)), lambda file: torch.save(torch.zeros(4096), file)):
            try:
                with durable_file(tmp_path / "a.pt") as file:
                    write(file)
            except UserError as error:
                held += "ulimit -f" in str(error) and "a.pt" in str(error)
        os._exit(held)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert not names(tmp_path)


def test_a_directory_that_several_commands_fill_replaces_the_old_one(tmp_path: Path) -> None:
    for text in ("old", "new"):
        partial = resumable(tmp_path / "checkpoint")
        partial.mkdir()
        (partial / "nested").mkdir()
        (partial / "nested" / "file").write_text(text)
        publish(partial, tmp_path / "checkpoint")
        assert names(tmp_path) == {"checkpoint"}
        assert (tmp_path / "checkpoint" / "nested" / "file").read_text() == text


@settings(max_examples=20)
@given(body=JSON, head=st.dictionaries(st.sampled_from(["format", "kind"]), st.integers(0, 3)))
def test_a_sealed_value_comes_back(tmp_path_factory: pytest.TempPathFactory, body: Any, head: dict[str, int]) -> None:
    path = tmp_path_factory.mktemp("sealed") / "state.json"
    write_checksummed_json(path, "state", body, **head)
    assert read_checksummed_json(path, "state", **head) == body
    for other in ({**head, "format": 7}, {**head, "unknown": None}):
        refuses("damaged", read_checksummed_json, path, "state", **other, error=ValueError)
    refuses("damaged", read_checksummed_json, path, "stage", error=ValueError)


def flips(whole: bytes) -> Iterator[bytes]:
    for place in range(len(whole)):
        yield whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]


def test_a_flipped_bit_in_a_sealed_value_is_found(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    body = {"shards": [{"file": "shard-00000.parquet", "rows": [4, 4], "share": 0.5}], "sealed": None}
    write_checksummed_json(path, "stage", body, format=1)
    for flipped in flips(path.read_bytes()):
        path.write_bytes(flipped)
        try:
            found = read_checksummed_json(path, "stage", format=1)
        except ValueError:
            continue
        assert found == body  # white space


@pytest.mark.parametrize(
    "text", ["", "[]", "3", '"stage"', "{}", '{"stage": 1}', '{"sha256": null, "stage": 1}', "\xff"]
)
def test_other_json_is_not_taken_for_a_sealed_value(text: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(text.encode("latin-1"))
    refuses(r"damaged|Expecting value|decode", read_checksummed_json, tmp_path / "x", "stage", error=ValueError)


def test_json_for_people_ends_with_a_newline(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", {"a": [1, 2]})
    text = (tmp_path / "summary.json").read_text()
    assert text.endswith("}\n")
    assert json.loads(text) == {"a": [1, 2]}
