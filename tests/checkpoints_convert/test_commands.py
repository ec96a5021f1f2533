"""The commands as a user runs them: identity, types, tokenizers, stopping and continuing, inputs that are wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceTrainer
from transformers import AutoTokenizer

from checkpoints_convert import hf_to_megatron, megatron_to_hf, output, verify
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.recipe.systems import ParallelSection
from tests import models
from tests.patience import PATIENCE_S
from tests.ranks import run_ranks
from tests.weights import tiny
from tests.weights.ranks_work import Layout, reload_megatron, save_training_checkpoint
from tests.weights.tiny import assert_same_weights

Spoil = Callable[[Path], Any]
NOTE = "model: fields that change nothing in transformers or in SGLang: is_llama_config, unsloth_fixed\n"
SECOND = "model-00002-of-00003.safetensors"


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 checkpoint in three shards with its tokenizer."""
    directory = tmp_path_factory.mktemp("source") / "qwen2"
    model = models.save_model(directory, "qwen2", vocab_size=512)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="100KB")
    build_arithmetic_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def megatron(hf: Path) -> Path:
    assert to_megatron(hf, hf.parent / "megatron") == 0
    return hf.parent / "megatron"


def to_megatron(hf: Path, out: Path, *options: str) -> int:
    return hf_to_megatron.main(["--hf", str(hf), "--out", str(out), *options])


def to_hf(megatron: Path, out: Path, like: Path, *options: str) -> int:
    return megatron_to_hf.main(["--megatron", str(megatron), "--out", str(out), "--like", str(like), *options])


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_there_and_back(hf: Path, tmp_path: Path, dtype: str) -> None:
    assert to_megatron(hf, tmp_path / "m", "--tp", "2", "--dtype", dtype) == 0
    assert to_hf(tmp_path / "m", tmp_path / "back", hf) == 0
    held = torch.float32 if dtype == "keep" else torch.bfloat16
    expected, found = tensors(hf), tensors(tmp_path / "back")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value.to(held), found[name]), name
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == str(held).removeprefix("torch.")
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (hf / "tokenizer.json").read_bytes()


def test_named_chat_templates_travel_and_are_replaced(hf: Path, tmp_path: Path) -> None:
    """transformers keeps the templates that have names in a folder; each end of the way has it, and its checksum."""
    source, folder = shutil.copytree(hf, tmp_path / "source"), "additional_chat_templates"
    (source / folder).mkdir()
    (source / folder / "tool_use.jinja").write_text("{{ messages }} {{ tools }}")
    (source / folder / "notes.txt").write_text("not a template")
    (source / "tekken.json").write_text("{}")
    for _ in range(2):  # what a conversion wrote may be replaced, its folder too
        assert to_megatron(source, tmp_path / "m", "--overwrite") == 0
        assert to_hf(tmp_path / "m", tmp_path / "back", source) == 0
        shutil.rmtree(tmp_path / "back")
    assert to_hf(tmp_path / "m", tmp_path / "back", tmp_path / "m") == 0
    for there in (tmp_path / "m", tmp_path / "back"):
        assert [path.name for path in (there / folder).iterdir()] == ["tool_use.jinja"]
        assert (there / "tekken.json").is_file()
        written = output.converted_files(there)
        assert written is not None
        assert f"{folder}/tool_use.jinja" in written
    (tmp_path / "m" / folder / "mine.jinja").write_text("x")
    assert to_megatron(source, tmp_path / "m", "--overwrite") == 2


def test_shards_and_index_are_what_transformers_expects(hf: Path, megatron: Path, tmp_path: Path) -> None:
    megatron_to_hf.convert(megatron, tmp_path / "back", like=hf, shard_bytes=100_000)
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 1
    expected, found = tiny.load(hf).state_dict(), tiny.load(tmp_path / "back").state_dict()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


@pytest.mark.process
def test_a_mistake_is_one_line_without_warnings_of_libraries(tmp_path: Path) -> None:
    options = ["--hf", str(tmp_path / "hf"), "--out", str(tmp_path / "out")]
    program = [sys.executable, "-m", "checkpoints_convert.hf_to_megatron", *options]
    done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"mugrpo convert hf_to_megatron: {tmp_path}")


