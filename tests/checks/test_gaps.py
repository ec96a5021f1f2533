"""The table of gaps: every row is looked at again when the pinned SGLang moves."""

import tomllib
from pathlib import Path

from mugrpo_megatron.checks.engines import DEVICE_GAPS, GAPS, PROJECT_LIMIT, SYNC_GAPS

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_every_row_was_seen_in_the_pinned_sglang() -> None:
    (pin,) = (one for one in PROJECT["optional-dependencies"]["cuda"] if one.startswith("sglang=="))
    for gap in (*GAPS, *DEVICE_GAPS, *SYNC_GAPS):
        assert gap.until == PROJECT_LIMIT or pin.startswith(f"sglang=={gap.until}"), gap.why
