"""Follows every link of a built site to its file and its anchor; links to other hosts are not checked."""

from __future__ import annotations

from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The ids in an HTML file, and the addresses to which it links or whose content it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            if value and ((tag == "a" and name == "href") or (tag in ("img", "script") and name == "src")):
                self.links.append(value)


@cache
def read_page(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def broken_links(site: Path) -> list[str]:
    """A line for each link of the site's pages whose file or anchor does not exist."""
    broken = []
    for path in sorted(site.rglob("*.html")):
        for link in dict.fromkeys(read_page(path).links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            linked = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            anchor = unquote(parts.fragment)
            if not linked.is_file():
                broken.append(f"{path.relative_to(site)}: {link}: no such file")
            elif anchor and linked.suffix == ".html" and anchor not in read_page(linked).ids:
                broken.append(f"{path.relative_to(site)}: {link}: no such anchor")
    return broken
