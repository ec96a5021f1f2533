"""Writes matplotlib figures as small SVG files that fit light and dark pages.

Figures are drawn in the light colours. The style sheet in the file replaces each colour by a dark one if the reader's
system prefers dark (`prefers-color-scheme`), so that a page needs one `<img>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLORS = {
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#14171f", "#eceef3"),
    "soft": ("#565d6d", "#a5acba"),
    "line": ("#e4e7ec", "#2b313c"),
    "blue": ("#2a6fdb", "#5b9bff"),
    "orange": ("#d9621c", "#f08a4b"),
    "green": ("#0f8660", "#35b88f"),
    "red": ("#c4314b", "#f2708a"),
    "violet": ("#7a4fd0", "#a98bf0"),
    "grey": ("#b9bfca", "#59616f"),
}
"""Name -> (light, dark)."""
LIGHT = {name: light for name, (light, _) in COLORS.items()}
"""Name -> the colour to draw with."""

_DARK = dict(COLORS.values())
_NUMBER = re.compile(r"-?\d+\.\d+")
_COLOR = re.compile(r"#[0-9a-f]{6}\b")
_REFERENCE = re.compile(r"#([\w.]+)")
_ATTRIBUTES = ("id", "class", "href", "clip-path", "transform", "x", "y", "width", "height", "d")
_DEFAULTS = ("text-anchor: start", "font-weight: 400", "stroke-dashoffset: 0")


def plain_axes(axes: Axes) -> None:
    """Style the axes: horizontal lines behind the data, and no frame except the line below."""
    axes.set_facecolor(LIGHT["paper"])
    axes.grid(axis="y", color=LIGHT["line"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=LIGHT["soft"], length=0, labelsize=10)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(LIGHT["line"])


def write_svg(figure: Figure, path: Path) -> Path:
    """Write `figure` to `path`. The same figure always gives the same bytes."""
    drawn = StringIO()
    with rc_context({"svg.hashsalt": "mugrpo", "svg.fonttype": "none"}):
        figure.savefig(drawn, format="svg", facecolor=LIGHT["paper"], metadata={"Date": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(compact(drawn.getvalue()), encoding="utf-8")
    return path


def compact(svg: str) -> str:
    """Shorten matplotlib's SVG: no metadata, styles as classes with a dark variant, one element a line.

    Raises ValueError for a colour without a dark one in `COLORS`.
    """
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
    used = dict.fromkeys(name for e in root.iter() for name in _references(e.attrib))
    ids = {name: f"i{place}" for place, name in enumerate(used)}
    classes: dict[str, str] = {}
    lines = [line for child in root for line in _lines(child, ids, classes, digits=1)]
    sheet = [*_rules(classes, light=True), "@media (prefers-color-scheme: dark) {", *_rules(classes, light=False), "}"]
    size = " ".join(f'{name}="{root.attrib[name]}"' for name in ("width", "height", "viewBox"))
    shared = 'font-family="DejaVu Sans, Verdana, sans-serif" stroke-linejoin="round"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {shared}>'
    return "\n".join([head, "<style>", *sheet, "</style>", *lines, "</svg>"]) + "\n"


def _lines(element: Element, ids: Mapping[str, str], classes: dict[str, str], digits: int) -> Iterator[str]:
    """Yields the lines of an element and its children.

    Groups without attributes are left out, but not their content; shapes in `defs` are drawn with one more digit.
    """
    if element.tag in ("metadata", "style"):
        return
    digits = 2 if element.tag == "defs" else digits
    attributes = _attributes(element, ids, classes, digits)
    inner = [line for child in element for line in _lines(child, ids, classes, digits)]
    if element.tag in ("g", "defs") and (not inner or (element.tag == "g" and not attributes)):
        yield from inner
    elif inner:
        yield from (f"<{element.tag}{attributes}>", *inner, f"</{element.tag}>")
    elif text := (element.text or "").strip():
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        yield f"<{element.tag}{attributes}>{escaped}</{element.tag}>"
    else:
        yield f"<{element.tag}{attributes}/>"


def _attributes(element: Element, ids: Mapping[str, str], classes: dict[str, str], digits: int) -> str:
    found = {name: value for name, value in element.attrib.items() if name in _ATTRIBUTES}
    if found.get("transform", "").startswith("rotate(-0"):
        del found["transform"]
    if "id" in found and found["id"] not in ids:
        del found["id"]
    style = _style(element)
    if style:
        found["class"] = classes.setdefault(style, f"c{len(classes)}")
    return "".join(f' {name}="{_short(name, found[name], ids, digits)}"' for name in _ATTRIBUTES if name in found)


def _short(name: str, value: str, ids: Mapping[str, str], digits: int) -> str:
    """The value of an attribute, with short ids and rounded numbers."""
    if name == "id":
        return ids[value]
    if name in ("href", "clip-path"):
        return _REFERENCE.sub(lambda match: f"#{ids[match[1]]}", value)
    if name == "class":
        return value
    rounded = _NUMBER.sub(lambda match: f"{float(match[0]):.{digits}f}".rstrip("0").rstrip("."), value)
    rounded = rounded.replace("-0 ", "0 ")
    return re.sub(r" ?([A-Za-z]) ?", r"\1", " ".join(rounded.split())) if name == "d" else rounded


def _style(element: Element) -> str:
    """The style declarations of an element, without the font, which the whole picture shares."""
    declared = [one.strip() for one in element.attrib.get("style", "").split(";")]
    return "; ".join(one for one in declared if one and not one.startswith("font-family") and one not in _DEFAULTS)


def _rules(classes: Mapping[str, str], *, light: bool) -> Iterator[str]:
    """Yields a CSS rule for each class; for dark pages only with the declarations that have a colour."""
    for style, name in classes.items():
        declared = [one for one in style.split("; ") if light or _COLOR.search(one)]
        if declared:
            text = "; ".join(declared if light else (_COLOR.sub(_dark, one) for one in declared))
            yield f".{name} {{ {text} }}"


def _dark(match: re.Match[str]) -> str:
    if match[0] not in _DARK:
        raise ValueError(f"{match[0]} has no dark twin: add it to COLORS")
    return _DARK[match[0]]


def _references(attributes: Mapping[str, str]) -> list[str]:
    return [name for key in ("href", "clip-path") for name in _REFERENCE.findall(attributes.get(key, ""))]
