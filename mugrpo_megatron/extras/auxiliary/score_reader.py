"""Reads the scores in a judge's answers, in worker processes with the limits of a reward function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mugrpo_megatron.recipe.scoring import FunctionSection, RewardSection
from mugrpo_megatron.rewards.dispatch import Dispatcher
from mugrpo_megatron.rewards.items import Pending, ScoringInput, Verdict

Reader = Callable[[Sequence[str]], list[Verdict]]
"""A verdict on each answer: its score, or None with the reason."""


@contextmanager
def score_reader(section: RewardSection, judge: FunctionSection, key: str) -> Iterator[Reader]:
    """Yield the reader of a judge's answers; its workers stop when the block exits.

    Raises UserError when the user's function that reads scores cannot be loaded. The reader raises RewardFailure when
    that function exits, dies or runs into a limit on more than `reward.max_failure_share` of the answers.
    """

    def read(answers: Sequence[str]) -> list[Verdict]:
        pending = Pending[Verdict](len(answers))
        dispatcher.submit(pending, range(len(answers)), [ScoringInput(answer, "", "") for answer in answers])
        return pending.result()

    dispatcher = Dispatcher(section.of_function(judge, judge.parse), f"{key}.parse", of_judge=True)
    dispatcher.start()
    try:
        dispatcher.wait_loaded()
        yield read
    finally:
        dispatcher.close()
