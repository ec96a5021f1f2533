"""The anchor of the KL penalty: one learner pass over a new stage, and rewards with the penalty taken off."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from mugrpo_megatron.algorithm.anchor import rewards_less_kl
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import fsync
from mugrpo_megatron.learner.learner import Learner, holding
from mugrpo_megatron.learner.update import token_logprobs
from mugrpo_megatron.phases.passes import learner_pass
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.run.anchor import anchor_is_behaviour, anchor_remedy, anchor_weights, of_anchor
from mugrpo_megatron.run.cursor import Cursor, checkpoint_name
from mugrpo_megatron.run.record import check_begun
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.logprobs import check_logprobs, has_logprobs, weights_of, write_logprobs
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.weights.families import fingerprint


def compute_anchor(run: Run, learner: Learner, stage: StageStore, cursor: Cursor) -> None:
    """With `objective.kl_anchor`, write the anchor's logprobs of the stage's responses, before the first update.

    One forward pass over the stage, whatever the number of its updates; the anchor's weights are in the learner only
    during that pass, so no second model is kept. A run that resumes reads the file. Raises UserError when it belongs to
    another stage or to other weights than the anchor's directory holds now, and when it is gone although it cannot be
    computed again.
    """
    recipe = run.recipe
    if recipe.objective.kl_anchor is None or anchor_is_behaviour(recipe):
        return
    path, weights = run.directory.anchor(cursor.stage), anchor_weights(recipe)
    of, mark = of_anchor(run, stage), fingerprint(weights) if weights else ""
    if has_logprobs(path):
        if check_logprobs(path, of, anchor_remedy(run, cursor.stage))["weights"] != mark:
            raise UserError(
                f"{weights} holds other weights than when {path} was computed under them; put the right ones back, or "
                f"{anchor_remedy(run, cursor.stage)}"
            )
        return
    if weights:
        _check_weights(run, cursor.stage, weights, mark)
    if weights is None and cursor.age > 0:
        raise UserError(
            f"{path} is missing, and the weights at the stage's start, which it is of, have changed; restore it from a "
            f"copy, or remove the checkpoints after {checkpoint_name(Cursor(cursor.stage))} from "
            f"{run.directory.checkpoints}: the run then resumes at the stage's start"
        )
    if run.is_main:
        path.parent.mkdir(exist_ok=True)
        fsync(run.directory.path)
    with (
        learner_pass(run, cursor, "anchor logprobs", range(stage.updates)) as ages,
        write_logprobs(path, of, write=run.is_main, weights=mark) as append,
        holding(learner, weights) if weights else nullcontext(),
    ):
        for age in ages:
            append(token_logprobs(learner, stage.read_update(age)))


def _check_weights(run: Run, stage: int, weights: Path, mark: str) -> None:
    """Raise UserError when the anchor's directory holds other weights than when the run began, or a stage ago."""
    if run.recipe.objective.kl_anchor == "start":
        check_begun(run.record, run.recipe, f"the anchor of {run.directory.path}")
    before = run.directory.anchor(stage - 1) if stage > 0 else None
    if before and weights_of(before) not in (None, mark):
        raise UserError(
            f"{weights} holds other weights than when {before} was computed under them; put the right ones back"
        )


def training_rewards(samples: Sequence[Sample], section: ObjectiveSection) -> np.ndarray:
    """The rewards [N] that advantages are computed from: with `kl_in = "reward"`, less the penalty.

    Raises ValueError when a sample lacks its anchor's logprobs.
    """
    rewards = np.array([sample.reward for sample in samples])
    if section.kl_in != "reward" or section.kl_anchor is None:
        return rewards
    anchor = [s.trained(s.anchor_logprobs) for s in samples if s.anchor_logprobs is not None]
    if len(anchor) < len(samples):
        raise ValueError('objective.kl_in = "reward" needs every sample\'s anchor_logprobs')
    return rewards_less_kl(rewards, [s.trained(s.behaviour_logprobs) for s in samples], anchor, section)
