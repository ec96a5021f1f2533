"""Finds, for `mugrpo rollouts --policy`, the tokens that the veto would drop under a later Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.text import Text
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from mugrpo_megatron.algorithm.segments import make_segments, with_turns
from mugrpo_megatron.algorithm.veto import MARKED_WEIGHT, PREFIX_WEIGHTS, initial_state, veto
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import CONFIG, check_weights, read_config
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.weights.config import transformers_config
from mugrpo_megatron.weights.families import architecture

BATCH_TOKENS = 8192
"""Most tokens of one forward pass, padding included."""


@dataclass(frozen=True, slots=True)
class Stale:
    """A response of R tokens under a later policy: ratios, triggers and dropped tokens, arrays [R]."""

    log_ratio: np.ndarray
    """float32: log of the importance ratio, policy over behaviour policy; 0 outside the loss mask."""
    trigger: np.ndarray
    """bool: tokens of a response with negative advantage whose ratio is below `trigger_ratio`."""
    dropped: np.ndarray
    """bool: whether the veto drops a token from the loss, or gives it little weight; false outside the loss mask."""
    lowest_ratio: float | None
    """Smallest importance ratio inside the loss mask; None if no token is inside."""

    def cells(self) -> list[str]:
        """Returns the lowest ratio and the number of dropped tokens, for a table."""
        lowest = "–" if self.lowest_ratio is None else f"{self.lowest_ratio:.1e}"
        return [lowest, str(int(self.dropped.sum()))]

    def record(self) -> dict[str, Any]:
        """Returns the lowest ratio and the indices of triggers and dropped tokens, for JSON."""
        return {
            "lowest_ratio": self.lowest_ratio,
            "triggers": np.flatnonzero(self.trigger).tolist(),
            "dropped": np.flatnonzero(self.dropped).tolist(),
        }

    def marked(self, tokens: Sequence[str]) -> Text:
        """Returns the response's tokens [R] as one text, with triggers in «» and dropped spans in ⟦⟧, both in red."""
        text, inside = Text(), False
        for token, trigger, dropped in zip(tokens, self.trigger, self.dropped, strict=True):
            if dropped != inside:
                text.append("⟦" if dropped else "⟧", style="red")
                inside = bool(dropped)
            style = "bold red" if trigger else "red" if dropped else ""
            text.append(f"«{token}»" if trigger else token, style=style)
        return text.append("⟧", style="red") if inside else text


class LaterPolicy:
    """A later policy: a Hugging Face checkpoint, run by transformers, that computes logprobs of earlier responses."""

    def __init__(self, checkpoint: Path, temperature: float, objective: ObjectiveSection) -> None:
        """Raises UserError when `checkpoint` is not a complete Hugging Face checkpoint of a supported model."""
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = _load(checkpoint).to(self._device).eval()
        self._temperature = temperature
        self._objective = objective

    @property
    def legend(self) -> str:
        """The veto and its trigger in words, as a table's caption."""
        veto, ratio = self._objective.veto, self._objective.trigger_ratio
        dropped = f"weight below {MARKED_WEIGHT:g}, {veto}" if veto in PREFIX_WEIGHTS else f"by veto {veto}"
        return f"dropped: {dropped}; trigger: ratio below {ratio:g} where A < 0"

    def assess(self, samples: Sequence[Sample], behaviour: Sequence[np.ndarray], advantages: np.ndarray) -> list[Stale]:
        """Returns ratios, triggers and dropped tokens of each response, computed as training computes them.

        `behaviour` has for each of the N samples the logprobs, float32 [R], that ratios divide by; `advantages` is
        float [N]. Tokens outside a loss mask take no part. A softmax runs over a sample's `support_ids`, or over the
        whole vocabulary if it has none. Raises UserError when the policy's vocabulary lacks a token of the samples.
        """
        objective = self._objective
        largest = max(max(s.prompt_ids.max(initial=0), s.response_ids.max(initial=0)) for s in samples)
        if largest >= self._model.config.vocab_size:
            raise UserError(
                f"--policy has a vocabulary of {self._model.config.vocab_size} tokens, and the responses "
                f"have the token id {largest}; name a checkpoint of the run's model"
            )
        ratios = [
            torch.from_numpy(sample.trained(logprobs - sampled))
            for sample, sampled, logprobs in zip(samples, behaviour, self._logprobs(samples), strict=True)
        ]
        lengths = torch.tensor([len(ratio) for ratio in ratios])
        segments = with_turns(make_segments(lengths, torch.ones(len(lengths))), [sample.turns for sample in samples])
        per_token = torch.from_numpy(np.asarray(advantages, dtype=np.float32))[segments.ids]
        log_ratio, start = torch.cat(ratios), initial_state(segments, objective)
        marked = veto(log_ratio, per_token, segments, objective, start).marked
        triggers = ~veto(log_ratio, per_token, segments, objective.model_copy(update={"veto": "trigger"}), start).keep
        columns = [column.split(lengths.tolist()) for column in (log_ratio, triggers, marked)]
        return [
            _stale(sample, *(values.numpy() for values in row)) for sample, *row in zip(samples, *columns, strict=True)
        ]

    @torch.no_grad()
    def _logprobs(self, samples: Sequence[Sample]) -> Iterator[np.ndarray]:
        """Yields the logprobs of each response's tokens, float32 [R], at the rollout's temperature."""
        size = max(1, BATCH_TOKENS // max(sample.tokens for sample in samples))
        for start in range(0, len(samples), size):
            batch = samples[start : start + size]
            rows = [torch.from_numpy(np.concatenate([s.prompt_ids, s.response_ids]).astype(np.int64)) for s in batch]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self._device)
            mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
            logits = self._model(ids, attention_mask=mask.to(self._device)).logits.float() / self._temperature
            for sample, row in zip(batch, logits, strict=True):
                yield _response_logprobs(sample, row[len(sample.prompt_ids) - 1 : sample.tokens - 1])


def _response_logprobs(sample: Sample, logits: torch.Tensor) -> np.ndarray:
    """Returns float32 [R], the logprobs of the response's tokens; logits [R, vocabulary]."""
    ids = torch.from_numpy(sample.response_ids.astype(np.int64)).to(logits.device)
    chosen = logits.gather(1, ids[:, None])[:, 0]
    if sample.support_ids is None:
        return np.asarray((chosen - logits.logsumexp(-1)).cpu().numpy())
    support = torch.from_numpy(sample.support_ids.astype(np.int64)).to(logits.device)
    possible = logits.gather(1, support.clamp(min=0)).masked_fill(support < 0, -torch.inf)
    return np.asarray((chosen - possible.logsumexp(-1)).cpu().numpy())


def _stale(sample: Sample, log_ratio: np.ndarray, trigger: np.ndarray, dropped: np.ndarray) -> Stale:
    lowest = float(np.exp(log_ratio.min())) if len(log_ratio) else None
    return Stale(sample.scattered(log_ratio), sample.scattered(trigger), sample.scattered(dropped), lowest)


def _load(checkpoint: Path) -> Any:
    """Returns the checkpoint's model. No file of the checkpoint is run as code. UserError if it is damaged, or of a
    family that is not supported."""
    shape = architecture(read_config(checkpoint, remedy="name one with --policy"), str(checkpoint / CONFIG))
    check_weights(checkpoint, "--policy")
    disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint,
            config=transformers_config(checkpoint, shape),
            dtype="auto",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises errors of many types for a damaged checkpoint
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"--policy {checkpoint} cannot be loaded ({reason}); copy it again, or name another") from None
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"--policy {checkpoint} lacks {len(missing)} weights, {missing[0]} among them; copy it again")
    return model
