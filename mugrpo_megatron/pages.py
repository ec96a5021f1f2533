"""The addresses of the documentation's pages, for messages. Imports only Python's own library."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

PACKAGE = Path(__file__).parent
FILES = PACKAGE / "docs"
"""The folder with the Markdown of every page: in a checkout a link to docs/, in a wheel copies."""


def page_address(name: str, heading: str = "") -> str:
    """The address of the page `name`, such as "troubleshooting", or of the heading or id `heading` on it.

    If pyproject.toml's `[project.urls]` names a site as `Documentation`, the address is on that site. Otherwise it is
    the path of the page's Markdown file: docs/NAME.md if the current directory is the checkout, else an absolute one.
    """
    fragment = f"#{slug(heading)}" if heading else ""
    if site := _site():
        return f"{site}/{name}.html{fragment}"
    folder = FILES.resolve()
    return f"{'docs' if folder == Path('docs').absolute() else folder}/{name}.md{fragment}"


def slug(heading: str) -> str:
    """The name of a heading in an address, as GitHub and the site form it; an id such as `objective.veto` stays as it
    is."""
    if re.fullmatch(r"[a-z_]+(\.\w+)+", heading):
        return heading
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@cache
def _site() -> str:
    """The base address of the project's site; empty if there is none."""
    try:
        entries = metadata("mugrpo-megatron").get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    urls = dict(entry.split(", ", 1) for entry in entries)
    return urls.get("Documentation", "").rstrip("/")
