"""Reads the batches of a stage: the responses of each update, with what was computed for them later (columns)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from mugrpo_megatron.algorithm.advantages import informative, informative_updates
from mugrpo_megatron.algorithm.ref_kl import rewards_less_kl
from mugrpo_megatron.data.prepare import update_at
from mugrpo_megatron.recipe import ObjectiveSection, Recipe
from mugrpo_megatron.recipe.functions import source_sum
from mugrpo_megatron.run.cursor import Cursor, checkpoint_name
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.inputs import file_sum
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.columns import LogprobColumn, ScoreColumn, recompute_remedy
from mugrpo_megatron.stages.manifest import stage_identity
from mugrpo_megatron.stages.routes import RouteColumn, route_column
from mugrpo_megatron.stages.store import StageStore

AUXILIARY_REMEDY = (
    "remove both files of the column (values and .json index), and `mugrpo train` or `mugrpo generate` with this "
    "recipe computes them"
)
"""The way out that ends an error about an auxiliary model's column."""


@dataclass(frozen=True, slots=True)
class Batch:
    samples: list[Sample]
    """The samples of the update. Their problems' rows are read with them only for a user's advantage function."""
    rewards: np.ndarray
    """float64 [N]: the rewards that advantages are computed from."""
    groups: np.ndarray
    """int64 [N]: number of each sample's group."""
    stage_progress: float
    """Fraction of the stage's updates already taken, in [0, 1)."""


@dataclass(frozen=True, slots=True)
class StageColumns:
    """The columns of a stage (files computed beside it). A column that the recipe does not ask for is None."""

    behaviour: LogprobColumn | None
    """Log-probabilities under the learner's weights at the stage's start, with `rollout.behaviour = "learner"`."""
    routes: RouteColumn | None
    """Experts chosen by the learner's routers at the stage's start, with `learner.routing_replay = "learner"`."""
    ref: LogprobColumn | None
    """Log-probabilities under the reference policy of the KL penalty; None also if it is the behaviour policy."""
    ref_weights: Path | None
    """Checkpoint of the reference policy; None if it is the learner at the stage's start, or if there is none."""
    teacher: LogprobColumn | None
    """Log-probabilities under the auxiliary model that `objective.teacher` names."""
    scores: Mapping[str, ScoreColumn]
    """Scores of the reward functions that are judges, by name."""
    proximal: Callable[[int], LogprobColumn] | None
    """Age -> the column of log-probabilities under the weights at that age, of the responses of the next
    `objective.proximal_every` updates."""


def columns_of(recipe: Recipe, directory: RunDirectory, run_id: str, store: StageStore, stage: int) -> StageColumns:
    """The columns of a sealed stage that the recipe asks for, whether they are computed already or not."""
    section, identity = recipe.objective, stage_identity(store.content)

    def after(age: int = 0) -> str:
        return f"after {checkpoint_name(Cursor(stage, age))} from {directory.checkpoints}"

    def proximal(age: int) -> LogprobColumn:
        # The key has the run's id, because a branch at the same age has other weights.
        key = {**identity, "run": run_id, "age": age}
        return LogprobColumn(directory.proximal(stage, age), key, recompute_remedy(after(age)))

    behaviour = LogprobColumn(directory.behaviour(stage), identity, recompute_remedy(after()))
    weights = ref_weights(recipe)
    ref = LogprobColumn(
        directory.ref(stage),
        {**identity, "ref": section.kl_ref},
        recompute_remedy("" if weights else after()),
    )
    return StageColumns(
        behaviour=behaviour if recipe.rollout.behaviour == "learner" else None,
        routes=route_column(store.directory, "learner", identity) if store.replay == "learner" else None,
        ref=ref if section.kl_ref and not ref_is_behaviour(recipe) else None,
        ref_weights=weights,
        teacher=teacher_column(recipe, directory, store, stage),
        scores={name: score_column(recipe, directory, store, stage, name) for name in recipe.reward.judges},
        proximal=proximal if section.proximal_every > 1 else None,
    )


