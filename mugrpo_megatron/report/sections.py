"""The page's sections, in order: their charts, tables, notes, sample responses and the heat map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mugrpo_megatron.report.heat import heat_text
from mugrpo_megatron.report.html import EMPTY_SECTION
from mugrpo_megatron.report.paper_charts import paper_notes, paper_remark
from mugrpo_megatron.report.payload import Drawing
from mugrpo_megatron.report.probes import objective_of
from mugrpo_megatron.report.rundata import RunData
from mugrpo_megatron.report.trigger_charts import trigger_remark, trigger_table

SAMPLES, VETO, TRIGGERS, PAPER = "Samples", "The veto, token by token", "Triggers by threshold", "The paper's figures"

SECTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Learning", "", ("accuracy", "reward", "passed")),
    (SAMPLES, "what the model wrote, and how it was scored", ()),
    (
        VETO,
        "the same responses at up to nine ages of their stage",
        ("atlas_ratio", "atlas_trained", "atlas_triggers", "atlas_first"),
    ),
    (
        "Off-policy health",
        "how far the policy has moved from the behaviour policy",
        ("dropped", "ratio_neg", "ess", "kl", "ess_by_age", "vetoed_fraction_by_age"),
    ),
    (
        TRIGGERS,
        "",
        (
            "trigger_tokens_by_age",
            "trigger_tokens",
            "trigger_responses_by_age",
            "trigger_responses",
            "dropped_by_scope_by_age",
            "dropped_by_scope",
            "ratio_neg_min",
        ),
    ),
    (PAPER, "", ("paper_accuracy", "paper_clipping", "paper_ratio", "paper_reward", "paper_vetoed")),
    ("Optimization", "", ("grad_norm", "entropy", "loss", "lr")),
    (
        "Responses",
        "what the engine sampled, stage by stage",
        ("rewards", "lengths", "pass_at_k", "unparsed", "length", "groups", "mismatch", "throughput"),
    ),
)
"""Title, remark and charts of the page's sections, in order."""

TIME_LINE = {
    "id": "timeline",
    "title": "Phases",
    "explains": "When each phase ran. Generation and optimization take turns on the same devices.",
    "wide": True,
}


def page_sections(run: RunData, drawing: Drawing, samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sections that have anything to show."""
    remarks = {TRIGGERS: trigger_remark(run), PAPER: paper_remark(run)}
    cards = {
        chart.id: {"id": chart.id, "title": chart.title, "explains": chart.explains, "wide": chart.wide}
        for chart in drawing.charts
    }
    sections = [
        _section(title, remarks.get(title, remark), [cards[id] for id in ids if id in cards])
        for title, remark, ids in SECTIONS
    ]
    by_title = {section["title"]: section for section in sections}
    by_title[SAMPLES]["samples"] = samples
    by_title[TRIGGERS]["table"] = trigger_table(run)
    by_title[PAPER]["notes"] = paper_notes(run, cards)
    if drawing.heat:
        by_title[VETO]["heat"] = heat_text(drawing.heat, objective_of(run.recipe))
    if drawing.timeline["phases"]:
        sections.append(_section("Time line", "", [TIME_LINE]))
    return [section for section in sections if section["charts"] or section["samples"] or section["heat"]]


def _section(title: str, remark: str, charts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {**EMPTY_SECTION, "title": title, "remark": remark, "charts": charts}
