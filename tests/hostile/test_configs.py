"""Odd model configurations and tokenizers: used as they say, or refused in one sentence, by every reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer, load_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import read_config, read_model_config
from mugrpo_megatron.files.vocabulary import tokenizer_size
from mugrpo_megatron.weights.families import read_architecture
from tests.files.test_hf_config import DENSE
from tests.hostile.damage import ODD_TEXTS, damages


def test_damaged_texts(tmp_path: Path) -> None:
    whole = json.dumps({"model_type": "llama", **DENSE}, indent=1).encode()
    readers: tuple[Callable[[Path], object], ...] = (read_config, read_architecture, read_model_config)
    (tmp_path / "model.safetensors").touch()
    for content in (*ODD_TEXTS, *damages(whole, 300, seed=2)):
        (tmp_path / "config.json").write_bytes(content)
        for read in readers:
            with suppress(UserError):
                read(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json", "vocab.json"])
def test_damaged_tokenizers(name: str, tmp_path: Path) -> None:
    build_arithmetic_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / name
    if not path.exists():
        (tmp_path / "tokenizer.json").unlink()
        path.write_text('{"a": 0, "b": 1}')
    whole = path.read_bytes()
    refused = 0
    for content in (*ODD_TEXTS, *damages(whole, 60, seed=3)):
        path.write_bytes(content)
        for read in (tokenizer_size, load_tokenizer):
            try:
                read(tmp_path)
            except UserError as error:
                refused += 1
                assert str(tmp_path) in str(error)
                assert "\n" not in str(error)
    assert refused
