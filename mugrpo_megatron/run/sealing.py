"""Seal a stage that processes without a learner have generated, after checking that it is complete and consistent."""

from __future__ import annotations

import pyarrow.parquet as pq

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.batch import Standing, shares_of
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.stages.manifest import check_stage, other_shards
from mugrpo_megatron.stages.store import StageStore


def close_stage(directory: RunDirectory, recipe: Recipe, where: Standing) -> int:
    """Seal the stage at which the run stands, and return the number of its groups.

    Checks that every group is there, that every response was sampled with the weights that sample the stage, and that
    all shares had the same weights and problems. Raises UserError, with nothing changed, when one of these does not
    hold. Call it with the directory's lock.
    """
    stage = directory.stage(where.cursor.stage)
    check_stage(stage, where.origin)
    store = StageStore(stage, 0, where.origin)
    updates = where.cursor.stage_updates(recipe.schedule)
    count = updates * recipe.rollout.prompts_per_update
    if store.sealed:
        return count
    shares = shares_of(stage, where.weights)
    missing = set(range(count)) - store.present()
    if missing:
        lacking = [f"{share} ({len(own)})" for share in shares if (own := share.groups(count) & missing)]
        begun = {group for share in shares for group in share.groups(count)}
        never = f"; no share was begun for {len(missing - begun)}" if missing - begun else ""
        raise UserError(
            f"{stage} lacks {len(missing):,} of {count:,} groups; shares that lack some: "
            f"{', '.join(lacking) or 'none'}{never}; run them again: `mugrpo generate --engine-only --shard I/N`"
        )
    for shard in other_shards(stage, 0):
        versions = set(pq.read_table(stage / shard.file, columns=["weight_version"])["weight_version"].to_pylist())
        if versions != {where.version}:
            raise UserError(
                f"{stage / shard.file} was sampled with weights after {sorted(versions)} updates, and those that "
                f"sample the stage are after {where.version}; remove {stage} to generate the stage again"
            )
    store.seal(updates, recipe.rollout.prompts_per_update)
    return count
