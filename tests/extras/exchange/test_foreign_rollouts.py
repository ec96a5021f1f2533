"""Rollouts of other programs: the shapes that are read, and one sentence for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.data.prompts import Template
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.exchange.foreign_rollouts import ROUNDING, ForeignRollout, read_rollouts
from mugrpo_megatron.rewards.items import fits_float32

TOKENIZER = build_arithmetic_tokenizer()
TEMPLATE = Template("{% for m in messages %}{{ m.content }}{% endfor %}=")
END = TOKENIZER.eos_token_id
IDS = {"prompt": "1+1=", "response_ids": [5, 6, 7]}


def read(folder: Path, *found: dict[str, Any]) -> list[list[ForeignRollout]]:
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return read_rollouts(path, TOKENIZER, TEMPLATE, (1000, 1000))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": [{"role": "user", "content": "1+1"}], "completion": [{"role": "assistant", "content": "2"}]},
        {"prompt_ids": TOKENIZER.encode("1+1="), "response": "2"},
        {"prompt": "1+1=", "response_ids": [*TOKENIZER.encode("2"), END]},
    ],
)
def test_text_messages_and_ids_of_the_same_response_are_the_same(row: dict[str, Any], tmp_path: Path) -> None:
    [[rollout]] = read(tmp_path, row)
    assert rollout.prompt_ids.tolist() == TOKENIZER.encode("1+1=")
    assert rollout.response_ids.tolist() == [*TOKENIZER.encode("2"), END]
    assert (rollout.text, rollout.finish_reason, rollout.logprobs, rollout.loss_mask) == ("2", "stop", None, None)
    assert rollout.row == row


def test_ids_between_the_tokenizer_and_a_padded_vocabulary_are_taken(tmp_path: Path) -> None:
    """Qwen2.5's model has 151,936 ids, its tokenizer 151,665; a sampler draws any of them."""
    path, size = tmp_path / "rollouts.jsonl", len(TOKENIZER)
    path.write_text(json.dumps({"prompt_ids": [1, size], "response_ids": [2, size + 7]}))
    [[rollout]] = read_rollouts(path, TOKENIZER, TEMPLATE, (9, 9), size + 8)
    assert (rollout.prompt_ids.tolist(), rollout.response_ids.tolist()) == ([1, size], [2, size + 7])
    with pytest.raises(UserError, match=rf"prompt_ids are not a list of token ids below {size}$"):
        read_rollouts(path, TOKENIZER, TEMPLATE, (9, 9))


def test_a_cut_response_has_no_end(tmp_path: Path) -> None:
    [[rollout]] = read(tmp_path, {"prompt": "1+1=", "completion": "2", "finish_reason": "length"})
    assert rollout.response_ids.tolist() == TOKENIZER.encode("2")


def test_groups_are_named_or_share_their_prompt_and_step(tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "completion": said} for prompt in ("1+1=", "1+2=") for said in "23"]
    interleaved = [rows[0], rows[2], rows[1], rows[3]]
    assert [[rollout.text for rollout in group] for group in read(tmp_path, *interleaved)] == [["2", "3"], ["2", "3"]]
    again = [row | {"step": step} for step in (1, 2) for row in rows]
    assert len(read(tmp_path, *again)) == 4
    grouped = [{"prompt": "1+1=", "completion": said, "group": said in "45"} for said in "2345"]
    assert [[rollout.text for rollout in group] for group in read(tmp_path, *grouped)] == [["2", "3"], ["4", "5"]]


def test_logprobs_and_masks_come_with_ids(tmp_path: Path) -> None:
    [[rollout]] = read(tmp_path, IDS | {"logprobs": [-1, -2.5, 0], "loss_mask": [1, 0, True]})
    assert rollout.logprobs is not None
    assert rollout.loss_mask is not None
    assert (rollout.logprobs.tolist(), rollout.loss_mask.tolist()) == ([-1, -2.5, 0], [True, False, True])


