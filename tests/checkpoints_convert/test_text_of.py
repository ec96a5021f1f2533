"""The text of a vision-language directory, as transformers writes it, taken out and put back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from checkpoints_convert import hf_to_megatron, megatron_to_hf, text_of
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.weights.families import read_architecture
from mugrpo_megatron.weights.hf import carry_files
from tests import models
from tests.weights import tiny

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3.5 with vision, in bfloat16 with float32 rows and a layer of multi-token prediction."""
    directory = tmp_path_factory.mktemp("vision")
    text = {**models.SIZES, **models.DELTA, "vocab_size": 512, "tie_word_embeddings": True}
    torch.manual_seed(0)
    settings: dict[str, Any] = {"text_config": text, "vision_config": VISION, "tie_word_embeddings": True}
    config = CONFIG_MAPPING["qwen3_5"](**settings)
    AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("A_log", "linear_attn.norm.weight")):
            weights[name] = torch.randn(tensor.shape)
    weights["mtp.fc.weight"] = torch.randn(4, 4)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    build_arithmetic_tokenizer().save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text("{}")
    return directory


def test_text_is_taken_out_and_put_back_bit_by_bit(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through a Megatron checkpoint in between: types of single tensors stay."""
    text, back = tmp_path / "text", tmp_path / "back"
    assert text_of.main(["--hf", str(published), "--out", str(text)]) == 0
    assert "left out: 1 tensors of mtp, " in capsys.readouterr().out
    assert read_architecture(text).family == "qwen3_5_text"
    whole, alone = load_file(published / "model.safetensors"), load_file(text / "model.safetensors")
    assert {t.dtype for name, t in alone.items() if name.endswith("A_log")} == {torch.float32}
    assert alone.keys() == {text_of.text_name(name) for name in whole} - {""}
    loaded = tiny.load(text).state_dict()
    assert all(torch.equal(loaded[name], tensor.float()) for name, tensor in alone.items())

    assert hf_to_megatron.main(["--hf", str(text), "--out", str(tmp_path / "m"), "--tp", "2"]) == 0
    arguments = ["--megatron", str(tmp_path / "m"), "--out", str(tmp_path / "again"), "--like", str(text)]
    assert megatron_to_hf.main(arguments) == 0
    tiny.assert_same_weights(text, tmp_path / "again")
    put = ["--hf", str(published), "--out", str(back), "--put", str(tmp_path / "again")]
    assert text_of.main(put) == 0
    tiny.assert_same_weights(published, back)
    assert json.loads((back / "config.json").read_text()) == json.loads((published / "config.json").read_text())
    assert (back / "preprocessor_config.json").is_file()


def test_a_trained_text_replaces_the_old_and_vision_stays(published: Path, tmp_path: Path) -> None:
    assert text_of.main(["--hf", str(published), "--out", str(tmp_path / "text")]) == 0
    weights = load_file(tmp_path / "text" / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, tmp_path / "text" / "model.safetensors")
    text_of.convert(published, tmp_path / "back", tmp_path / "text", shard_bytes=20_000)
    before = load_file(published / "model.safetensors")
    files = list((tmp_path / "back").glob("*.safetensors"))
    after = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 1
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if text_of.text_name(name)}


def test_a_model_without_vision_or_another_text_is_refused(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models.save_model(
        tmp_path / "other", "qwen3_5_text", vocab_size=512, intermediate_size=96, tie_word_embeddings=True
    )
    assert text_of.main(["--hf", str(tmp_path / "other"), "--out", str(tmp_path / "out")]) == 2
    assert "'qwen3_5_text' has no text to take out" in capsys.readouterr().err
    put = ["--put", str(tmp_path / "other")]
    assert text_of.main(["--hf", str(published), "--out", str(tmp_path / "out"), *put]) == 2
    assert "but config.json says [64, 32]" in capsys.readouterr().err
    packed = tmp_path / "packed"
    shutil.copytree(published, packed)
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    save_file({name: torch.zeros(2, 4, 4)}, packed / "model.safetensors", {"format": "pt"})
    assert text_of.main(["--hf", str(packed), "--out", str(tmp_path / "out")]) == 2
    assert "packs all experts of a layer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("value", "kind"), [(torch.nan, "not a number"), (torch.inf, "infinite")])
def test_a_value_that_is_not_finite_is_named_and_nothing_stays(
    value: float, kind: str, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(published, damaged)
    weights = load_file(damaged / "model.safetensors")
    name = next(name for name in weights if name.endswith("mlp.up_proj.weight"))
    weights[name][0, 0] = value
    save_file(weights, damaged / "model.safetensors", {"format": "pt"})
    assert text_of.main(["--hf", str(damaged), "--out", str(tmp_path / "out")]) == 2
    assert f"{name}: a value is {kind}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", "root:$6$salt$hash:19000:0:99999:7:::\n"),
        ("special_tokens_map.json", "[1]"),
        ("merges.txt", "root:$6$salt$hash:19000:0:99999:7:::\n"),
        ("chat_template.jinja", "root:$6$salt$hash:19000:0:99999:7:::\n"),
        ("chat_template.jinja", "-----BEGIN OPENSSH PRIVATE KEY-----\n{{\n"),
        ("tokenizer.model", "-----BEGIN OPENSSH PRIVATE KEY-----\n"),
        ("tokenizer.model", "\nAWS_SECRET_ACCESS_KEY=abc\n"),
    ],
)
def test_a_carried_file_is_what_its_name_says(
    name: str, content: str, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be a link to any file that this user can read, and would land in the output."""
    linked, secret = tmp_path / "linked", tmp_path / "secret"
    shutil.copytree(published, linked)
    secret.write_text(content)
    (linked / name).unlink(missing_ok=True)
    (linked / name).symlink_to(secret)
    assert text_of.main(["--hf", str(linked), "--out", str(tmp_path / "out")]) == 2
    assert name in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=name):
        carry_files(linked, tmp_path, torch.float32)
