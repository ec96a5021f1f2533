"""`sglang.Engine` as far as an engine's host calls it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mugrpo_megatron.engine import sglang_compat


class StubEngine:
    """Answers when told to; idle after some questions."""

    def __init__(self, busy: int = 0) -> None:
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager: Any = self
        self.server_args = SimpleNamespace(tp_size=1)
        self.rid_to_state: dict[str, Any] = {"one": SimpleNamespace(output_ids=[])}
        self.released: list[list[str]] = []
        self.answers = asyncio.Event()
        self.reason = "stop"
        self.asked: list[dict[str, Any]] = []
        self._busy = busy

    async def flush_cache(self, timeout_s: float) -> Any:
        assert timeout_s > 0
        self._busy -= 1
        return SimpleNamespace(success=self._busy < 0, message="pending requests")

    async def get_loads(self) -> list[Any]:
        ranks = ((2, 0, 0.25), (3, 2, 0.125))  # of data parallel schedulers
        return [SimpleNamespace(num_running_reqs=a, num_waiting_reqs=b, token_usage=c) for a, b, c in ranks]

    def abort_request(self, abort_all: bool) -> None:
        assert abort_all
        self.reason = "abort"
        self.answers.set()

    async def async_generate(self, input_ids: list[list[int]], **named: Any) -> list[dict[str, Any]]:
        self.asked.append({"input_ids": input_ids, **named})
        await self.answers.wait()
        facts = {"output_token_logprobs": [(-1.0, 7)] * 3, "finish_reason": {"type": self.reason}}
        return [{"output_ids": [7] * 3, "meta_info": facts} for _ in input_ids]


def record_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stubs note what they are told, without importing SGLang."""

    async def release_memory(engine: StubEngine, tags: list[str]) -> None:
        engine.released.append(tags)

    monkeypatch.setattr(sglang_compat, "release_memory", release_memory)