def test_a_logprob_that_was_rounded_above_0_is_0(tmp_path: Path) -> None:
    [[rollout]] = read(tmp_path, IDS | {"logprobs": [ROUNDING / 2, 0.0, -0.5]})
    assert rollout.logprobs is not None
    assert rollout.logprobs.tolist() == [0, 0, -0.5]
    with pytest.raises(UserError, match=r"rollouts\.jsonl:1: logprobs hold 2e-05, .* at most 0"):
        read(tmp_path, IDS | {"logprobs": [2 * ROUNDING, 0.0, -0.5]})


@given(st.one_of(st.integers(-(10**60), 10**60), st.floats(), st.just(10**400), st.just(-(10**400))))
def test_a_number_that_fits_is_finite_as_float32(value: float) -> None:
    if fits_float32(value):
        assert np.isfinite(np.array(value, dtype=np.float64).astype(np.float32))
    else:
        assert not abs(value) < 3.4e38


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "holds no rows"),
        (
            [{"prompt": "1"}],
            r"a column response_ids or one of response, completion, output, completions \(found prompt\)",
        ),
        ([{"completion": "1"}], r"needs a column prompt or prompt_ids \(found completion\)"),
        ([{"prompt": "", "completion": "1"}], "the prompt has no token"),
        ([{"prompt": "1", "completion": "1", "finish_reason": "x"}], "neither `stop` nor `length`"),
        ([{"prompt": "1", "completion": "1", "logprobs": [-1]}], "the row needs its response_ids too"),
        ([IDS | {"logprobs": [-1]}], "one value for each of the 3 response_ids"),
        ([IDS | {"logprobs": [10**400, -1, -1]}], "at most 0"),
        ([IDS | {"logprobs": [-1e300, -1, -1]}], "not finite as float32"),
        ([IDS | {"logprobs": [False, -1, -1]}], "logprobs hold something that is not a number"),
        ([IDS | {"loss_mask": [0.5, -3, 1]}], "something that is not true, false, 0 or 1"),
        ([IDS | {"loss_mask": [10**400, 1, 1]}], "something that is not true, false, 0 or 1"),
        ([IDS | {"response_ids": [10**6]}], "not a list of token ids below"),
        ([IDS | {"response_ids": []}], "the response has no token"),
        ([IDS, IDS | {"loss_mask": [1, 1, 1]}], "do not all have loss_mask"),
        ([IDS, IDS, IDS | {"prompt": "2"}], r"rollouts\.jsonl:3 has 1 responses and that of .*:1 has 2"),
        ([IDS | {"group": 1}, IDS | {"group": 1, "prompt": "2"}], "different prompts"),
        (
            [{"prompt": "1", "completion": [{"role": "tool", "content": "1"}]}],
            "only a list of one message of the assistant",
        ),
    ],
)
def test_what_cannot_be_taken_is_said_with_its_line(rows: list[dict[str, Any]], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as error:
        read(tmp_path, *rows)
    assert "rollouts.jsonl" in str(error.value)


def test_binary_text_and_a_bomb_are_refused(tmp_path: Path) -> None:
    """N7, N9: bytes became base64 text; two million tokens were made of a row before anything looked at its length."""
    path = tmp_path / "rows.parquet"
    for row, words in (
        ({"prompt": "a", "response": b"b"}, "response is binary"),
        ({"prompt": b"a", "response": "b"}, "prompt is binary"),
        ({"prompt": "a" * 2_000_000, "response": "b"}, "the prompt has .* (characters|tokens)"),
        ({"prompt": "a", "response": "b" * 2_000_000}, "the response has .* characters"),
    ):
        pq.write_table(pa.Table.from_pylist([row]), path)
        with pytest.raises(UserError, match=words):
            read_rollouts(path, TOKENIZER, TEMPLATE, (1000, 1000))
