"""`mugrpo seal`: closes a stage that engine-only processes have generated, once every group is there."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.run.batch import shares_of, standing
from mugrpo_megatron.run.directory import RunDirectory, locked
from mugrpo_megatron.run.model import with_model
from mugrpo_megatron.stages.manifest import check_stage, other_shards
from mugrpo_megatron.stages.store import StageStore


def seal(run_dir: Path) -> str:
    """Seal the stage at which the run stands, and say so.

    Checks that every group is there, that every response was sampled with the weights at the stage's start, and that
    all shares had the same weights and problems. Raises UserError, with nothing changed, when one of these does not
    hold or a process still generates.
    """
    directory = RunDirectory(run_dir)
    if not directory.recipe.exists():
        raise UserError(f"{run_dir}: not a run directory (it has no {directory.recipe.name})")
    recipe = with_model(load_recipe(directory.recipe), run_dir=run_dir)
    where = standing(directory, recipe)
    stage = directory.stage(where.cursor.stage)
    with locked(directory.path / ".lock"):
        check_stage(stage, where.origin)
        store = StageStore(stage, 0, where.origin)
        if store.sealed:
            return f"{stage} is sealed already; `mugrpo optimize` takes its updates"
        shares = shares_of(stage, where.weights)
        updates = where.cursor.stage_updates(recipe.schedule)
        count = updates * recipe.rollout.prompts_per_update
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
            if versions != {where.origin.updates}:
                raise UserError(
                    f"{stage / shard.file} was sampled with weights after {sorted(versions)} updates, and the stage "
                    f"begins after {where.origin.updates}; remove {stage} to generate the stage again"
                )
        store.seal(updates, recipe.rollout.prompts_per_update)
    return f"{stage} is sealed: {count:,} groups; `mugrpo optimize` takes its updates, `mugrpo train` goes on from it"
