"""The weights in hf/ while a run goes on: engine-only processes sample from them; training waits only for a copy."""

from __future__ import annotations

from dataclasses import asdict

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.record import MARK, check_hf, mark
from mugrpo_megatron.run.run import Run


def write_hf(run: Run, cursor: Cursor, samples: Cursor | None = None) -> None:
    """Write the policy to `hf/`, in place of an earlier one; training continues once it is copied. Collective.

    `samples` is the start of the stage that these weights sample, where that is a later one than the cursor's. Raises
    UserError when something else has come to lie there.
    """
    check_own_hf(run)
    notes = {MARK: mark(run.record, asdict(cursor), asdict(samples) if samples else None)}
    run.saver.save_hf(run.recipe.model.directory, run.directory.hf, notes)


def check_own_hf(run: Run) -> None:
    """UserError on every rank unless the run may replace its `hf/`. Collective."""
    refusal = ""
    if run.is_main:
        try:
            check_hf(run.directory.path)
        except UserError as error:
            refusal = f"{error}; the checkpoint is not written, and the same command then writes it"
    if refusal := run.world.broadcast(refusal):
        raise UserError(refusal)
