"""Adapters of other programs, one place of their two files changed: an adapter that fits, or one sentence."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.extras.lora.peft_files import CONFIG, WEIGHTS, read_adapter
from mugrpo_megatron.weights.families import read_architecture
from tests.extras.lora.adapted import write_adapter
from tests.hostile.damage import damages
from tests.hostile.fuzz import changed
from tests.hostile.outcome import sentence
from tests.tiny import save_model

pytestmark = pytest.mark.night


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and an adapter of it."""
    folder = tmp_path_factory.mktemp("adapter")
    return save_model(folder / "model"), write_adapter(folder / "whole", folder / "model")


def parts(file: Path) -> tuple[Any, bytes]:
    """The header of a safetensors file, and its data."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


@given(st.data())
def test_an_adapter(whole: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    model, adapter = whole
    copy = tmp_path_factory.getbasetemp() / "adapter"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(adapter, copy)
    kind = data.draw(st.sampled_from(["config", "header", "bytes"]))
    if kind == "config":
        (copy / CONFIG).write_text(json.dumps(data.draw(changed(json.loads((adapter / CONFIG).read_text())))))
    elif kind == "header":
        header, values = parts(adapter / WEIGHTS)
        text = json.dumps(data.draw(changed(header))).encode()
        (copy / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + values)
    else:
        [damaged] = damages((adapter / WEIGHTS).read_bytes(), 1, data.draw(st.integers(0, 10**6)))
        (copy / WEIGHTS).write_bytes(damaged)

    def read() -> None:
        found = read_adapter(copy, read_architecture(model))
        assert math.isfinite(found.alpha / found.rank)
        assert len(found.read()) == len(parts(adapter / WEIGHTS)[0]) - 1

    sentence(read)
