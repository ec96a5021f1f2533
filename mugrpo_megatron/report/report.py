"""The report: one self-contained HTML page of a finished or unfinished run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from mugrpo_megatron import __version__
from mugrpo_megatron.files.durable import write_text
from mugrpo_megatron.files.outputs import check_output
from mugrpo_megatron.observe.progress import duration, short
from mugrpo_megatron.observe.streams import visible
from mugrpo_megatron.report.details import Details, read_details
from mugrpo_megatron.report.evaluations import between, difference, shown
from mugrpo_megatron.report.heat import heat_text
from mugrpo_megatron.report.paper_charts import paper_notes, paper_remark
from mugrpo_megatron.report.payload import Drawing, draw
from mugrpo_megatron.report.probes import objective_of
from mugrpo_megatron.report.rundata import RunData, read_run
from mugrpo_megatron.report.samples import sample_sections
from mugrpo_megatron.report.summary import mean_of, summary_of
from mugrpo_megatron.report.tables import recipe_sections, stage_table, summary_rows
from mugrpo_megatron.report.trigger_charts import trigger_remark, trigger_table

SCRIPTS = ("plot.js", "panel.js", "dragging.js", "export.js", "timeline.js", "heat.js", "report.js", "live.js")
"""The page's scripts, in an order in which each finds what it needs."""

EMPTY: dict[str, Any] = {
    "status": None,
    "facts": [],
    "warnings": [],
    "tiles": [],
    "runs": None,
    "sections": [],
    "stages": None,
    "events": [],
    "summary": [],
    "environment": [],
    "recipe": [],
    "live_s": 0,
}
"""What a page leaves out by default."""

EMPTY_SECTION: dict[str, Any] = {
    "remark": "",
    "charts": [],
    "table": None,
    "notes": [],
    "samples": [],
    "heat": "",
}
"""What a section leaves out by default; it has a title."""


def render(**content: Any) -> str:
    """The page as text. `name`, `brand`, `progress`, `source` and `drawing` are needed; `EMPTY` has the rest.

    A content security policy forbids every request, except for those of a live page to its own server.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.from_string(_source("report.html.j2")).render(
        version=__version__,
        style=Markup(_source("report.css")),
        script=Markup("".join(map(_source, SCRIPTS))),
        **{**EMPTY, **content},
    )


def is_page(path: Path, brand: str) -> bool:
    """Whether the file is a page of this brand, which a new one may replace."""
    return path.is_file() and brand.encode() in path.read_bytes()


def _source(name: str) -> str:
    return files("mugrpo_megatron.report").joinpath("page", name).read_text(encoding="utf-8")


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


FILE_NAME = "report.html"
BRAND = "mu-GRPO run report"
"""Every page says this; a page that does not is somebody else's and stays."""

PHASE_COLORS = {
    "start": "grey",
    "sync": "violet",
    "generate": "blue",
    "score": "yellow",
    "logprobs": "magenta",
    "probe": "red",
    "optimize": "teal",
    "save": "grey",
    "eval": "orange",
}
"""CSS colours of the phases, in the tiles and in the time line."""


def write_report(run_dir: Path) -> Path:
    """Write `run_dir`/report.html from recipe.toml, metrics.jsonl and summary.json, if there is one.

    Raises UserError when `run_dir` is not a run directory, a file in it is damaged, or its report.html is not one of
    these reports.
    """
    path = run_dir / FILE_NAME
    run = read_run(run_dir)
    check_output(path, str(path), own=is_page(path, BRAND), remedy="it is not a run's report, so move it away")
    write_text(path, page(run))
    return path


def page(run: RunData, live_s: int = 0) -> str:
    """The report's HTML; with `live_s` it asks its server for itself again after so many seconds."""
    details, summary = read_details(run.path, run.recipe), summary_of(run)
    drawing = draw(run, details)
    return render(
        name=run.path.resolve().name,
        brand=BRAND,
        source=str(run.path),
        status="finished" if run.summary is not None else "unfinished",
        live_s=live_s,
        drawing={**drawing.as_json(), "colors": PHASE_COLORS},
        facts=_facts(run, summary),
        warnings=_warnings(run, drawing, summary, details),
        tiles=[_accuracy_tile(summary), _reward_tile(run), _time_tile(summary), _token_tile(summary)],
        progress=f"updates taken: {len(run.updates):,} in {duration(run.seconds)}",
        sections=page_sections(run, drawing, sample_sections(details, summary["measure"])),
        stages=stage_table(run),
        events=[{"at": duration(run.clock(e["time"])), "name": e["event"], "text": e["text"]} for e in run.events],
        summary=summary_rows(summary),
        environment=list(run.processes[-1]["environment"].items()) if run.processes else [],
        recipe=recipe_sections(run),
    )


