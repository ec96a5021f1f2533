"""Writes the report: one self-contained HTML page of a run, which may be finished, interrupted or running."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from mugrpo_megatron import __version__
from mugrpo_megatron.files.durable import check_output, write_text
from mugrpo_megatron.observe.metrics import values_in
from mugrpo_megatron.observe.progress import duration, short_number
from mugrpo_megatron.observe.results import format_difference, format_interval, format_value, mean_of, summary_of
from mugrpo_megatron.observe.rundata import RunData, read_run
from mugrpo_megatron.pages import page_address
from mugrpo_megatron.report.charts import COST, PAPER, SAMPLES, SECTIONS, TRIGGERS, VETO, section_of
from mugrpo_megatron.report.curves import Chart
from mugrpo_megatron.report.details import Details, read_details
from mugrpo_megatron.report.drawing import Drawing, draw
from mugrpo_megatron.report.excerpts import sample_sections
from mugrpo_megatron.report.heat import heat_text
from mugrpo_megatron.report.probes import objective_of
from mugrpo_megatron.report.remarks import collapsed_sections, paper_notes, remarks
from mugrpo_megatron.report.tables import recipe_sections, stage_table, summary_rows
from mugrpo_megatron.report.triggers import trigger_table
from mugrpo_megatron.terminal import visible

FILE_NAME = "report.html"
BRAND = "mu-GRPO run report"
"""Text by which a file is recognised as a report; a file without it is not replaced."""
SCRIPTS = ("chart.js", "panel.js", "timeline.js", "heat.js", "report.js")
"""The page's scripts, in an order in which each comes after those that it needs."""

LISTS = (
    "facts",
    "origin",
    "health_warnings",
    "warnings",
    "tiles",
    "sections",
    "events",
    "summary",
    "environment",
    "recipe",
)
EMPTY: dict[str, Any] = dict.fromkeys(("status", "runs", "stages", "part")) | dict.fromkeys(LISTS, ())
"""Optional fields of a page -> the values that they have if they are not given."""

PHASE_COLORS = {
    "start": "grey",
    "sync": "violet",
    "generate": "blue",
    "score": "yellow",
    "logprobs": "magenta",
    "auxiliary": "ramp-5",
    "probe": "red",
    "optimize": "teal",
    "save": "grey",
    "eval": "orange",
}
"""Phase -> its CSS colour, in the tiles and in the time line."""

TIME_LINE = Chart(
    "timeline",
    "Phases",
    "When each phase ran. Generation and optimization take turns on the same devices.",
    [],
    wide=True,
)


@dataclass(frozen=True, slots=True)
class PageSection:
    """A section of the page, which its reader can fold."""

    title: str
    charts: Sequence[Chart]
    verdict: str = ""
    open: bool = True
    table: dict[str, Any] | None = None
    notes: Sequence[str] = ()
    samples: Sequence[dict[str, Any]] = ()
    heat: str = ""

    @property
    def id(self) -> str:
        return slug(self.title)


def slug(title: str) -> str:
    """The title as an id that links on the page can name."""
    return re.sub(r"[^a-z]+", "-", title.lower()).strip("-")


def render(**content: Any) -> str:
    """Render the page as HTML; its content security policy forbids every request.

    `name`, `brand`, `progress`, `source` and `drawing` are required; `EMPTY` lists the other fields.
    """
    text = _template().render(
        version=__version__,
        style=Markup(_source("report.css")),
        script=Markup("".join(map(_source, SCRIPTS))),
        **{**EMPTY, **content},
    )
    return visible(text)  # a name may have characters that UTF-8 cannot encode, such as a lone surrogate


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters["slug"] = slug
    return environment.from_string(_source("report.html.j2"))


def is_page(path: Path, brand: str) -> bool:
    """Whether the file is a page that contains the text `brand`, so that a new page may replace it."""
    return path.is_file() and brand.encode() in path.read_bytes()


def _source(name: str) -> str:
    return files("mugrpo_megatron.report").joinpath("browser", name).read_text(encoding="utf-8")


