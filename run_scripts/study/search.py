"""Which cells the study wants, in the order in which they run, and what the tuning seed decides.

A block of cells has one rate for all methods, or each method's own, tuned with the tuning seed right before the first
cell that needs it. A block that is the best of another has one method, chosen by the same tuning cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from run_scripts.study.cells import Cell, Outcome, Outcomes, Waiting
from run_scripts.study.grid import Block, Grid


@dataclass(frozen=True, slots=True)
class Search:
    """The search for a rate: the cells that it has asked for, in order, and what it found."""

    cells: list[Cell] = field(default_factory=list)
    rate: float | None = None
    """None until all `cells` are done."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of a method: the cells that it has asked for, in order, and what it chose."""

    cells: list[Cell]
    best: Cell | None
    """The tuning cell of the chosen method at its tuned rate; None until every method is tuned."""


def wanted(grid: Grid, done: Outcomes) -> Iterator[Cell | Waiting]:
    """Every cell in the order in which to run them, finished ones included; some come twice."""
    for together in grid.order:
        for seed in range(grid.seeds):
            for block in (grid.blocks[name] for name in together):
                if seed in block.seeds:
                    yield from _of_block(grid, done, block, seed)


def tuned_rate(grid: Grid, done: Outcomes, method: str) -> Search:
    """The best of the starting rates and, while the best is an end of those tried, of the next one on the ladder.

    Of the method whose rate this one takes, if it names one.
    """
    method = grid.methods[method].rate_of or method
    tried = set(grid.start)
    while True:
        cells = [Cell(grid.tuning_seed, method, rate) for rate in sorted(tried)]
        if not all(cell in done for cell in cells):
            return Search(cells)
        best = max(cells, key=lambda cell: (done[cell].after, -cell.rate)).rate
        place = grid.ladder.index(best)
        near = {grid.ladder[k] for k in (place - 1, place + 1) if 0 <= k < len(grid.ladder)}
        if near <= tried:
            return Search(cells, best)
        tried |= near


def choose(grid: Grid, done: Outcomes, block: Block) -> Choice:
    """The method of a block whose tuned cell ends best; in a tie the one with fewer phases, then the first."""
    searches = {method: tuned_rate(grid, done, method) for method in block.methods}
    cells = [cell for search in searches.values() for cell in search.cells]
    tuned = [Cell(grid.tuning_seed, name, search.rate) for name, search in searches.items() if search.rate is not None]
    if len(tuned) < len(searches):
        return Choice(cells, None)
    return Choice(cells, max(tuned, key=lambda cell: (done[cell].after, -grid.phases(cell.method))))


def of_twin(grid: Grid, done: Outcomes, cell: Cell) -> Outcome | None:
    """The outcome of the cell's twin, if no ratio of its run was a trigger: then the veto had nothing to drop."""
    twin = grid.methods[cell.method].twin
    found = done.get(replace(cell, method=twin)) if twin else None
    return found if found and found.least_ratio >= grid.threshold(cell.method) else None


def _of_block(grid: Grid, done: Outcomes, block: Block, seed: int) -> Iterator[Cell | Waiting]:
    for method in block.beside:
        yield from _at_its_rate(grid, done, method, seed, block.draw(seed))
    if block.best_of is not None:
        yield from _of_the_best(grid, done, block, seed)
        return
    for method in block.methods:
        if block.rate is not None:
            repeats = range(1, block.repeats + 1) if block.repeats else (block.draw(seed),)
            yield from (Cell(seed, method, block.rate, repeat) for repeat in repeats)
            continue
        if _choosing(grid, done, block):
            yield from tuned_rate(grid, done, method).cells
            yield Waiting(seed, method)
        else:
            yield from _at_its_rate(grid, done, method, seed, block.draw(seed))


def _at_its_rate(grid: Grid, done: Outcomes, method: str, seed: int, repeat: int) -> Iterator[Cell | Waiting]:
    """The tuning cells of a method, and its cell at the rate they find."""
    search = tuned_rate(grid, done, method)
    yield from search.cells
    yield Waiting(seed, method) if search.rate is None else Cell(seed, method, search.rate, repeat)


def _of_the_best(grid: Grid, done: Outcomes, block: Block, seed: int) -> Iterator[Cell | Waiting]:
    choice = choose(grid, done, block)
    yield from choice.cells
    yield replace(choice.best, seed=seed, repeat=block.draw(seed)) if choice.best else Waiting(seed, block.name)


def _choosing(grid: Grid, done: Outcomes, block: Block) -> bool:
    """Whether another block has yet to choose one of this block's methods: until then none of them runs."""
    return any(one.best_of == block.name and not choose(grid, done, block).best for one in grid.blocks.values())
