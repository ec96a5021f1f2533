"""Traces of agents, a few places changed: rollouts whose tokens and masks fit together, or one sentence."""

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
TRACES = [TWO, VERIFIERS]
ROWS = [*TRACES, *({"trace": trace, "reward": 1.0, "group": 4} for trace in TRACES)]


@given(st.sampled_from(ROWS).flatmap(lambda row: changed([row, row])))
def test_a_trace(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "traces.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def read() -> None:
        for group in read_rollouts(path, TOKENIZER, TEMPLATE, (32, 32)):
            for one in group:
                assert 0 < len(one.prompt_ids) <= 32
                assert one.logprobs is None or np.isfinite(one.logprobs).all()
                if one.loss_mask is not None:
                    assert one.loss_mask.any()
                    assert one.loss_mask.shape == one.response_ids.shape

    sentence(read)
