"""Replicas of an engine on CPU: how many there are and what each gets; `tests/engine/test_client.py` asks two."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.cpu.sglang import LARGEST_WEIGHTS, replica_arguments, replicas_of
from mugrpo_megatron.recipe.systems import EngineSection


@pytest.mark.parametrize(
    ("engine", "weight_bytes", "engines", "cores", "expected"),
    [
        ({}, 1000, 1, 2, 2),
        ({}, 1000, 1, 1, 1),
        ({}, 1000, 1, 64, 2),
        ({}, 1000, 2, 2, 1),
        ({}, 1000, 2, 4, 2),
        ({"tensor": 2}, 1000, 1, 64, 1),
        ({}, LARGEST_WEIGHTS + 1, 1, 64, 1),
        ({}, 1000, 1, None, 1),
    ],
)
def test_how_many(engine: dict[str, int], weight_bytes: int, engines: int, cores: int | None, expected: int) -> None:
    assert replicas_of(EngineSection(**engine), weight_bytes, engines, cores) == expected


@given(st.integers(1, 3000), st.integers(0, 10**6), st.integers(1, 5))
def test_replicas_share_requests_and_cache(requests: int, tokens: int, replicas: int) -> None:
    arguments: dict[str, Any] = {
        "max_running_requests": requests,
        "context_length": 40,
        "random_seed": 7,
        "device": "cpu",
    }
    arguments |= {"max_total_tokens": max(tokens, 40)} if tokens else {}
    result = replica_arguments(arguments, replicas)
    assert len(result) == len({replica["random_seed"] for replica in result}) == replicas
    assert result[0]["random_seed"] == 7
    assert requests <= sum(replica["max_running_requests"] for replica in result) < requests + replicas
    if tokens:
        assert sum(replica["max_total_tokens"] for replica in result) >= arguments["max_total_tokens"]
        assert all(40 <= replica["max_total_tokens"] <= arguments["max_total_tokens"] for replica in result)
    assert all(replica["device"] == "cpu" for replica in result)
