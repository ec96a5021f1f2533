from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase, Qwen2Config

from mugrpo_megatron.data.tokenizer import VOCAB_SIZE, build_arithmetic_tokenizer, load_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import check_tokenizer
from mugrpo_megatron.files.vocabulary import check_vocabulary

TOKENIZER = build_arithmetic_tokenizer()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(directory)
    Qwen2Config(vocab_size=VOCAB_SIZE).save_pretrained(directory)
    return directory


@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert max(ids, default=0) < VOCAB_SIZE
    assert TOKENIZER.decode(ids) == text


def test_autotokenizer_loads_it_next_to_a_qwen2_model(saved: Path) -> None:
    """transformers makes a Qwen2 tokenizer of it there, which adds missing tokens to the vocabulary."""
    text = "347+586=\n¿Qué? \x00 <|im_end|>"
    for loaded in (load_tokenizer(saved), AutoTokenizer.from_pretrained(saved)):
        assert len(loaded) == VOCAB_SIZE
        assert loaded.encode(text) == TOKENIZER.encode(text, add_special_tokens=False)
        assert (loaded.eos_token_id, loaded.pad_token_id) == (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)
        assert loaded.chat_template == TOKENIZER.chat_template


@pytest.fixture(scope="module")
def sentencepiece_model() -> bytes:
    model = io.BytesIO()
    lines = ["the cat sat on 12 + 34 = 46 mats", "What is x squared plus one?"] * 50
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


def test_a_sentencepiece_model_loads(sentencepiece_model: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    original = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("the cat is 99 é", add_special_tokens=False) == original.encode("the cat is 99 é")
    assert (loaded.eos_token_id, loaded.pad_token_id) == (original.eos_id(), original.eos_id())


def test_a_sentencepiece_model_that_is_converted_wrong_is_refused(sentencepiece_model: bytes, tmp_path: Path) -> None:
    """With only a model's configuration next to it, transformers drops the first word's leading space."""
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model)
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_a_directory_without_tokenizer_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "refused"),
    [
        (("tiktoken.model",), True),
        (("qwen.tiktoken", "merges.txt"), True),
        (("tiktoken.model", "vocab.json", "tokenizer_config.json"), True),
        (("tokenizer_config.json",), True),
        (("tiktoken.model", "tokenizer.json", "tokenizer_config.json"), False),
        (("tokenizer.model", "tokenizer_config.json"), False),
    ],
)
def test_a_tokenizer_that_only_its_own_code_reads_is_refused_with_the_way_to_make_one(
    files: tuple[str, ...], refused: bool, tmp_path: Path
) -> None:
    """Whether tiktoken is installed or not: transformers would read it with another split pattern."""
    for name in files:
        (tmp_path / name).write_text('{"auto_map": {"AutoTokenizer": ["own_code.Tokenizer", null]}}')
    (tmp_path / "own_code.py").write_text("raise SystemExit('remote code ran')")
    if refused:
        with pytest.raises(UserError, match=r"no tokenizer\.json, .*convert_tiktoken_to_fast"):
            load_tokenizer(tmp_path)
    else:
        check_tokenizer(tmp_path)


@pytest.mark.parametrize("where", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
def test_the_first_token_that_the_model_lacks_is_named_before_anything_runs(where: str, tmp_path: Path) -> None:
    if where == "tokenizer.json":
        larger = build_arithmetic_tokenizer()
        larger.add_tokens(["<tool>", "</tool>"])
        larger.save_pretrained(tmp_path)
    elif where == "tokenizer_config.json":
        TOKENIZER.save_pretrained(tmp_path)
        (tmp_path / where).write_text('{"added_tokens_decoder": {"272": {"content": "<tool>"}}}')
    else:
        (tmp_path / "vocab.json").write_text('{"a": 0}')
        (tmp_path / where).write_text('{"<tool>": 272}')
    check_vocabulary(tmp_path, VOCAB_SIZE + 16)  # a padded embedding is larger
    with pytest.raises(UserError, match=r"vocab_size 272, so it has no embedding for [12] tokens, first '<tool>'"):
        check_vocabulary(tmp_path, VOCAB_SIZE)


SPLIT = r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"
TEXT = "Find 12345 + 34 = x,  please.\n\n the cat's <|im_end|> y ."


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary with a split of its own, as DeepSeek's, for a Llama model."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special, letters = ["<|im_end|>", "<tool>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    directory = tmp_path_factory.mktemp("byte_level")
    tokenizer.save(str(directory / "tokenizer.json"))
    LlamaConfig(vocab_size=512).save_pretrained(directory)
    return directory


def loaded_and_checked(directory: Path) -> PreTrainedTokenizerBase:
    check_vocabulary(directory, 512)
    return load_tokenizer(directory)


def added(index: int, content: str) -> dict[str, object]:
    return {"added_tokens_decoder": {str(index): {"content": content, "special": True, "normalized": False}}}


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        *(
            ({"tokenizer_class": f"{name}Tokenizer"}, "")
            for name in ("Llama", "Qwen2", "GPT2", "Cohere", "Gemma", "None")
        ),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": True, "legacy": False}, ""),
        ({"clean_up_tokenization_spaces": True}, ""),
        ({"split_special_tokens": True}, ""),
        (added(1, "<tool>"), ""),
        (added(400, "<new>"), "'<new>' the id 400"),
        (added(7, "<new>"), "'<new>' the id 7"),
        (added(0, "<tool>"), "'<tool>' the id 0"),
        ({"eos_token": "</s>"}, "eos_token '</s>', which is no token"),
        ({"eos_token": {"content": "<|eot_id|>"}}, "eos_token '<|eot_id|>', which is no token"),
    ],
)
def test_tokenizer_json_decides(fields: dict[str, object], refused: str, byte_level: Path, tmp_path: Path) -> None:
    """Whatever class tokenizer_config.json names; transformers 5 builds some of them with another split."""
    for file in byte_level.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", **fields}))
    if refused:
        with pytest.raises(UserError, match=re.escape(refused)):
            loaded_and_checked(tmp_path)
        return
    loaded, original = loaded_and_checked(tmp_path), Tokenizer.from_file(str(byte_level / "tokenizer.json"))
    ids = loaded.encode(TEXT, add_special_tokens=False)
    assert ids == original.encode(TEXT, add_special_tokens=False).ids
    assert loaded.decode(ids) == TEXT
