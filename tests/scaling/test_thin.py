"""run_scripts/dev/bench/thin.py on a file that is laid out as a CUDA library: an ELF file with fat binaries."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from run_scripts.dev.bench.thin import CONTAINER, ENTRY, MACHINE_CODE, MAGIC, containers, fatbin_section, thin

PTX = 1
Entry = tuple[int, int, bytes]
"""Kind, architecture, code."""


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    header = ENTRY.pack(kind, 0x101, 64, len(code), architecture)
    return header.ljust(64, b"\7") + code


def container(entries: list[Entry]) -> bytes:
    inside = b"".join(entry(*each) for each in entries)
    return CONTAINER.pack(MAGIC, 1, CONTAINER.size, len(inside)) + inside


def library(section: bytes, name: bytes = b".nv_fatbin") -> bytearray:
    """An ELF file with this section, its names, and a section of text before it."""
    names = b"\0" + name + b"\0.text\0.shstrtab\0"
    text, at = b"text" * 4, 64
    parts = [(1 + len(name) + 1, text), (1, section), (names.index(b".shstrtab"), names)]
    headers, body = [], b""
    for where, data in parts:
        headers.append(struct.pack("<IIQQQQIIQQ", where, 1, 0, 0, at + len(body), len(data), 0, 0, 8, 0))
        body += data
    file = bytearray(64) + body
    struct.pack_into("<Q", file, 0x28, len(file))
    struct.pack_into("<HHH", file, 0x3A, 64, len(headers), 2)
    return file + b"".join(headers)


def read(data: bytearray) -> list[list[Entry]]:
    """The entries of every container."""
    found = []
    for _, at, end in containers(data, *fatbin_section(data)):
        entries = []
        while at < end:
            kind, _, header, size, architecture = ENTRY.unpack_from(data, at)
            entries.append((kind, architecture, bytes(data[at + header : at + header + size])))
            at += header + size
        found.append(entries)
    return found


FIRST: list[Entry] = [
    (PTX, 75, b"p" * 16),
    (MACHINE_CODE, 80, b"a" * 24),
    (MACHINE_CODE, 90, b"b" * 40),
    (PTX, 90, b"q" * 8),
]
SECOND: list[Entry] = [(MACHINE_CODE, 90, b"c" * 8), (MACHINE_CODE, 120, b"d" * 32), (MACHINE_CODE, 90, b"e" * 16)]


def test_machine_code_of_one_architecture_is_left_and_nothing_moves_between_containers() -> None:
    padding = bytes(16)
    data = library(container(FIRST) + padding + container(SECOND))
    whole, size = bytes(data), len(data)
    assert read(data) == [FIRST, SECOND], "the test reads what it has written"
    starts = [start for start, _, _ in containers(data, *fatbin_section(data))]
    assert thin(data, 90) == 3
    assert read(data) == [[FIRST[2]], [SECOND[0], SECOND[2]]]
    assert [start for start, _, _ in containers(data, *fatbin_section(data))] == starts, "the library points to them"
    assert len(data) == size
    section = slice(*fatbin_section(data))
    assert data[: section.start] + data[section.stop :] == whole[: section.start] + whole[section.stop :]
    for code in (b"a" * 24, b"p" * 16, b"d" * 32):
        assert code not in data


def test_a_library_that_would_have_no_code_is_refused() -> None:
    data = library(container(FIRST))
    with pytest.raises(ValueError, match="no machine code for sm_100"):
        thin(data, 100)
    with pytest.raises(ValueError, match="no section"):
        thin(library(b"", name=b".rodata"), 90)


def test_the_file_is_written_beside_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from run_scripts.dev.bench import thin as command

    source, out = tmp_path / "a.so", tmp_path / "b.so"
    source.write_bytes(library(container(FIRST)))
    monkeypatch.setattr("sys.argv", ["thin", str(source), str(out), "--architecture", "90"])
    command.main()
    assert read(bytearray(out.read_bytes())) == [[FIRST[2]]]
    assert read(bytearray(source.read_bytes())) == [FIRST]
