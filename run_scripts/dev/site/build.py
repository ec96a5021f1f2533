"""Builds the site of the pages and follows its links: `python -m run_scripts.dev.site.build [--out build/site]`.

docs/ is readable on GitHub as it is. Sphinx gets a copy in which the pages of the repository's root stand beside the
others, links to files that are no pages become text, and `index.md` (docs/README.md) has a table of contents.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from run_scripts.dev.site.check_links import broken_links

ROOT = Path(__file__).parents[3]
ROOT_PAGES = {
    "README.md": "overview",
    "SECURITY.md": "security",
    "CONTRIBUTING.md": "contributing",
    "CHANGELOG.md": "changelog",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
IMAGE = re.compile(r'<img alt="([^"]*)" src="([^"]+)">')
"""Sphinx copies Markdown's images, not those of HTML."""


def copy_pages(target: Path) -> None:
    """Copy docs/ and the pages of the root to `target`; links between pages lead to the copies."""
    for path in sorted(ROOT.joinpath("docs").rglob("*")):
        if path.is_file():
            copy = target / path.relative_to(ROOT / "docs")
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                copy.write_text(_rewritten(path), encoding="utf-8")
            else:
                shutil.copy(path, copy)
    for name, page in ROOT_PAGES.items():
        (target / f"{page}.md").write_text(_rewritten(ROOT / name, outside=True), encoding="utf-8")
    index = target / "README.md"
    index.rename(target / "index.md")
    _add_contents(
        target / "index.md", {path.relative_to(target).with_suffix("").as_posix() for path in target.rglob("*.md")}
    )


def _rewritten(path: Path, outside: bool = False) -> str:
    """The text of a page in which links lead to the copies of pages, and links to other files are plain text."""

    def link(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        file, _, anchor = target.partition("#")
        if "://" in target or not file:
            return found[0]
        linked = (path.parent / file).resolve()
        name = _page_of(linked)
        if name is None:
            if not linked.is_relative_to(ROOT / "docs") or linked.suffix == ".md":
                return f"{text} (`{linked.relative_to(ROOT)}`)"
            return f"{mark}[{text}]({linked.relative_to(ROOT / 'docs')})" if outside else found[0]
        here = Path("x") if outside else path.relative_to(ROOT / "docs")
        up = "../" * (len(here.parts) - 1)
        return f"{mark}[{text}]({up}{name}.md{f'#{anchor}' if anchor else ''})"

    return LINK.sub(link, IMAGE.sub(r"![\1](\2)", path.read_text(encoding="utf-8")))


def _page_of(path: Path) -> str | None:
    """The name that the copy of a Markdown file has on the site, without suffix; None if it is not on the site."""
    if path == ROOT / "docs/README.md":
        return "index"
    if path.suffix == ".md" and path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").with_suffix("").as_posix()
    return ROOT_PAGES.get(path.name) if path.parent == ROOT else None


def _add_contents(index: Path, pages: set[str]) -> None:
    """Append a hidden table of contents: the parts of the index in their order, then pages that no part names."""
    text = index.read_text(encoding="utf-8")
    trees, named = [], {"index"}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        names = dict.fromkeys(
            Path(link[3]).with_suffix("").as_posix() for link in LINK.finditer(body) if link[3].endswith(".md")
        )
        entries = [name for name in names if name in pages and name not in named]
        named.update(entries)
        if entries:
            trees.append((title.strip(), entries))
    rest = sorted(pages - named)
    if rest:
        trees.append(("More", rest))
    for title, entries in trees:
        text += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(entries) + "\n```\n"
    index.write_text(text, encoding="utf-8")


def build(out: Path) -> list[str]:
    """Build the site into `out` and return its broken links; CalledProcessError if Sphinx gives a warning."""
    with TemporaryDirectory() as scratch:
        source = Path(scratch, "pages")
        source.mkdir()
        copy_pages(source)
        command = [
            sys.executable,
            "-m",
            "sphinx",
            "-W",
            "--keep-going",
            "-q",
            "-b",
            "html",
            "-c",
            str(Path(__file__).parent),
        ]
        subprocess.run([*command, "-d", str(Path(scratch, "cache")), str(source), str(out)], check=True)
    return broken_links(out)


def main() -> int:
    """Build the site; returns 1 for a warning of Sphinx or a broken link."""
    parser = argparse.ArgumentParser(description="Build the site of the pages and follow its links.")
    parser.add_argument("--out", type=Path, default=ROOT / "build/site", help="directory of the site; build/site")
    out = parser.parse_args().out
    if out.exists():
        shutil.rmtree(out)
    try:
        broken = build(out)
    except subprocess.CalledProcessError:
        return 1
    for link in broken:
        print(link, file=sys.stderr)
    files = [path for path in out.rglob("*") if path.is_file()]
    pages = [path for path in files if path.suffix == ".html"]
    size = sum(path.stat().st_size for path in files) / 2**20
    print(f"{out}: {len(pages)} pages, {size:.1f} MiB, {len(broken)} broken links; open {out}/index.html")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
