"""The recipe's section about what a run keeps for its report; each docstring is an entry of docs/recipe.md."""

from __future__ import annotations

from pydantic import Field

from mugrpo_megatron.recipe.objective import Section


class ReportSection(Section):
    """Data that a run stores for its report. These keys do not change training: it stays bitwise the same."""

    probe_responses: int = Field(32, ge=0, le=1024)
    """Responses of each stage that are probed for the heat map: a forward pass over them at the stage's start and after
    each eighth of its updates, but at most every 8 updates. 0 turns the probe off."""
    eval_problems: int = Field(6, ge=0, le=1000)
    """Problems of each held-out set for which every evaluation stores one response; 0 stores none."""
