"""How stale responses look to a later policy: their log-ratios and what the veto would take out of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from mugrpo_megatron.algorithm.segments import make_segments
from mugrpo_megatron.algorithm.veto import initial_state, veto
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.objective import ObjectiveSection
from mugrpo_megatron.samples import Sample

BATCH_TOKENS = 8192
"""Padded tokens of one forward pass."""


@dataclass(frozen=True, slots=True)
class Stale:
    """One response under a later policy; all arrays [R]."""

    log_ratio: np.ndarray
    """float32: log of the policy's over the behaviour probability."""
    trigger: np.ndarray
    """bool: tokens of a response with negative advantage whose ratio is below `trigger_ratio`."""
    dropped: np.ndarray
    """bool: tokens that the veto takes out of the loss."""

    @property
    def lowest_ratio(self) -> float:
        """The smallest of the tokens' importance ratios; inf without tokens."""
        return float(np.exp(self.log_ratio.min(initial=np.inf)))


class LaterPolicy:
    """A Hugging Face checkpoint that responses are looked at with, through transformers."""

    def __init__(self, checkpoint: Path, temperature: float) -> None:
        """Raises UserError when `checkpoint` holds no model."""
        if not (checkpoint / "config.json").is_file():
            raise UserError(f"{checkpoint}: no Hugging Face checkpoint (it has no config.json); name one with --policy")
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto", use_safetensors=True)
        self._model = model.to(self._device).eval()
        self._temperature = temperature

    def look(self, samples: Sequence[Sample], advantages: np.ndarray, objective: ObjectiveSection) -> list[Stale]:
        """Each response under this policy; `advantages` float [N]."""
        ratios = [
            torch.from_numpy(logprobs - sample.behaviour_logprobs)
            for sample, logprobs in zip(samples, self._logprobs(samples), strict=True)
        ]
        lengths = torch.tensor([len(ratio) for ratio in ratios])
        segments = make_segments(lengths, torch.ones(len(lengths)))
        per_token = torch.from_numpy(np.asarray(advantages, dtype=np.float32))[segments.ids]
        log_ratio, start = torch.cat(ratios), initial_state(segments)
        keep = veto(log_ratio, per_token, segments, objective, start).keep
        triggers = ~veto(log_ratio, per_token, segments, objective.model_copy(update={"veto": "trigger"}), start).keep
        split = [part.split(lengths.tolist()) for part in (log_ratio, triggers, ~keep)]
        return [Stale(*(part.numpy() for part in parts)) for parts in zip(*split, strict=True)]

    @torch.no_grad()
    def _logprobs(self, samples: Sequence[Sample]) -> Iterator[np.ndarray]:
        """float32 [R] of each response at the rollout's temperature."""
        size = max(1, BATCH_TOKENS // max(sample.tokens for sample in samples))
        for start in range(0, len(samples), size):
            batch = samples[start : start + size]
            rows = [torch.from_numpy(np.concatenate([s.prompt_ids, s.response_ids]).astype(np.int64)) for s in batch]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self._device)
            mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
            logits = self._model(ids, attention_mask=mask.to(self._device)).logits.float() / self._temperature
            found = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0].cpu()
            for sample, row in zip(batch, found, strict=True):
                yield row[len(sample.prompt_ids) - 1 : sample.tokens - 1].numpy()
