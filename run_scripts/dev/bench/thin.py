"""Removes the machine code of all architectures but one from a CUDA library, so that it is small enough to carry.

    python -m run_scripts.dev.bench.thin libtransformer_engine.so thin.so --architecture 90

The section .nv_fatbin holds containers: a header, then entries, each with a header of its own and the code of one
architecture, or PTX. The entries that are kept move to the front of their container, whose size is reduced to them; the
rest becomes zeros. Every address stays, and compression removes the zeros: the 463 MB of Transformer Engine 2.11 become
10 MB.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterator
from pathlib import Path

MAGIC = 0xBA55ED50
CONTAINER = struct.Struct("<IHHQ")
"""Header of a container: magic number, version, bytes of this header, bytes of the entries."""
ENTRY = struct.Struct("<HHIQ12xI")
"""Header of an entry: kind, version, bytes of this header, bytes of the code, (sizes that do not change),
architecture."""
MACHINE_CODE = 2
"""The kind of an entry with machine code; the kind of PTX is 1."""


def fatbin_section(data: bytes | bytearray) -> tuple[int, int]:
    """Start and end of .nv_fatbin in a 64-bit ELF file; ValueError without one."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + size * number) for number in range(count)]
    names = headers[of_names][4]
    wanted = b".nv_fatbin\0"
    for name, _, _, _, start, length in headers:
        if data[names + name : names + name + len(wanted)] == wanted:
            return start, start + length
    raise ValueError("there is no section .nv_fatbin: this is no library with CUDA code")


def containers(data: bytes | bytearray, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields (start, start of the entries, end of the entries) of each container; containers start at multiples of
    8."""
    while start + CONTAINER.size <= end:
        magic, _, header, size = CONTAINER.unpack_from(data, start)
        if magic != MAGIC:
            start += 8
            continue
        yield start, start + header, start + header + size
        start += header + size


def thin(data: bytearray, architecture: int) -> int:
    """Keep only the machine code of sm_`architecture`, in place; returns the number of entries that are kept.

    Raises ValueError if there are none, since the library would then fail at its first kernel.
    """
    kept = 0
    for start, first, end in containers(data, *fatbin_section(data)):
        place = at = first
        while at < end:
            kind, _, header, size, of = ENTRY.unpack_from(data, at)
            whole = header + size
            if kind == MACHINE_CODE and of == architecture:
                data[place : place + whole] = data[at : at + whole]
                place, kept = place + whole, kept + 1
            at += whole
        magic, version, header, _ = CONTAINER.unpack_from(data, start)
        CONTAINER.pack_into(data, start, magic, version, header, place - first)
        data[place:end] = bytes(end - place)
    if not kept:
        raise ValueError(f"there is no machine code for sm_{architecture}")
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--architecture", type=int, default=90)
    options = parser.parse_args()
    data = bytearray(options.library.read_bytes())
    kept = thin(data, options.architecture)
    options.out.write_bytes(data)
    print(f"{options.out}: {kept} entries of sm_{options.architecture}")


if __name__ == "__main__":
    main()
