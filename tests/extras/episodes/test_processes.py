"""Which process plays an episode, without a process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mugrpo_megatron.extras.episodes.processes import Attempt, EpisodeProcess, Group, Pool
from mugrpo_megatron.recipe.policy import EpisodesSection
from mugrpo_megatron.samples import Problem, Prompt


@pytest.mark.parametrize("programs", [1, 4, 7])
def test_no_more_programs_run_than_the_recipe_says(programs: int) -> None:
    """However many processes have room; one that ends makes room for the next."""
    pool = Pool({}, EpisodesSection(programs=programs), limit=3, most_episodes=programs)
    worker: Any = SimpleNamespace(send=lambda text: None)
    pool.processes = [EpisodeProcess(worker, ready=True) for _ in range(3)]
    group = Group(Prompt(0, Problem("p", "1", "1", "test"), [1]), [])
    pool.waiting.extend(Attempt(key, group, key) for key in range(20))
    for placed in range(programs, 21):
        pool.place(lambda episode: {"start": episode.key})
        playing = [(process, key) for process in pool.processes for key in process.episodes]
        assert (len(playing), len(pool.waiting)) == (programs, 20 - placed)
        process, key = playing[0]
        del process.episodes[key]
    for process in pool.processes:
        process.outbox.put(b"")
