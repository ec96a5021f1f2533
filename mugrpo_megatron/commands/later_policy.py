"""A later policy: which tokens of a stage's responses the veto would drop under a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from mugrpo_megatron.algorithm.segments import make_segments, with_turns
from mugrpo_megatron.algorithm.veto import initial_state, veto
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import CONFIG, check_weights, read_config
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.weights.families import architecture

BATCH_TOKENS = 8192
"""Padded tokens of one forward pass."""


@dataclass(frozen=True, slots=True)
class Stale:
    """One response under a later policy; all arrays [R]."""

    log_ratio: np.ndarray
    """float32: log of the policy's over the behaviour probability; 0 outside the loss mask."""
    trigger: np.ndarray
    """bool: tokens of a response with negative advantage whose ratio is below `trigger_ratio`."""
    dropped: np.ndarray
    """bool: tokens that the veto drops from the loss; none outside the loss mask."""
    lowest_ratio: float | None
    """The smallest importance ratio of a token inside the loss mask; None without such tokens."""


class LaterPolicy:
    """A Hugging Face checkpoint, run by transformers, under which stale responses are scored."""

    def __init__(self, checkpoint: Path, temperature: float) -> None:
        """Raises UserError when `checkpoint` is not a complete Hugging Face checkpoint of a supported model."""
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = _load(checkpoint).to(self._device).eval()
        self._temperature = temperature

    def assess(
        self,
        samples: Sequence[Sample],
        behaviour: Sequence[np.ndarray],
        advantages: np.ndarray,
        objective: ObjectiveSection,
    ) -> list[Stale]:
        """Each response under this policy, as training sees it.

        `behaviour` has float32 [R] for each sample, `advantages` is float [N].

        Tokens outside a loss mask take no part, and a softmax runs over the tokens that could be sampled. Raises
        UserError when the policy lacks the responses' tokens.
        """
        largest = max(max(s.prompt_ids.max(initial=0), s.response_ids.max(initial=0)) for s in samples)
        if largest >= self._model.config.vocab_size:
            raise UserError(
                f"the policy has {self._model.config.vocab_size} tokens, the responses have token {largest}"
            )
        ratios = [
            torch.from_numpy(sample.trained(logprobs - sampled))
            for sample, sampled, logprobs in zip(samples, behaviour, self._logprobs(samples), strict=True)
        ]
        lengths = torch.tensor([len(ratio) for ratio in ratios])
        segments = with_turns(make_segments(lengths, torch.ones(len(lengths))), [sample.turns for sample in samples])
        per_token = torch.from_numpy(np.asarray(advantages, dtype=np.float32))[segments.ids]
        log_ratio, start = torch.cat(ratios), initial_state(segments, objective)
        keep = veto(log_ratio, per_token, segments, objective, start).keep
        triggers = ~veto(log_ratio, per_token, segments, objective.model_copy(update={"veto": "trigger"}), start).keep
        split = [part.split(lengths.tolist()) for part in (log_ratio, triggers, ~keep)]
        return [
            _scattered(sample, *(part.numpy() for part in parts))
            for sample, *parts in zip(samples, *split, strict=True)
        ]

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
            for sample, row in zip(batch, logits, strict=True):
                yield _of_response(sample, row[len(sample.prompt_ids) - 1 : sample.tokens - 1])


def _of_response(sample: Sample, logits: torch.Tensor) -> np.ndarray:
    """float32 [R]: logprobs of the response's tokens; logits [R, vocabulary]."""
    ids = torch.from_numpy(sample.response_ids.astype(np.int64)).to(logits.device)
    chosen = logits.gather(1, ids[:, None])[:, 0]
    if sample.support_ids is None:
        return np.asarray((chosen - logits.logsumexp(-1)).cpu().numpy())
    support = torch.from_numpy(sample.support_ids.astype(np.int64)).to(logits.device)
    possible = logits.gather(1, support.clamp(min=0)).masked_fill(support < 0, -torch.inf)
    return np.asarray((chosen - possible.logsumexp(-1)).cpu().numpy())


def _scattered(sample: Sample, log_ratio: np.ndarray, trigger: np.ndarray, dropped: np.ndarray) -> Stale:
    """Values of the tokens inside the loss mask as values of the whole response."""
    inside = np.ones(len(sample.response_ids), dtype=bool) if sample.loss_mask is None else sample.loss_mask

    def whole(part: np.ndarray) -> np.ndarray:
        values = np.zeros(len(inside), dtype=part.dtype)
        values[inside] = part
        return values

    lowest = float(np.exp(log_ratio.min())) if len(log_ratio) else None
    return Stale(whole(log_ratio), whole(trigger), whole(dropped), lowest)


def _load(checkpoint: Path) -> Any:
    """The checkpoint's model; none of its files is run as code, and every weight is read from it."""
    architecture(read_config(checkpoint, remedy="name one with --policy"), str(checkpoint / CONFIG))
    check_weights(checkpoint, "--policy")
    disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint,
            dtype="auto",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # of many kinds, by what is wrong with the checkpoint's files
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"--policy {checkpoint} cannot be loaded ({reason})") from None
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"--policy {checkpoint} lacks {len(missing)} weights, {missing[0]} among them")
    return model
