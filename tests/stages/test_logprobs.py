"""Log-probabilities next to a stage: read as written, bound to their stage and policy, and no flipped bit passes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.stages.logprobs import has_logprobs, read_logprobs, sums, write_logprobs

OF = {"stage": "0123", "age": 4}
UPDATES = [[np.linspace(-2, 0, n, dtype=np.float32) for n in (1, 5, 3)] for _ in range(3)]


def written(path: Path) -> Path:
    with write_logprobs(path, OF, write=True) as append:
        for update in UPDATES:
            append(update)
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "behaviour.parquet")
    assert has_logprobs(path)
    for number, update in enumerate(UPDATES):
        for one, other in zip(read_logprobs(path, OF, number, ""), update, strict=True):
            np.testing.assert_array_equal(one, other)
    with write_logprobs(tmp_path / "other.parquet", OF, write=False) as append:
        append(UPDATES[0])
    assert not has_logprobs(tmp_path / "other.parquet")


def test_no_flipped_bit_gives_other_logprobs(tmp_path: Path) -> None:
    """Of both files, at 200 places each; without checksums 375 of 465 such bits gave other values, silently."""
    path = written(tmp_path / "behaviour.parquet")
    for file in (path, sums(path)):
        whole = file.read_bytes()
        for place in random.Random(0).sample(range(len(whole)), min(200, len(whole))):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            try:
                read = [read_logprobs(path, OF, number, "do this") for number in range(3)]
            except UserError as error:
                assert str(error).endswith("do this")  # noqa: PT017
                continue
            assert all((a == b).all() for r, u in zip(read, UPDATES, strict=True) for a, b in zip(r, u, strict=True))
            assert place < 4, "only the magic bytes at the start, which say nothing, have no checksum"
        file.write_bytes(whole)


@pytest.mark.parametrize("of", [{}, {"stage": "0123"}, {"stage": "0123", "age": 5}, {"stage": "4567", "age": 4}])
def test_those_of_another_stage_or_policy_are_refused(of: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="of other responses or of another policy; do this"):
        read_logprobs(written(tmp_path / "behaviour.parquet"), of, 0, "do this")


@pytest.mark.parametrize("missing", ["behaviour.parquet", "behaviour.json"])
def test_a_missing_half_is_named(missing: str, tmp_path: Path) -> None:
    path = written(tmp_path / "behaviour.parquet")
    (tmp_path / missing).unlink()
    assert not has_logprobs(path)
    with pytest.raises(UserError, match=f"{missing}: missing"):
        read_logprobs(path, OF, 0, "")
