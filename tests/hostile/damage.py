"""Damage to files, the same for the same seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ODD_JSON: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 8, 2**31, 2**63, 10**30, -(10**30)),
    *(0.0, 0.5, -0.5, 1e300, float("nan"), float("inf")),
    *("", "8", "false", "x" * 5000, "a\0b", "\x1b[2J", "../../etc/passwd", "/etc/passwd", "ü" * 300),
    *([], [0], ["a", 1], [[]], [None] * 100),
    *({}, {"a": 1}, {"a": {"b": []}}),
]
"""Values that a field does not expect."""

ODD_TEXTS: list[bytes] = [
    *(b"", b" ", b"\0", b"null", b"true", b"3", b'"x"', b"[]", b"[1, 2]", b"{}", b"{", b"{}{}"),
    *(b"\xff\xfe{}", b"\xef\xbb\xbf{}", json.dumps({"a": 1}).encode("utf-16"), b"\x80\x04.", b"PK\x03\x04" + bytes(40)),
    *(b"[" * 100_000, b'{"a":' * 100_000, b'{"a": 1' + b"0" * 5000 + b"}"),
    *(b'{"a": "\\ud800"}', b'{"model_type": "\\ud800"}', b'{"model_type": "qwen2"}'),
    *(b'{"weight_map": %s}' % value for value in (b"[]", b"{}", b"null", b'{"a": 1}', b'{"a": ["b"]}')),
]
"""Whole contents of a JSON file."""


def damages(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    """`count` versions of a file: bits flipped, cut short, zeroes, bytes inserted, blocks moved, appended to."""
    chance = random.Random(seed)
    while count:
        damaged = _damaged(bytearray(data), chance)
        if damaged != data:  # zeroes over zeroes
            count -= 1
            yield damaged


def flip(path: Path) -> None:
    """Change a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _damaged(data: bytearray, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    length = chance.choice([1, 2, 8, 64, 512])
    match chance.choice(
        ["flip", "flip", "flip", "flips", "cut", "zeroes", "noise", "insert", "remove", "append", "move"]
    ):
        case "flip":
            data[at] ^= 1 << chance.randrange(8)
        case "flips":
            for _ in range(20):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        case "cut":
            del data[at:]
        case "zeroes":
            data[at : at + length] = bytes(min(length, len(data) - at))
        case "noise":
            data[at : at + length] = chance.randbytes(min(length, len(data) - at))
        case "insert":
            data[at:at] = chance.randbytes(length)
        case "remove":
            del data[at : at + length]
        case "append":
            data += chance.randbytes(length)
        case "move":
            block = data[at : at + length]
            del data[at : at + length]
            to = chance.randrange(len(data) + 1)
            data[to:to] = block
    return bytes(data)