def teacher_column(recipe: Recipe, directory: RunDirectory, store: StageStore, stage: int) -> LogprobColumn | None:
    """The column of the teacher's log-probabilities of a sealed stage; None without a teacher."""
    name, temperature = recipe.objective.teacher, recipe.rollout.temperature
    if name is None:
        return None
    key = {**stage_identity(store.content), "auxiliary": name, "temperature": temperature}
    return LogprobColumn(directory.auxiliary(stage, f"teacher-{name}"), key, AUXILIARY_REMEDY)


def score_column(recipe: Recipe, directory: RunDirectory, store: StageStore, stage: int, name: str) -> ScoreColumn:
    """The column of the scores that the judge `name` gives a sealed stage."""
    judge = recipe.reward.judges[name]
    key = {
        **stage_identity(store.content),
        "auxiliary": judge.model,
        "prompt": file_sum(judge.prompt),
        "parse": [judge.parse, source_sum(judge.parse or "")],
        "sampling": [judge.max_tokens, judge.temperature],
    }
    return ScoreColumn(directory.auxiliary(stage, f"reward-{name}"), key, AUXILIARY_REMEDY)


def ref_weights(recipe: Recipe) -> Path | None:
    """The checkpoint that `objective.kl_ref` names; None if it names the learner at the stage's start, or nothing."""
    name = recipe.objective.kl_ref
    if name is None or name == "stage":
        return None
    return recipe.model.directory if name == "start" else Path(name)


def ref_is_behaviour(recipe: Recipe) -> bool:
    """Whether reference policy and behaviour policy are the same one, the learner at the stage's start."""
    return recipe.objective.kl_ref == "stage" and recipe.rollout.behaviour == "learner"


