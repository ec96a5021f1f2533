"""Reads token ids and chat templates from the files of a checkpoint's tokenizer; imports neither torch nor
transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import unreadable_as_user_error
from mugrpo_megatron.files.json_text import read_json


def check_vocabulary(directory: Path, vocab_size: int) -> None:
    """Raise UserError when a checkpoint's tokenizer is damaged, names an end-of-sequence token that its tokenizer.json
    lacks, or has an id for which the model has no embedding."""
    config = tokenizer_config(directory)
    vocabulary = read_vocabulary(directory, config)
    end = config.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    if isinstance(end, str) and end not in vocabulary and (directory / "tokenizer.json").is_file():
        raise UserError(
            f"{directory}: tokenizer_config.json names eos_token {end!r}, which is no token of tokenizer.json, so the "
            "model never writes it and no response would end; name there the token that ends the model's responses"
        )
    beyond = {index: token for token, index in vocabulary.items() if index >= vocab_size}
    if beyond:
        raise UserError(
            f"{directory}: the tokenizer has ids up to {max(beyond)}, but config.json gives the model vocab_size "
            f"{vocab_size}, so it has no embedding for {len(beyond)} tokens, first {beyond[min(beyond)]!r}; resize the "
            "embedding (transformers: model.resize_token_embeddings(len(tokenizer))), or take the model's tokenizer"
        )


def check_carried(directory: Path, names: Iterable[str]) -> None:
    """Raise UserError if one of the files `names` in `directory` is not of the kind that its suffix says
    (`CARRIED_TEXTS`, or JSON). Names without a file are skipped.

    These files are copied into the checkpoints that are written. In a directory that somebody else made, a name may
    be a link to any of your files, whose content would be copied.
    """
    for path in (directory / name for name in names if (directory / name).is_file()):
        if path.suffix == ".json":
            read_json(path)
            continue
        is_kind, kind = CARRIED_TEXTS[path.suffix]
        try:
            good = is_kind(path.read_bytes())
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); check its permissions") from None
        except (ValueError, TemplateError):
            good = False
        if not good:
            raise UserError(
                f"{path} is not {kind}, and every saved checkpoint would get a copy of it; restore the file from its "
                "source"
            )


def _is_template(content: bytes) -> bool:
    kinds = {kind for _, kind, _ in Environment().lex(content.decode())}
    return bool(kinds & {"variable_end", "block_end"})


def _is_merges(content: bytes) -> bool:
    """Whether a file's content is a list of byte-pair merges: two words a line."""
    lines = [line for line in content.decode().split("\n") if line and not line.startswith("#version")]
    return all(line.count(" ") == 1 for line in lines)


def _is_sentencepiece(content: bytes) -> bool:
    """Whether a file's content is a sentencepiece model or a vocabulary of tiktoken.

    A sentencepiece model is a protobuf that begins with field 1; a tiktoken file has lines of base64 and rank.
    """
    first = content.split(b"\n", 1)[0].split(b" ")
    # Byte 0x0a is the tag of a protobuf's field 1, and a newline too. A sentencepiece model has it at 0 (a piece) and,
    # after a length, at 2 (the piece's text); at 0 alone it may be the empty first line of a text file.
    return (content[:1] == b"\x0a" and content[2:3] == b"\x0a") or (len(first) == 2 and first[1].isdigit())


CARRIED_TEXTS = {
    ".jinja": (_is_template, "a chat template in Jinja"),
    ".txt": (_is_merges, "a list of byte-pair merges"),
    ".model": (_is_sentencepiece, "a sentencepiece model or a vocabulary of tiktoken"),
}
"""Suffix of a file that is copied into written checkpoints -> function that tells whether a file's content is of the
right kind, and that kind in words."""


def read_vocabulary(directory: Path, config: Mapping[str, Any]) -> dict[str, int]:
    """Returns token -> id, added tokens included, from `tokenizer.json`, else from a sentencepiece `tokenizer.model`
    and from `vocab.json`.

    `config` is the content of tokenizer_config.json. Raises UserError when one of the files is damaged.
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
    return vocabulary | _checked({token: index for index, token in added_tokens(directory, config).items()})


def added_tokens(directory: Path, config: Mapping[str, Any]) -> dict[int, str]:
    """Returns id -> token, from `added_tokens_decoder` in `config`, the content of tokenizer_config.json. UserError if
    that key is damaged."""
    with unreadable_as_user_error(directory / "tokenizer_config.json", "a tokenizer's configuration"):
        added = config.get("added_tokens_decoder") or {}
        return {int(index): entry["content"] for index, entry in added.items()}


def tokenizer_config(directory: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json; empty without the file. Raises UserError if it is damaged."""
    path = directory / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def chat_templates(directory: Path) -> dict[str, str]:
    """The chat templates of a tokenizer, name -> Jinja source; one without a name is called `default`. Empty if there
    are none.

    They are read from the files that transformers reads (tokenization_utils_base.py), else from chat_template.json,
    which transformers reads for processors only. Raises UserError for a damaged file.
    """
    files = [*directory.glob("chat_template.jinja"), *sorted(directory.glob("additional_chat_templates/*.jinja"))]
    if files:
        return {path.stem.replace("chat_template", "default"): _without_mark(path) for path in files}
    processor = directory / "chat_template.json"
    value = tokenizer_config(directory).get("chat_template")
    value = read_json(processor).get("chat_template") if value is None and processor.is_file() else value
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    table = value if isinstance(value, dict) else {"default": value}
    return {str(name): text.removeprefix("\ufeff") for name, text in table.items() if isinstance(text, str)}


def _without_mark(path: Path) -> str:
    """The text of a file without its byte order mark, which would otherwise begin every prompt."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): restore it from a copy of the model") from None


def _checked(vocabulary: Mapping[str, Any]) -> dict[str, int]:
    if any(type(index) is not int or index < 0 for index in vocabulary.values()):
        raise ValueError("the id of a token is not a whole number from 0 on")
    return dict(vocabulary)
