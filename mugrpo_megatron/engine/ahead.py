"""An engine's process that imports SGLang while this one imports Megatron.

Each takes seconds, so on CPU the process is started as soon as the recipe has been checked, before the run is opened.
On CUDA it is not: the learner loads first there, and importing SGLang may already take memory of the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mugrpo_megatron.engine.launch import engine_environment
from mugrpo_megatron.engine.placement import slot_of_environment
from mugrpo_megatron.engine.process import HostProcess
from mugrpo_megatron.observe.environment import may_find_cuda
from mugrpo_megatron.recipe import Recipe


@contextmanager
def host_ahead(recipe: Recipe) -> Iterator[HostProcess | None]:
    """The process of the engine that this rank will lead, for `Engine.start`; None where there is none to start yet.

    It is gone when the block ends, whether an engine has used it or not.
    """
    if may_find_cuda():
        yield None
        return
    slot = slot_of_environment(recipe.engine, cuda=False)
    if not slot.leads_engine or recipe.engine.nodes > 1:  # one of several nodes starts when all ranks have met
        yield None
        return
    environment = engine_environment(recipe, recipe.model.directory, cuda=False, slot=slot)
    host = HostProcess(environment, cuda=False)
    try:
        yield host
    finally:
        host.end()