@dataclass(frozen=True)
class StageBatches:
    """The batches of a sealed stage's updates, in the order in which the recipe takes them, with their columns."""

    recipe: Recipe
    store: StageStore
    stage: int
    columns: StageColumns

    def batch(self, cursor: Cursor) -> Batch:
        """Read the batch of the update at the cursor. Raises UserError if a column is missing or damaged."""
        samples = self.samples(cursor.age)
        if self.columns.proximal:
            since_refresh = cursor.age % self.recipe.objective.proximal_every
            proximal = self.columns.proximal(cursor.age - since_refresh).read(since_refresh)
            samples = with_columns(samples, {"proximal_logprobs": proximal})
        return Batch(
            samples,
            training_rewards(samples, self.recipe.objective),
            np.array([sample.group for sample in samples]),
            cursor.stage_progress(self.recipe.schedule, self.store.updates),
        )

    def samples(self, age: int) -> list[Sample]:
        """Read the samples of the update taken at `age`, without the proximal policy's log-probabilities.

        Epochs after the first shuffle the updates by the run's seed. With `objective.zero_variance = "leave_out"`
        updates consist of informative groups only (their rewards are not all equal), if the stage has any.
        """
        # In the first epoch updates are not shuffled, unlike in verl and TRL: the responses of update k are trained on
        # at age k.
        update = update_at(self.recipe.run.seed, self.stage, self.store.updates, age)
        if self.recipe.objective.zero_variance != "leave_out":
            return self._stored(update)
        per_update = self.recipe.rollout.prompts_per_update
        rewards, groups = self._rewards
        is_informative = np.zeros(groups.max() + 1, dtype=bool)
        is_informative[groups] = informative(rewards, groups)
        chosen = informative_updates(is_informative, per_update)[update]
        # Reads only the updates that hold chosen groups: a whole stage may be larger than memory.
        stored = {number: self._stored(number) for number in sorted({*(chosen // per_update).tolist()})}
        return [
            replace(sample, group=index)  # a group that occurs twice in one update counts as two groups
            for index, group in enumerate(chosen.tolist())
            for sample in stored[group // per_update]
            if sample.group == group
        ]

    @cached_property
    def _rewards(self) -> tuple[np.ndarray, np.ndarray]:
        """The rewards and groups of the whole stage, as `StageStore.rewards` returns them, with the judges' weighted
        scores added to the rewards."""
        rewards, groups = self.store.rewards()
        for name, column in self.columns.scores.items():
            scores = np.concatenate([column.read(update) for update in range(self.store.updates)])
            rewards = rewards + self.recipe.reward.judges[name].weight * neutral_where_missing(scores, groups)
        return rewards, groups

    def _judged(self, samples: list[Sample], update: int) -> list[Sample]:
        """Add each judge's scores to the samples: times the judge's weight to rewards, unweighted to components.

        A missing score counts in the reward as the mean of its group (`neutral_where_missing`), and adds no component.
        """
        groups = np.array([sample.group for sample in samples])
        for name, column in self.columns.scores.items():
            scores, weight = column.read(update), self.recipe.reward.judges[name].weight
            weighted = weight * neutral_where_missing(scores, groups)
            samples = [
                replace(
                    sample,
                    reward=sample.reward + float(term),
                    components={**sample.components, **({} if np.isnan(score) else {name: float(score)})},
                )
                for sample, term, score in zip(samples, weighted, scores, strict=True)
            ]
        return samples

    def _stored(self, update: int) -> list[Sample]:
        """Read the samples of a stored update, with every column but the proximal policy's log-probabilities."""
        with_rows = self.recipe.objective.has_user_advantage
        samples = self._judged(self.store.read_update(update, with_text=with_rows), update)
        behaviour = self.columns.behaviour.read(update) if self.columns.behaviour else None
        # Behaviour log-probabilities never take the place of the engine's, since the mismatch of engine and learner
        # needs both.
        columns = {"behaviour_logprobs": behaviour or [sample.engine_logprobs for sample in samples]}
        if self.columns.teacher:
            columns["teacher_logprobs"] = self.columns.teacher.read(update)
        if ref_is_behaviour(self.recipe):
            columns["ref_logprobs"] = columns["behaviour_logprobs"]
        elif self.columns.ref:
            columns["ref_logprobs"] = self.columns.ref.read(update)
        return with_columns(samples, columns)


def with_columns(samples: Sequence[Sample], columns: Mapping[str, Sequence[np.ndarray]]) -> list[Sample]:
    """Add columns to the samples: `columns` maps a field of `Sample` to an array float32 [R] for each sample."""
    return [
        replace(sample, **dict(zip(columns, values, strict=True)))
        for sample, *values in zip(samples, *columns.values(), strict=True)
    ]


def neutral_where_missing(scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Returns the scores float64 [N] with the mean of its group's scores in the place of each missing one (NaN), which
    leaves the group's baseline as it is. In a group without any score the missing ones become 0.

    `groups` is int64 [N].
    """
    _, inverse = np.unique(groups, return_inverse=True)
    known = ~np.isnan(scores)
    sums, counts = np.bincount(inverse, np.where(known, scores, 0.0)), np.bincount(inverse, known)
    return np.where(known, scores, (sums / np.maximum(counts, 1))[inverse])


def training_rewards(samples: Sequence[Sample], section: ObjectiveSection) -> np.ndarray:
    """The rewards float64 [N] that advantages are computed from: with `kl_penalty = "reward"`, less the KL penalty.

    Raises ValueError when the penalty needs logprobs of the behaviour or the reference policy and a sample lacks them.
    """
    rewards = np.array([sample.reward for sample in samples])
    if section.kl_penalty != "reward" or section.kl_ref is None:
        return rewards
    # As in InstructGPT's PPO (arXiv 2203.02155), the penalty comes before the baseline, so a group's mean contains its
    # mean penalty.
    behaviour = [s.trained(s.behaviour_logprobs) for s in samples if s.behaviour_logprobs is not None]
    ref = [s.trained(s.ref_logprobs) for s in samples if s.ref_logprobs is not None]
    if min(len(behaviour), len(ref)) < len(samples):
        raise ValueError('objective.kl_penalty = "reward" needs behaviour_logprobs and ref_logprobs of every sample')
    return rewards_less_kl(rewards, behaviour, ref, section)