def _facts(run: RunData, summary: dict[str, Any]) -> list[dict[str, Any]]:
    def recipe(section: str, key: str) -> Any:
        return run.recipe.get(section, {}).get(key, "?")

    passes, growth = (run.recipe.get("schedule", {}).get(key, 1) for key in ("passes", "growth"))
    each = " updates each" if growth == 1 else " updates a stage on average"
    return [
        {"before": before, "value": value, "after": after}
        for before, value, after in (
            ("", recipe("objective", "name"), ""),
            ("S = ", recipe("schedule", "stages"), " stages"),
            ("µ = ", recipe("schedule", "updates_per_stage"), each),
            *((("growth ", growth, ""),) if growth != 1 else ()),
            *((("", passes, " passes over each stage"),) if passes != 1 else ()),
            ("", recipe("rollout", "prompts_per_update"), " prompts an update"),
            ("", recipe("rollout", "responses_per_prompt"), " responses a prompt"),
            ("data ", recipe("data", "train"), ""),
            ("model ", recipe("model", "path"), ""),
            ("seed ", summary["seed"], ""),
        )
    ]


def _warnings(run: RunData, drawing: Drawing, summary: dict[str, Any], details: Details) -> list[str]:
    """What to know before reading the curves."""
    lines = []
    if drawing.not_finite:
        found = ", ".join(f"{name} in {count:,}" for name, count in drawing.not_finite.items())
        lines.append(f"Not finite, so missing from the curves: {found} of {len(run.updates):,} updates.")
    if skipped := summary["skipped_updates"]:
        lines.append(f"{skipped:,} updates were skipped because their gradient was not finite.")
    if (resumes := len(run.processes) - 1) > 0:
        lines.append(f"Resumed {resumes} time{'s' if resumes > 1 else ''}; the time between is left out.")
    if drawing.bucket > 1:
        lines.append(
            f"A point stands for {drawing.bucket} updates: worst value of p99, max, min and ESS, mean of the others."
        )
    return [*lines, *map(visible, details.damaged)]


def _tile(name: str, value: str, more: str, **rest: Any) -> dict[str, Any]:
    optional = {"start": "", "gain": "", "trend": "", "shares": [], "broad": False}
    return {"name": name, "value": value, "more": more, **optional, **rest}


def _accuracy_tile(summary: dict[str, Any]) -> dict[str, Any]:
    measure, mean, sets = summary["measure"], mean_of(summary), summary["sets"]
    title, before, after = f"Held-out {measure}", mean["before"], mean["after"]
    if after is None:
        return _tile(title, "–", "not evaluated yet", broad=True)
    of = f"{len(sets)} sets, unweighted, " if len(sets) > 1 else ""
    interval = f"95 % interval {between(mean['interval'], measure)}, " if mean["interval"] else ""
    tile = _tile(
        title if len(sets) <= 1 else f"{title}, mean",
        shown(after, measure),
        f"{interval}{of}{summary['problems']:,.0f} problems",
        broad=True,
    )
    if before is None:
        return tile
    gain = after - before
    return tile | {
        "start": shown(before, measure).removesuffix(" %"),
        "gain": difference(gain, measure).replace("-", "−"),
        "trend": "up" if gain > 0.0005 else "down" if gain < -0.0005 else "",
    }


def _reward_tile(run: RunData) -> dict[str, Any]:
    rewards = [row["reward_mean"] for row in run.stages or run.updates if row.get("reward_mean") is not None]
    if not rewards:
        return _tile("Training reward", "–", "no responses yet")
    if len(rewards) == 1:
        return _tile("Training reward", f"{rewards[0]:.3g}", "mean of the stage's responses")
    return _tile("Training reward", f"{rewards[-1]:.3g}", "first and last stage", start=f"{rewards[0]:.3g}")


def _time_tile(summary: dict[str, Any]) -> dict[str, Any]:
    total = summary["seconds"]["total"] or 1.0
    phases = [(name, seconds) for name, seconds in summary["seconds"].items() if name != "total" and seconds > 0]
    largest = sorted(phases, key=lambda phase: -phase[1])[:3]
    shares = [
        {"color": PHASE_COLORS[name], "part": round(seconds / total, 4), "title": f"{name} {duration(seconds)}"}
        for name, seconds in phases
    ]
    more = " · ".join(_unbroken(f"{name} {100 * seconds / total:.0f} %") for name, seconds in largest)
    return _tile("Wall-clock", duration(total), more, shares=shares, broad=True)


def _token_tile(summary: dict[str, Any]) -> dict[str, Any]:
    tokens, seconds = summary["tokens"], summary["seconds"]
    rates = [
        _unbroken(f"{verb} at {short(count / taken)}/s")
        for verb, count, taken in (
            ("sampled", tokens["generated"], seconds["generate"]),
            ("trained", tokens["trained"], seconds["optimize"]),
        )
        if count and taken
    ]
    return _tile("Response tokens", short(tokens["trained"]), ", ".join(rates) or "trained on")


def _unbroken(text: str) -> str:
    """The text with non-breaking spaces."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")
