"""Renders the page: one HTML file with its style, its scripts and its data, which loads nothing."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from mugrpo_megatron import __version__

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
