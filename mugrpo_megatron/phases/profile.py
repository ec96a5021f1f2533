"""PyTorch's profiler around the updates that `track.profile_updates` names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile, supported_activities

from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.run import Run


@contextmanager
def profiled(run: Run, cursor: Cursor) -> Iterator[None]:
    """Record the update inside where the recipe asks for it, on every rank; it takes longer than others.

    The trace is for chrome://tracing or Perfetto.
    """
    if cursor.updates not in run.recipe.track.profile_updates:
        yield
        return
    path = run.directory.trace(cursor.updates, run.world.ranks.rank)
    path.parent.mkdir(exist_ok=True)
    with profile(activities=list(supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA})) as found:
        yield
    found.export_chrome_trace(str(path))
    run.display.say(f"the profile of update {cursor.updates} is in {path.parent}")
