"""Loads the tokenizer of a checkpoint (Hugging Face or sentencepiece), and builds the bundled byte-level one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import check_tokenizer, unreadable_as_user_error
from mugrpo_megatron.files.vocabulary import added_tokens, chat_templates, tokenizer_config
from mugrpo_megatron.rewards.math.thoughts import PROMPT_END_TOKENS, opening_of

VOCAB_SIZE = 272
"""256 bytes and 16 special tokens. A multiple of 16 splits evenly over tensor parallel ranks."""
PAD, EOS, TURN = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
"""Tokens for padding, for the end of a turn or a sequence, and for the beginning of a turn. They are named as in Qwen2:
for a Qwen2 model `AutoTokenizer` makes a Qwen2 tokenizer, which would add tokens with these names."""
END_TOKENS = frozenset(
    ("</s>", "<eos>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>",
     "<|return|>", "<｜end▁of▁sentence｜>", "[EOS]")
)  # fmt: skip
"""Tokens with which models end a response. The responses in a data set may end with another one than the
tokenizer's."""
CHAT_ML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face checkpoint directory; without a padding token, it pads with the
    end-of-sequence one.

    Raises UserError for a tokenizer that is unreadable, that transformers reads differently than its own files say, or
    that has no end-of-sequence token.
    """
    check_tokenizer(directory)
    with unreadable_as_user_error(directory, "a directory with a readable tokenizer"):
        # A tokenizer.json is used as it is. For some classes, such as LlamaTokenizer, which DeepSeek's files name,
        # transformers 5 would build a tokenizer without the file's normalizer and split, and so with other tokens
        # (models/llama/tokenization_llama.py).
        kind = PreTrainedTokenizerFast if (directory / "tokenizer.json").is_file() else AutoTokenizer
        # Some trainers save split_special_tokens = true, which would split the template's own special tokens into
        # characters.
        tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True, split_special_tokens=False
        )
        if kind is AutoTokenizer and (directory / "tokenizer.model").is_file():
            _check_conversion(tokenizer, directory)
        for index, token in added_tokens(directory, tokenizer_config(directory)).items():
            if (actual := tokenizer.convert_tokens_to_ids(token)) != index:
                raise UserError(
                    f"{directory}: tokenizer_config.json gives {token!r} the id {index}, and transformers "
                    f"{actual}; take all files of the tokenizer from one copy of the model"
                )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {directory} has no end-of-sequence token: add eos_token to its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if templates := chat_templates(directory):
        tokenizer.chat_template = templates["default"] if templates.keys() == {"default"} else templates
    return tokenizer


def _check_conversion(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Raise UserError when transformers converts a sentencepiece model wrongly, as it may without
    tokenizer_config.json."""
    original = SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    probe = "Find 12 + 34 = x, please."
    if tokenizer.encode(probe, add_special_tokens=False) != original.encode(probe):
        raise UserError(
            f"{directory}: transformers reads tokenizer.model differently than sentencepiece does; add the model's "
            "tokenizer_config.json (with its tokenizer_class) or tokenizer.json"
        )


def build_arithmetic_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer of `VOCAB_SIZE` tokens, by default without a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    reserved = [f"<reserved_{i}>" for i in range(VOCAB_SIZE - len(alphabet) - 3)]
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in [PAD, EOS, TURN, *reserved]]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=1_000_000,
    )


def prompt_end(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a prompt's last tokens. They include the line that a chat template writes before a response, and the
    tag of a thought that the prompt opens."""
    return str(tokenizer.decode([int(token) for token in ids[-PROMPT_END_TOKENS:]]))


def without_repetition(response: str, prompt: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A response to imitate, without the end-of-sequence token and without a beginning that the prompt already has.

    Some data sets repeat the prompt's last line, or the tag of the thought that the prompt opens. Of `prompt` only the
    end is used (`prompt_end`).
    """
    ends = {str(tokenizer.eos_token), *END_TOKENS.intersection(tokenizer.get_added_vocab())}
    while end := next(filter(response.rstrip().endswith, ends), ""):
        response = response.rstrip().removesuffix(end)
    line = prompt.rstrip().rsplit("\n", 1)[-1].strip()
    for opening in (line if line.startswith(("<|", "<｜")) else "", opening_of(prompt)):
        if opening and response.lstrip().startswith(opening):
            response = response.lstrip().removeprefix(opening).lstrip("\n" if prompt.endswith("\n") else "")
    return response
