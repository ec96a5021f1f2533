"""Computes the learner's log-probabilities and entropies of given tokens, and opens a learner that does only this."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mugrpo_megatron.extras.servers.attest import Values
from mugrpo_megatron.learner.groups import initialize, shutdown_after
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.model import build_model, policy
from mugrpo_megatron.learner.packing import sequence_of
from mugrpo_megatron.learner.passes import gather_tokens, logprobs_and_entropies, pack_local, plan_update
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.policy import LoraSection
from mugrpo_megatron.recipe.systems import ParallelSection
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.weights.families import read_architecture
from mugrpo_megatron.weights.hf import load_hf


def learner_values(learner: Learner, samples: Sequence[Sample], temperature: float) -> Values:
    """The learner's log-probability and entropy at each response token that the loss mask includes, samples in order.

    Collective.
    """
    sequences = [sequence_of(sample, masked=True) for sample in samples]
    batches = pack_local(learner, sequences, plan_update(learner, sequences))
    values = logprobs_and_entropies(learner, batches, temperature)
    logprobs, entropies = gather_tokens(learner, sequences, batches, values, k=2).cpu().numpy()
    return Values(logprobs, entropies)


@contextmanager
def open_scoring_learner(recipe: Recipe, weights: Path) -> Iterator[Learner]:
    """A learner of one rank with the checkpoint `weights`, without an optimizer: it computes, and cannot train."""
    model = recipe.model.model_copy(update={"path": weights, "revision": None})
    model._snapshot = None
    # Without [lora]: the adapter is already merged into the weights of hf/.
    alone = recipe.model_copy(update={"model": model, "parallel": ParallelSection(), "lora": LoraSection()})
    ranks = initialize(alone.run, alone.parallel, alone.learner.threads)
    with shutdown_after(ranks):
        architecture = read_architecture(weights)
        chunks = build_model(
            alone.model, alone.parallel, alone.learner, architecture, ranks, None, alone.run.deterministic
        )
        load_hf([policy(chunk) for chunk in chunks], weights, architecture)
        yield Learner(alone, ranks, architecture, chunks, optimizer=None)  # type: ignore[arg-type]