def write_report(run_dir: Path) -> Path:
    """Write report.html in `run_dir`, from its recipe.toml, metrics.jsonl and (if there is one) summary.json.

    Raises UserError when `run_dir` is not a run directory, a file in it is damaged, or its report.html is not a report.
    """
    path = run_dir / FILE_NAME
    run = read_run(run_dir)
    check_output(path, str(path), own=is_page(path, BRAND), remedy="it is not a run's report, so move it away")
    write_text(path, page(run))
    return path


def page(run: RunData) -> str:
    """The HTML of a run's report."""
    details, summary = read_details(run.path, run.recipe), summary_of(run)
    drawing = draw(run, details)
    environment = run.processes[-1]["environment"] if run.processes else {}
    return render(
        name=run.path.resolve().name,
        brand=BRAND,
        source=str(run.path),
        status="finished" if run.summary is not None else "unfinished",
        drawing={**asdict(drawing), "colors": PHASE_COLORS},
        facts=_facts(run, summary),
        origin=_origin(run, environment),
        health_warnings=[
            sign | {"address": page_address("troubleshooting", sign["name"])} for sign in summary["health_warnings"]
        ],
        warnings=_warnings(run, drawing, summary, details),
        tiles=[_accuracy_tile(summary), _reward_tile(run), _time_tile(summary), _token_tile(run, summary)],
        progress=_progress(run),
        part=None if run.summary is not None else min(1.0, len(run.updates) / run.total_updates),
        sections=page_sections(run, drawing, summary, sample_sections(details, summary["measure"])),
        stages=stage_table(run),
        events=[{"at": duration(run.clock(e["time"])), "name": e["event"], "text": e["text"]} for e in run.events],
        summary=summary_rows(summary),
        environment=[(name, visible(str(value))) for name, value in environment.items()],
        recipe=recipe_sections(run),
    )


def page_sections(
    run: RunData, drawing: Drawing, summary: dict[str, Any], samples: Sequence[dict[str, Any]]
) -> list[PageSection]:
    charts = [*drawing.charts, TIME_LINE] if drawing.timeline["phases"] else drawing.charts
    sentences, collapsed = remarks(run, summary), collapsed_sections(run)
    sections = [
        PageSection(
            title,
            [chart for chart in charts if (COST if chart is TIME_LINE else section_of(chart.id)) == title],
            sentences[title],
            title not in collapsed,
            table=trigger_table(run) if title == TRIGGERS else None,
            notes=paper_notes(run, {chart.id for chart in charts}) if title == PAPER else (),
            samples=samples if title == SAMPLES else (),
            heat=heat_text(drawing.heat, objective_of(run.recipe)) if title == VETO and drawing.heat else "",
        )
        for title in SECTIONS
    ]
    return [section for section in sections if section.charts or section.samples or section.heat]


def _progress(run: RunData) -> str:
    """A sentence with the updates taken and the run's time so far.

    Of an unfinished run it also has the number of all updates, and the time left if that can be estimated.
    """
    done, total = len(run.updates), run.total_updates
    if run.summary is not None:
        return f"updates taken: {done:,} in {duration(run.seconds)}"
    seconds = run.seconds_left() if done < total else None
    rest = "" if seconds is None else f", about {duration(seconds)} left"
    return f"updates taken: {done:,} of {total:,} in {duration(run.seconds)}{rest}"


def _facts(run: RunData, summary: dict[str, Any]) -> list[dict[str, Any]]:
    def recipe(section: str, key: str) -> Any:
        return run.recipe.get(section, {}).get(key, "?")

    epochs, growth = (run.recipe.get("schedule", {}).get(key, 1) for key in ("epochs", "growth"))
    each = " updates each" if growth == 1 else " updates a stage on average"
    return [
        {"before": before, "value": value, "after": after}
        for before, value, after in (
            ("", recipe("objective", "name"), ""),
            ("S = ", recipe("schedule", "stages"), " stages"),
            ("µ = ", recipe("schedule", "updates_per_stage"), each),
            *((("growth ", growth, ""),) if growth != 1 else ()),
            *((("", epochs, " epochs over each stage"),) if epochs != 1 else ()),
            ("", recipe("rollout", "prompts_per_update"), " prompts an update"),
            ("", recipe("rollout", "responses_per_prompt"), " responses a prompt"),
            ("data ", recipe("data", "train"), ""),
            ("model ", recipe("model", "path"), ""),
            ("seed ", summary["seed"], ""),
        )
    ]


