"""A tiny model with adapters: in the learner, in transformers with PEFT, and on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mugrpo_megatron.algorithm.policy_loss import policy_loss
from mugrpo_megatron.extras.lora.adapters import gather
from mugrpo_megatron.extras.lora.peft_files import adapter_files
from mugrpo_megatron.extras.lora.targets import adapted_leaves, target_kinds
from mugrpo_megatron.files.durable import write_json
from mugrpo_megatron.learner.groups import Ranks
from mugrpo_megatron.learner.learner import Learner, build_learner
from mugrpo_megatron.learner.loss import make_loss_inputs
from mugrpo_megatron.learner.update import token_logprobs, update
from mugrpo_megatron.weights.families import fingerprint, read_architecture
from tests.learner.tiny import advantages, left_behind, recipe, samples

RANK, ALPHA = 4, 8.0
LINEAR = {"lr": 0.1, "eps": 1.0}
"""AdamW whose steps are nearly linear in the gradient, so that they show it: no gradient's entry is above 1."""
UPDATES = 3


def write_adapter(directory: Path, model: Path, targets: Sequence[str] | str = "all-linear", base: str = "") -> Path:
    """A random adapter of the model in PEFT's format; B is not zero."""
    architecture = read_architecture(model)
    kinds = target_kinds(architecture, targets)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: 0.2 * torch.randn(shape, generator=generator)
        for leaf in adapted_leaves(architecture, kinds)
        for name, shape in leaf.shapes(RANK).items()
    }
    files = adapter_files(tensors, RANK, ALPHA, kinds, model, base or fingerprint(model))
    write_files(directory, files)
    return directory


def write_files(directory: Path, files: dict[str, Any]) -> None:
    """What `LoraAdapters.files` gives, below a directory."""
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            (directory / name).write_bytes(content)
        else:
            write_json(directory / name, content)


def with_lora(sections: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """The sections with `[lora]`; theirs win."""
    section = {"rank": RANK, "alpha": ALPHA, **keys, **sections.get("lora", {})}
    return {"optimizer": LINEAR, **sections, "lora": section}


def adapted(model: str, sections: dict[str, Any], ranks: Ranks | None = None, **keys: Any) -> Learner:
    """A learner of the model with adapters; in the world of `ranks`, that another one has joined."""
    return build_learner(recipe(Path(model), **with_lora(sections, **keys)), ranks)


def factors(learner: Learner) -> dict[str, np.ndarray]:
    """The whole adapter by PEFT's names, in float32; collective."""
    return {name: tensor.float().numpy() for name, tensor in gather(learner.models).items()}


Outcome = tuple[list[dict[str, float]], np.ndarray, dict[str, np.ndarray]]
"""Metrics of the updates, the log-probabilities after them, and the adapter."""


def updates(model: str, start: str, sections: dict[str, Any]) -> Outcome:
    """Three updates from the adapter in `start`."""
    learner = adapted(model, sections, start=start)
    data = left_behind(samples())
    metrics = [update(learner, data, advantages(len(data))) for _ in range(UPDATES)]
    return metrics, np.concatenate(token_logprobs(learner, data)), factors(learner)


def updates_by_peft(model: str, start: str) -> Outcome:
    """The same with transformers, PEFT, torch's AdamW and the reference loss."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    peft = PeftModel.from_pretrained(base, start, is_trainable=True)
    trained = {name: parameter for name, parameter in peft.named_parameters() if parameter.requires_grad}
    section = recipe(Path(model), **with_lora({}))
    data = left_behind(samples())
    inputs = make_loss_inputs(section.objective, 24, data, advantages(len(data)), torch.device("cpu"))
    adam = torch.optim.AdamW(trained.values(), lr=LINEAR["lr"], eps=LINEAR["eps"], betas=(0.9, 0.95), weight_decay=0.0)

    def logprobs() -> torch.Tensor:
        rows = []
        for sample in data:
            ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()
            table = peft(ids[None]).logits[0].log_softmax(-1)
            rows.append(table[:-1].gather(1, ids[1:, None])[len(sample.prompt_ids) - 1 :, 0])
        return torch.cat(rows)

    metrics = []
    for _ in range(UPDATES):
        adam.zero_grad()
        loss, _ = policy_loss(logprobs(), inputs)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        metrics.append({"loss": float(loss.detach()), "grad_norm": float(norm)})
        adam.step()
    with torch.no_grad():
        last = logprobs().numpy()
    return (
        metrics,
        last,
        {name.replace(".default", ""): parameter.detach().numpy() for name, parameter in trained.items()},
    )
