"""Log-probabilities next to a stage: read as written, bound to their stage and policy; `tests/hostile` damages them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.stages.columns import LogprobColumn

OF = {"stage": "0123", "age": 4}
UPDATES = [[np.linspace(-2, 0, n, dtype=np.float32) for n in (1, 5, 3)] for _ in range(3)]


def written(path: Path) -> LogprobColumn:
    column = LogprobColumn(path, OF, "do this")
    with column.write() as append:
        for update in UPDATES:
            append(update)
    return column


def test_what_is_written_is_read(tmp_path: Path) -> None:
    column = written(tmp_path / "behaviour.parquet")
    assert column.complete
    for number, update in enumerate(UPDATES):
        for one, other in zip(column.read(number), update, strict=True):
            np.testing.assert_array_equal(one, other)
    silent = LogprobColumn(tmp_path / "other.parquet", OF)
    with silent.write(enabled=False) as append:
        append(UPDATES[0])
    assert not silent.path.exists()
    assert not silent.complete


@pytest.mark.parametrize("of", [{}, {"stage": "0123"}, {"stage": "0123", "age": 5}, {"stage": "4567", "age": 4}])
def test_those_of_another_stage_or_policy_are_refused(of: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="was computed for other responses or another policy; do this"):
        LogprobColumn(written(tmp_path / "behaviour.parquet").path, of, "do this").read(0)