def test_verify_agrees_or_names_what_differs(
    hf: Path, megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify.main(["--hf", str(hf), "--megatron", str(megatron), "--no-logits"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("equal: ")
    mirror = shutil.copytree(hf, tmp_path / "mirror")
    edit_config(mirror, unsloth_fixed=True, is_llama_config=True, _name_or_path="elsewhere")
    for command in (partial(to_megatron, mirror, tmp_path / "m"), partial(to_hf, megatron, tmp_path / "h", mirror)):
        assert command() == 0
        assert capsys.readouterr().out.startswith(NOTE)
    assert verify.main(["--hf", str(mirror), "--megatron", str(megatron), "--no-logits"]) == 0
    assert capsys.readouterr().out.startswith(NOTE)
    other = shutil.copytree(hf, tmp_path / "other")
    edit_tensor(other, "model.layers.2.mlp.up_proj.weight", lambda value: value.index_fill(0, torch.tensor([3]), 9.0))
    assert verify.main(["--hf", str(other), "--megatron", str(megatron), "--no-logits"]) == 2
    assert "decoder.layers.2.mlp.linear_fc1.weight" in capsys.readouterr().err
    edit_config(other, rms_norm_eps=1e-5)
    assert verify.main(["--hf", str(other), "--megatron", str(megatron), "--no-logits"]) == 2
    assert "rms_norm_eps is 1e-06" in capsys.readouterr().err


def test_a_type_that_cannot_hold_a_weight_is_refused(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, name = shutil.copytree(hf, tmp_path / "source"), "model.layers.2.mlp.up_proj.weight"
    edit_tensor(source, name, lambda value: value.index_fill(0, torch.tensor([3]), 1e5))
    assert to_megatron(source, tmp_path / "m", "--dtype", "float16") == 2
    assert f"{name}: a value is too large for float16; take bfloat16" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_sentencepiece_tokenizer_travels(tmp_path: Path) -> None:
    source = tmp_path / "llama"
    models.save_model(source, "llama", vocab_size=120)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(f"{a} plus {b} equals {a + b}" for a in range(40) for b in range(9)))
    SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(source / "tokenizer"), vocab_size=60, minloglevel=2, byte_fallback=False
    )
    (source / "tokenizer.vocab").unlink()
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    settings = {"tokenizer_class": "LlamaTokenizer", "chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    assert to_megatron(source, tmp_path / "m") == 0
    assert to_hf(tmp_path / "m", tmp_path / "back", source) == 0
    before, after = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(tmp_path / "back")
    assert before("12 plus 7").input_ids == after("12 plus 7").input_ids
    assert after.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<user>hi"


def test_stopped_conversion_is_continued(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_to_megatron, "PART_BYTES", 100_000)
    write_entry = hf_to_megatron.write_entry
    written: list[str] = []

    def stop_in_layer_2(writer: Any, checkpoint: Any, entry: Any, *rest: Any) -> None:
        written.append(entry.megatron)
        if entry.layer == 2 and len(written) < 40:
            raise KeyboardInterrupt
        write_entry(writer, checkpoint, entry, *rest)

    monkeypatch.setattr(hf_to_megatron, "write_entry", stop_in_layer_2)
    out = tmp_path / "m"
    assert to_megatron(hf, out) == 130
    assert not out.exists()
    finished = {path.name: path.stat().st_mtime_ns for path in (tmp_path / ".m.partial").glob("*.distcp")}
    assert finished
    monkeypatch.setattr(hf_to_megatron, "write_entry", write_entry)
    assert to_megatron(hf, out) == 0
    assert {name: (out / name).stat().st_mtime_ns for name in finished} == finished
    assert not (tmp_path / ".m.partial").exists()
    assert not list(out.glob("*.done"))
    assert to_hf(out, tmp_path / "back", hf) == 0
    expected, found = tensors(hf), tensors(tmp_path / "back")
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def edit_tensor(directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Replace a tensor inside its shard, or remove it where `change` returns None."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    file = directory / index["weight_map"][name]
    held = load_file(file)
    changed = change(held.pop(name))
    save_file(held if changed is None else {**held, name: changed}, file, metadata={"format": "pt"})


def edit_index(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def edit_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def add_tensor(directory: Path) -> None:
    name, file = "model.layers.0.self_attn.rotary.weight", "model-00001-of-00003.safetensors"
    save_file({**load_file(directory / file), name: torch.zeros(3)}, directory / file, metadata={"format": "pt"})
    edit_index(directory, lambda placed: placed.update({name: file}))


def drop_tensor(directory: Path, name: str) -> None:
    edit_tensor(directory, name, lambda _: None)
    edit_index(directory, lambda placed: placed.pop(name))


def remove_weights(directory: Path) -> None:
    for file in directory.glob("model*"):
        file.unlink()


SPOILED: dict[str, tuple[Spoil, str]] = {
    "no weights": (remove_weights, "only safetensors checkpoints are supported"),
    "missing shard": (
        lambda d: (d / "model-00002-of-00003.safetensors").unlink(),
        "00002-of-00003.safetensors is missing",
    ),
    "truncated shard": (
        lambda d: truncate(d / "model-00002-of-00003.safetensors"),
        "00002-of-00003.safetensors is truncated",
    ),
    "wrong shape": (
        lambda d: edit_tensor(d, "model.layers.1.mlp.down_proj.weight", lambda v: v[:, :-1].contiguous()),
        "model.layers.1.mlp.down_proj.weight has shape [32, 63], but config.json says [32, 64]",
    ),
    "quantised": (
        lambda d: edit_tensor(d, "model.norm.weight", lambda v: v.to(torch.int8)),
        "'model.norm.weight' has type I8, which a quantised checkpoint may have",
    ),
    "extra tensor": (add_tensor, "has the tensor 'model.layers.0.self_attn.rotary.weight', which a qwen2 model"),
    "missing tensor": (
        lambda d: drop_tensor(d, "model.layers.3.self_attn.k_proj.bias"),
        "lacks 'model.layers.3.self_attn.k_proj.bias'",
    ),
    "index names the wrong shard": (
        lambda d: edit_index(d, lambda w: w.update({"model.norm.weight": "model-00001-of-00003.safetensors"})),
        "disagrees with the shards about 'model.norm.weight'",
    ),
    "tied head that differs": (
        lambda d: edit_config(d, tie_word_embeddings=True),
        "lm_head.weight differs from model.embed_tokens.weight",
    ),
    "vocabulary below the tokenizer": (
        lambda d: edit_config(d, vocab_size=100),
        "but config.json gives the model vocab_size 100",
    ),
}


@pytest.mark.parametrize("what", SPOILED)
def test_spoiled_checkpoint_is_refused(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    spoil, sentence = SPOILED[what]
    shutil.copytree(hf, tmp_path / "bad")
    spoil(tmp_path / "bad")
    assert_refused(capsys, tmp_path, lambda: to_megatron(tmp_path / "bad", tmp_path / "out"), sentence)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tp", "3"], "--tp = 3 does not divide the model's 4 attention heads"),
        (["--pp", "5"], "--pp = 5 is more than the model's 4 layers"),
        (["--vpp", "2"], "--vpp above 1 needs --pp of at least 2"),
        (["--ep", "2"], "--ep = 2 but the model has no experts"),
    ],
)
def test_layout_that_does_not_fit_is_refused(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    assert_refused(capsys, tmp_path, lambda: to_megatron(hf, tmp_path / "out", *options), sentence)


def test_full_disk_is_refused(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    assert_refused(capsys, tmp_path, lambda: to_megatron(hf, tmp_path / "out"), "0.0 GB free")


def test_spoiled_megatron_checkpoint_is_refused(
    hf: Path, megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tests/files/test_torch_dist.py` has the other ways to be damaged."""
    truncate(shutil.copytree(megatron, tmp_path / "bad") / "__0_0.distcp")
    assert_refused(
        capsys, tmp_path, partial(to_hf, tmp_path / "bad", tmp_path / "out", hf), "__0_0.distcp is truncated"
    )


def test_checkpoint_of_another_model_is_refused(
    megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models.save_model(tmp_path / "qwen3", "qwen3", vocab_size=512)
    models.save_model(tmp_path / "wide", "qwen2", vocab_size=512, intermediate_size=96)
    for like, sentence in (
        ("qwen3", "config field model_type is 'qwen2'"),
        ("wide", "config field intermediate_size is 64"),
    ):
        assert_refused(capsys, tmp_path, partial(to_hf, megatron, tmp_path / "out", tmp_path / like), sentence)


def assert_refused(
    capsys: pytest.CaptureFixture[str], directory: Path, convert: Callable[[], int], sentence: str
) -> None:
    """Exit code 2, the sentence on one line, and nothing written."""
    capsys.readouterr()
    assert convert() == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert message.count("\n") == 1
    assert not (directory / "out").exists()
    assert not (directory / ".out.partial").exists()


MODELS = {
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "vocab_size": 130}),
    "llama": ("llama", {"vocab_size": 131}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "qwen3_5_text": ("qwen3_5_text", {"tie_word_embeddings": True, "vocab_size": 130}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {}),
}
LAYOUTS: dict[str, Layout] = {
    "tp1": {},
    "tp4": {"tensor": 4},
    "vpp2": {"pipeline": 2, "virtual_pipeline": 2},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`NAME` Hugging Face, `NAME-converted` cut for TP2 x PP2, of every model."""
    directory = tmp_path_factory.mktemp("models")
    for name, (family, changes) in MODELS.items():
        models.save_model(directory / name, family, **changes)
        hf_to_megatron.convert(directory / name, directory / f"{name}-converted", ParallelSection(tensor=2, pipeline=2))
    return directory


@pytest.mark.process
@pytest.mark.parametrize("layout", LAYOUTS)
def test_conversion_loads_in_every_layout(checkpoints: Path, tmp_path: Path, layout: str) -> None:
    cases = [(checkpoints / name, checkpoints / f"{name}-converted", tmp_path / name) for name in MODELS]
    run_ranks(4, reload_megatron, cases, LAYOUTS[layout])
    for name in MODELS:
        assert_same_weights(checkpoints / name, tmp_path / name)


@pytest.mark.process
@pytest.mark.parametrize(
    "name", ["qwen2-tied", "qwen3_moe", "qwen3_5_text", pytest.param("deepseek_v3", marks=pytest.mark.night)]
)
def test_training_checkpoint_becomes_hugging_face(checkpoints: Path, tmp_path: Path, name: str) -> None:
    layout = {"tensor": 2, "pipeline": 2}
    run_ranks(4, save_training_checkpoint, checkpoints / name, tmp_path / "saved", layout)
    megatron_to_hf.convert(tmp_path / "saved", tmp_path / name, like=checkpoints / name)
    assert_same_weights(checkpoints / name, tmp_path / name)
