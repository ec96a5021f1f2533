"""`mugrpo seal`: seals a stage that processes without a learner have generated, once it is whole and of one piece."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.prefetch.shares import Position, position, shares_of
from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.run.directory import RunDirectory, locked
from mugrpo_megatron.run.record import with_model
from mugrpo_megatron.stages.manifest import check_stage, other_shards
from mugrpo_megatron.stages.store import StageStore

GO_ON = "go on with `mugrpo optimize` or `mugrpo train`"


def close_stage(recipe: Recipe, where: Position) -> int:
    """Seal the stage, and return the number of its groups.

    Checks that every group is there, that every response was sampled with the weights that sample the stage, and that
    all shares had the same weights and problems. Raises UserError, with nothing changed, when one of these does not
    hold. Call it with a lock that keeps others from sealing.
    """
    stage = where.stage
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
        covered = {group for share in shares for group in share.groups(count)}
        never = f"; no share was begun for {len(missing - covered)}" if missing - covered else ""
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


def seal(run_dir: Path) -> str:
    """Seal the stage that the run generates next, and say so.

    Raises UserError, with nothing changed, when the stage is not whole or not of one piece (`close_stage`), when a
    process still generates, and while a learner that takes the stage by itself is at work.
    """
    directory = RunDirectory(run_dir)
    if not directory.recipe.exists():
        raise UserError(f"{run_dir}: not a run directory (it has no {directory.recipe.name})")
    recipe = with_model(load_recipe(directory.recipe), run_dir=run_dir)
    where = position(directory, recipe)
    with locked(directory.path / ".lock"):
        store = StageStore(where.stage, 0, where.origin)
        if store.sealed:
            store.remove_merged()
            return f"{where.stage} is sealed already; `mugrpo optimize` takes its updates"
        count = close_stage(recipe, where)
    after = "run its shares again for its guests, or `mugrpo train`" if recipe.guest.by_name else GO_ON
    return f"{where.stage} is sealed: {count:,} groups; {after}"
