"""The recipe's section about what a run keeps for its report; each docstring is an entry of docs/recipe.md."""

from __future__ import annotations

from pydantic import Field

from mugrpo_megatron.recipe.objective import Section


class ReportSection(Section):
    """What a run keeps for people to look at. Training is the same, bit by bit, with any of it."""

    probe_responses: int = Field(32, ge=0, le=1024)
    """Responses of each stage whose ratios are followed while it is optimized: a forward pass over them at the stage's
    start and after each eighth of it, but at most every 8 updates. 0 probes none."""
    eval_problems: int = Field(6, ge=0, le=1000)
    """Problems of each held-out set of which every evaluation keeps one response; 0 keeps none."""
