"""What rounding does to a server of a trained model, the quickstart's: a float32 learner beside two servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from mugrpo_megatron.data.arithmetic import problems
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.extras.servers.attest import Evidence, Values, refusal
from mugrpo_megatron.files.bundled import bundled_model
from tests.extras.servers.fake import Policy


def beside_the_learner(dtype: torch.dtype) -> tuple[Evidence, Callable[[str], str]]:
    """How far a server in this dtype is from a float32 learner, and what is said of it where another explains it."""
    model = bundled_model(Path("arithmetic-364k"))
    assert model
    tokenizer, learner = load_tokenizer(model), Policy(model)
    asked = [tokenizer.encode(problem.question) for problem in problems(0, "eval", 24)]
    server = Policy(model, dtype=dtype)
    answered = [(ids, answer) for ids in asked for answer in server(ids, {"n": 2, "max_tokens": 6, "temperature": 1.0})]

    @torch.no_grad()
    def values_at(temperature: float) -> Values:
        logprobs, entropies = [], []
        for prompt, (ids, _, _) in answered:
            logits = learner.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
            logs = (logits / temperature).log_softmax(-1)
            logprobs.append(logs[range(len(ids)), ids].numpy())
            entropies.append(-(logs.exp() * logs).sum(-1).numpy())
        return Values(np.concatenate(logprobs), np.concatenate(entropies))

    said = np.concatenate([np.array(logprobs, dtype=np.float32) for _, (_, logprobs, _) in answered])
    evidence = Evidence().with_tokens(said, values_at(1.0))
    return evidence, lambda explains: refusal(Evidence(), said, values_at, 1.0, explains)


def test_a_float32_server_is_far_below_the_bound() -> None:
    evidence, refused = beside_the_learner(torch.float32)
    assert evidence.mean_distance < 1e-5
    assert refused("float32") == ""


def test_a_bfloat16_server_of_a_float32_learner_is_refused() -> None:
    evidence, refused = beside_the_learner(torch.bfloat16)
    assert 1e-3 < evidence.mean_distance < 5e-2
    assert "rounding in float32 explains 0.001. Likely cause: quantised weights or another dtype" in refused("float32")
    assert refused("bfloat16") == "", "as a bfloat16 learner would take it"
