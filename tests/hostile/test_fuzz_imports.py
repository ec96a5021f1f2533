"""Rollouts of other programs and traces of agents, some places changed: groups to train on, or one sentence."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.data.prompts import Template
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.extras.exchange.foreign_rollouts import read_rollouts
from tests.extras.exchange.test_traces import TWO, VERIFIERS
from tests.hostile.fuzz import changed
from tests.hostile.outcome import sentence

pytestmark = pytest.mark.night

TOKENIZER = build_arithmetic_tokenizer()
TEMPLATE = Template("{% for m in messages %}{{ m.content }}{% endfor %}=")
ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "response": "2", "reward": 1.0, "step": 1, "finish_reason": "stop"},
    {"prompt_ids": [3, 4, 5], "response_ids": [5, 6], "logprobs": [-0.5, -1.0], "loss_mask": [1, 0], "group": 7},
    {"prompt": [{"role": "user", "content": "1+1"}], "completion": [{"role": "assistant", "content": "2"}]},
]
TRACES: list[Any] = [TWO, VERIFIERS]
TRACES += [{"trace": trace, "reward": 1.0, "group": 4} for trace in TRACES]


@given(st.sampled_from([*ROWS, *TRACES]).flatmap(lambda row: changed([row, row])))
def test_rows_of_rollouts_and_traces(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def read() -> None:
        for group in read_rollouts(path, TOKENIZER, TEMPLATE, (32, 32)):
            for one in group:
                assert 0 < len(one.prompt_ids) <= 32
                assert len(one.response_ids) > 0
                for values in (one.logprobs, one.loss_mask):
                    assert values is None or len(values) == len(one.response_ids)
                assert one.logprobs is None or np.isfinite(one.logprobs).all()

    sentence(read)
