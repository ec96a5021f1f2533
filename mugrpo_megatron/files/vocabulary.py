"""The ids of a checkpoint's tokenizer, from its files; imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import unreadable_as_user_error
from mugrpo_megatron.files.json_text import read_json


def check_vocabulary(directory: Path, vocab_size: int) -> None:
    """Raise UserError when the tokenizer in `directory` is damaged or has an id that the model of its config lacks."""
    vocabulary = read_vocabulary(directory)
    beyond = {index: token for token, index in vocabulary.items() if index >= vocab_size}
    if beyond:
        raise UserError(
            f"{directory}: the tokenizer has ids up to {max(beyond)}, but config.json gives the model vocab_size "
            f"{vocab_size}, so it has no embedding for {len(beyond)} tokens, first {beyond[min(beyond)]!r}; resize the "
            "embedding (transformers: model.resize_token_embeddings(len(tokenizer))), or take the model's tokenizer"
        )


def tokenizer_size(directory: Path) -> int:
    """Largest id of the tokenizer in `directory` plus one, added tokens included; 0 without a tokenizer."""
    return 1 + max(read_vocabulary(directory).values(), default=-1)


def read_vocabulary(directory: Path) -> dict[str, int]:
    """Token -> id, from `tokenizer.json` or else a sentencepiece `tokenizer.model` or `vocab.json`, and added tokens.

    Raises UserError when one of the files is damaged.
    """
    vocabulary: dict[str, int] = {}
    if (directory / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        with unreadable_as_user_error(directory / "tokenizer.json", "a readable tokenizer"):
            vocabulary = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()
        names: tuple[str, ...] = ()
    else:
        names = ("vocab.json", "added_tokens.json")
        if (directory / "tokenizer.model").is_file():
            from sentencepiece import SentencePieceProcessor

            with unreadable_as_user_error(directory / "tokenizer.model", "a readable sentencepiece model"):
                pieces = SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
                vocabulary = {pieces.id_to_piece(index): index for index in range(pieces.get_piece_size())}
    for name in names:
        if (directory / name).is_file():
            with unreadable_as_user_error(directory / name, "a map of tokens to ids"):
                vocabulary |= _checked(read_json(directory / name))
    if (directory / "tokenizer_config.json").is_file():
        with unreadable_as_user_error(directory / "tokenizer_config.json", "a tokenizer's configuration"):
            added = read_json(directory / "tokenizer_config.json").get("added_tokens_decoder") or {}
            vocabulary |= _checked({entry["content"]: int(index) for index, entry in added.items()})
    return vocabulary


def _checked(vocabulary: Mapping[str, Any]) -> dict[str, int]:
    if any(type(index) is not int or index < 0 for index in vocabulary.values()):
        raise ValueError("an id is not a number")
    return dict(vocabulary)
