"""An engine that is killed and one that is asked to stop in mid generation: what was sampled is continued."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.unfinished import Unfinished
from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.samples import Prompt, Response
from tests.engine.test_client import TOLERANCE
from tests.engine.test_faults import _host, _kill_scheduler
from tests.engine.tiny import prompts, recipe, save_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.night]
TOKENS, GROUPS, EACH = 4000, 4, 2
LONG = Sampling(temperature=1.0, top_p=1.0, max_tokens=TOKENS, stop_ids=(), top_k=3, keep=True)


def test_tokens_of_a_killed_and_of_a_stopped_engine_are_continued(tmp_path: Path) -> None:
    """Killed once it has told of tokens twice; asked to stop once it has after its restart; then left alone."""
    checkpoint = save_checkpoint(tmp_path / "model", seed=0, positions=2 * TOKENS)
    settings = recipe(checkpoint)
    rollout = settings.rollout.model_copy(update={"max_response_tokens": TOKENS})
    settings = settings.model_copy(update={"rollout": rollout})
    asked: list[bool] = []
    kills: list[bool] = [True]

    def cancelled() -> bool:
        if kills and len(engine.record.loads) == 2:
            kills.clear()
            _kill_scheduler(_host(engine))
        return bool(asked) and len(engine.record.loads) > 0

    engine = Engine(settings, checkpoint, tmp_path / "engine.log", cancelled=cancelled)
    engine.restart()
    try:
        held = Unfinished(tmp_path, 0, {})
        with pytest.raises(EngineFailure, match="during generate"):
            list(engine.generate(prompts(GROUPS), EACH, LONG, held))
        first = _left(held, 0)
        engine.restart()
        asked.append(True)
        engine.record.loads.clear()
        held = Unfinished(tmp_path, 1, {})
        assert list(engine.generate(prompts(GROUPS), EACH, LONG, held)) == []
        assert engine.running, "it was asked for what it has, not ended"
        second = _left(held, 1)
        assert sum(map(len, second)) > sum(map(len, first))
        asked.clear()
        groups = dict(_by_index(engine.generate(prompts(GROUPS), EACH, LONG, Unfinished(tmp_path, 0, {}))))
    finally:
        engine.stop()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for prompt in prompts(GROUPS):
        for place, response in enumerate(groups[prompt.index]):
            assert len(response.ids) == TOKENS
            for earlier in (first, second):
                had = earlier[prompt.index * EACH + place]
                assert response.ids[: len(had)].tolist() == had.tolist()
            _check_logprobs(model, prompt, response)


def _left(held: Unfinished, writer: int) -> list[np.ndarray]:
    """The ids of every response that the generation left; all of them are on disk then, in the file of `writer`."""
    assert held.save(()) > 0
    assert (Path(held._path).name) == f"unfinished-{writer:04d}.npz"
    begun = [held.begun(prompt, EACH) for prompt in prompts(GROUPS)]
    return [response.ids for group in begun for response in group or []]


def _by_index(groups: Iterator[tuple[Prompt, list[Response]]]) -> Iterator[tuple[int, list[Response]]]:
    for prompt, responses in groups:
        yield prompt.index, responses


def _check_logprobs(model: torch.nn.Module, prompt: Prompt, response: Response) -> None:
    """Those among the three most likely tokens, as the stage keeps them."""
    assert response.kept is not None
    ids = torch.tensor([prompt.ids + response.ids.tolist()])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt.ids) - 1 : -1]
    kept = torch.from_numpy(response.kept.astype(np.int64))
    among = logits.gather(1, kept).log_softmax(1)
    expected = among[kept == ids[0, len(prompt.ids) :, None]]
    np.testing.assert_allclose(response.logprobs, expected.numpy(), atol=TOLERANCE)