def _origin(run: RunData, environment: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs of name and value: when, where, from which commit and with which command the run was started."""
    start = datetime.fromtimestamp(run.clock.starts[0], tz=UTC)
    known = [(name, visible(str(environment[name]))) for name in ("host", "commit", "command") if name in environment]
    return [("started", f"{start:%Y-%m-%d %H:%M} UTC"), *known]


def _warnings(run: RunData, drawing: Drawing, summary: dict[str, Any], details: Details) -> list[str]:
    """Sentences to read before the curves: on values missing from the curves, on skipped updates, resumes, points that
    stand for several updates, and damaged files."""
    lines = []
    if drawing.not_finite:
        metrics = ", ".join(f"{name} in {count:,}" for name, count in drawing.not_finite.items())
        lines.append(f"Not finite, so missing from the curves: {metrics} of {len(run.updates):,} updates.")
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
    if after is None and before is None:
        return _tile(title, "–", "not evaluated yet", broad=True)
    value, interval = (before, mean["before_interval"]) if after is None else (after, mean["interval"])
    parts = [
        "before training" if after is None else "",
        f"95 % interval {format_interval(interval, measure)}" if interval else "",
        f"{len(sets)} sets, unweighted" if len(sets) > 1 else "",
        f"{summary['problems']:,.0f} problems",
    ]
    more = ", ".join(clause for clause in parts if clause)
    tile = _tile(title if len(sets) <= 1 else f"{title}, mean", format_value(value, measure), more, broad=True)
    if before is None or after is None:
        return tile
    gain = after - before
    return tile | {
        "start": format_value(before, measure).removesuffix(" %"),
        "gain": format_difference(gain, measure).replace("-", "−"),
        "trend": "up" if gain > 0.0005 else "down" if gain < -0.0005 else "",
    }


def _reward_tile(run: RunData) -> dict[str, Any]:
    rewards = values_in(run.stages or run.updates, "reward_mean")
    if not rewards:
        return _tile("Training reward", "–", "no responses yet")
    if len(rewards) == 1:
        return _tile("Training reward", f"{rewards[0]:.3g}", "mean of the stage's responses")
    return _tile(
        "Training reward", f"{rewards[-1]:.3g}", "means of the first and last stage", start=f"{rewards[0]:.3g}"
    )


def _time_tile(summary: dict[str, Any]) -> dict[str, Any]:
    total = summary["seconds"]["total"] or 1.0
    phases = [(name, seconds) for name, seconds in summary["seconds"].items() if name != "total" and seconds > 0]
    largest = sorted(phases, key=lambda phase: -phase[1])[:3]
    shares = [
        {"color": PHASE_COLORS[name], "part": round(seconds / total, 4), "title": f"{name} {duration(seconds)}"}
        for name, seconds in phases
    ]
    more = _unbroken(f"{name} {100 * seconds / total:.0f} %" for name, seconds in largest)
    return _tile("Wall-clock", duration(total), more, shares=shares, broad=True)


def _token_tile(run: RunData, summary: dict[str, Any]) -> dict[str, Any]:
    """The tile of response tokens: how many were sampled, those of a stage without an update included, and on how many
    the learner has trained."""
    seconds, trained = summary["seconds"], summary["tokens"]["trained"]
    phases = sum(row.get("tokens") or 0 for row in run.phases if row["phase"] == "generate")
    sampled = max(summary["tokens"]["generated"], round(phases))
    rates = [
        f"{text} at {short_number(count / took)}/s"
        for text, count, took in (
            ("sampled", sampled, seconds["generate"]),
            (f"{short_number(trained)} trained", trained, seconds["optimize"]),
        )
        if count and took
    ]
    return _tile("Response tokens", short_number(sampled or trained), _unbroken(rates) or "sampled")


def _unbroken(parts: Iterable[str]) -> str:
    """The parts in one line that can only break between two parts."""
    return " · ".join(text.replace(" ", "\N{NO-BREAK SPACE}") for text in parts)
