"""Draws the rooms of the package as one picture, from their imports.

    python -m run_scripts.dev.room_picture docs/architecture.svg

A room stands one floor above the highest room that it imports, so every arrow points down. A room's width shows how
many lines it has. Extras stand in a wing of their own: the core never imports them at the top of a module.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from run_scripts.dev.modules import PACKAGE, Module, imported, module_of, product
from run_scripts.dev.svg import LIGHT, write_svg

WIDTH = 7.8
HEIGHT = 0.78
GAP = 0.12
FLOOR = 1.25
LOOSE = "train, cli"
"""The modules at the top of the package, as one room."""


def rooms(modules: Mapping[str, Module]) -> tuple[dict[str, list[Module]], dict[str, set[str]]]:
    """Room -> its modules, and room -> the rooms that it imports."""
    members: dict[str, list[Module]] = defaultdict(list)
    arrows: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        if not module.name.startswith(PACKAGE):
            continue
        room = room_of(module)
        members[room].append(module)
        for name, _ in imported(module.tree):
            other = modules.get(module_of(name, modules))
            if other and other.name.startswith(PACKAGE) and room_of(other) not in (room, LOOSE):
                arrows[room].add(room_of(other))
    return dict(members), arrows


def room_of(module: Module) -> str:
    return LOOSE if module.room == PACKAGE else module.room


def floors(members: Mapping[str, list[Module]], arrows: Mapping[str, set[str]]) -> dict[str, int]:
    """Room -> its floor, from 0. Rooms that import one another in a circle would share a floor of at most
    `len(members)`."""
    level = dict.fromkeys(members, 0)
    for _ in members:
        for room in members:
            level[room] = min(len(members), max((level[other] + 1 for other in arrows.get(room, ())), default=0))
    return level


def draw(axes: Axes) -> None:
    """Draw a box for each room and a line for each import between rooms of the core."""
    members, arrows = rooms(product())
    core = {room for room in members if not room.startswith("extras")}
    level = floors({room: members[room] for room in core}, {room: arrows[room] & core for room in core})
    places: dict[str, tuple[float, float, float]] = {}
    for floor in sorted(set(level.values())):
        row = sorted((room for room in core if level[room] == floor), key=lambda room: -lines_of(members[room]))
        width = {room: 1.25 + lines_of(members[room]) / 2600 for room in row}
        x = (WIDTH - sum(width.values()) - GAP * (len(row) - 1)) / 2
        for room in row:
            places[room] = (x, floor * FLOOR, width[room])
            x += width[room] + GAP
    wing = sorted((room for room in members if room.startswith("extras.")), reverse=True)
    for number, room in enumerate(wing):
        places[room] = (WIDTH + 1.0, number * FLOOR + 0.2, 1.9)
    for room in core:
        for other in arrows[room] & core:
            (x, y, w), (ox, oy, ow) = places[room], places[other]
            axes.plot([x + w / 2, ox + ow / 2], [y, oy + HEIGHT], color=LIGHT["line"], linewidth=0.8, zorder=1)
    for room, (x, y, w) in places.items():
        colour = LIGHT["orange"] if room in wing else LIGHT["green"] if room == "cpu" else LIGHT["blue"]
        style = "round,pad=0,rounding_size=0.08"
        axes.add_patch(
            FancyBboxPatch(
                (x, y), w, HEIGHT, style, facecolor=LIGHT["paper"], edgecolor=colour, linewidth=1.4, zorder=2
            )
        )
        name = room.removeprefix("extras.")
        axes.text(x + w / 2, y + 0.47, name, ha="center", color=LIGHT["ink"], fontsize=9, zorder=3)
        size = f"{len(members[room])} files, {lines_of(members[room]) / 1000:.1f}k"
        axes.text(x + w / 2, y + 0.16, size, ha="center", color=LIGHT["soft"], fontsize=6.5, zorder=3)
    top = max(y for _, y, _ in places.values()) + HEIGHT
    axes.plot([WIDTH + 0.5, WIDTH + 0.5], [-0.1, top], color=LIGHT["orange"], linestyle="--", linewidth=1.2)
    axes.text(
        WIDTH + 1.95,
        top + 0.1,
        "extras: import the core,\nare never imported by it",
        ha="center",
        va="bottom",
        color=LIGHT["soft"],
        fontsize=8,
    )
    axes.text(0, top + 0.1, "the core: every arrow points down", va="bottom", color=LIGHT["soft"], fontsize=8)
    axes.set_xlim(-0.1, WIDTH + 3.1)
    axes.set_ylim(-0.15, top + 0.75)
    axes.axis("off")


def lines_of(modules: list[Module]) -> int:
    return sum(module.lines for module in modules)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    figure = Figure(figsize=(8.4, 8.6))
    FigureCanvasAgg(figure)
    draw(figure.add_axes((0.01, 0.01, 0.98, 0.98)))
    write_svg(figure, parser.parse_args().out)


if __name__ == "__main__":
    main()
