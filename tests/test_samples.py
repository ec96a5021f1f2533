"""A response has a log-probability for every token, wherever it comes from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mugrpo_megatron.engine.wire import Sampling, pack
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.samples import Response, Sample
from tests.refusals import refuses

IDS, FEWER = np.arange(3, dtype=np.int32), np.zeros(2, dtype=np.float32)


def test_a_response_has_as_many_logprobs_as_tokens() -> None:
    refuses("3 token ids and 2 log-probabilities", Response, IDS, FEWER, "stop", 0, error=EngineFailure)


@pytest.mark.parametrize("which", ["behaviour_logprobs", "engine_logprobs", "proximal_logprobs"])
def test_so_does_a_sample(which: str) -> None:
    whole = Sample(7, "p", IDS, IDS, np.zeros(3, dtype=np.float32), 0.0, 0, "stop")
    fewer: dict[str, Any] = {which: FEWER}
    refuses("group 7: a response has 3 token ids, but logprobs for 2", replace, whole, **fewer, error=ValueError)
    refuses("3 token ids, but a loss mask for 2", replace, whole, loss_mask=FEWER > 0, error=ValueError)
    with pytest.raises(ValueError, match="group 7: a response has 3 token ids, but support ids for 2"):
        replace(whole, support_ids=np.zeros((2, 4), np.int32))


def test_one_logprob_less_does_not_shift_those_of_later_responses() -> None:
    def output(tokens: int, logprobs: int) -> dict[str, object]:
        meta = {"output_token_logprobs": [(-1.0, 0, None)] * logprobs, "finish_reason": {"type": "stop"}}
        return {"output_ids": [1] * tokens, "meta_info": meta}

    how = Sampling(1.0, 1.0, 9, ())
    assert len(pack([(0, [output(3, 3), output(2, 2)])], 0, how).logprobs) == 5
    refuses("2 logprobs for 3 tokens", pack, [(0, [output(3, 2), output(2, 3)])], 0, how, error=ValueError)
