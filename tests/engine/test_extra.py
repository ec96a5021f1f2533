"""`[engine.extra]` is checked against the installed SGLang without importing it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from mugrpo_megatron.engine import extra
from mugrpo_megatron.engine.extra import check_extra
from mugrpo_megatron.errors import UserError

GOOD = {
    "kv_cache_dtype": "fp8_e5m2",
    "chunked_prefill_size": 4096,
    "cuda_graph_bs_decode": [1, 2, 4],
    "cuda_graph_max_bs_decode": 256,
    "speculative_algorithm": "NGRAM",
    "schedule_conservativeness": 1,
    "enable_mixed_chunk": True,
    "cuda_graph_backend_decode": "full",
}


def test_arguments_of_the_installed_version_are_taken_without_its_import() -> None:
    before = {name for name in sys.modules if name.startswith("sglang")}
    check_extra(GOOD)
    assert {name for name in sys.modules if name.startswith("sglang")} == before
    assert GOOD.keys() <= extra._known().keys()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("kv_cache_dtyp", "auto", "no such argument; did you mean kv_cache_dtype?"),
        ("zzzzzzzz", 1, "no such argument; see"),
        ("chunked_prefill_size", "4096", "SGLang takes an integer here"),
        ("chunked_prefill_size", True, "SGLang takes an integer here"),
        ("enable_mixed_chunk", 1, "SGLang takes true or false here"),
        ("cuda_graph_bs_decode", [1, "2"], r"SGLang takes List\[int\] here"),
        ("cuda_graph_backend_decode", "some", "SGLang takes one of 'full'"),
        ("tp_size", 2, "decided by engine.tensor; set that instead"),
        ("quantization", "fp8", "decided by engine.quantization"),
        ("load_format", "dummy", "weight sync depends on it"),
        ("port", 1, "process depends on it"),
        ("ep_size", 2, "checking the engine's weights depends on it"),
        ("preferred_sampling_params", "{}", r"decided by \[rollout\]"),
    ],
)
def test_a_mistake_is_one_sentence(name: str, value: Any, told: str) -> None:
    with pytest.raises(UserError, match=rf"engine\.extra\.{name}.*{told}"):
        check_extra({**GOOD, name: value})


def test_what_the_project_decides_exists_in_the_installed_version() -> None:
    assert (extra._BY_RECIPE | extra._BY_PROJECT).keys() <= extra._known().keys()


def test_without_sglang_only_its_own_keys_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra, "_known", dict)
    check_extra({"anything": 1})
    with pytest.raises(UserError, match=r"engine\.tensor"):
        check_extra({"tp_size": 1})
