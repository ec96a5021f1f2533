"""Responses that a generation leaves unfinished, and how a later one continues them from their tokens.

A continued response is asked for as prompt + sampled ids, with the tokens that are left of its limit. It keeps the
log-probabilities that its first part was sampled with. The next token is sampled given the ones before it, whatever
has sampled these, so the response comes from the same distribution as an uninterrupted one; it is another sample than
that would have been. To throw long responses away and sample others in their place would favour short ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.samples import Prompt, Response
from mugrpo_megatron.stages.unfinished import FILES, Begun, read_unfinished, unfinished_path, write_unfinished


def sampled_with(recipe: Recipe, sampling: Sampling, version: int) -> dict[str, Any]:
    """What has to be the same for a response to be continued: weights, sampling, and the engine's arithmetic."""
    engine = recipe.engine
    return {
        "version": version,
        "sampling": asdict(sampling),
        "n": recipe.rollout.responses_per_prompt,
        "dtype": recipe.model.dtype,
        "device": recipe.run.device,
        "engine": [engine.tensor, engine.nodes, engine.quantization, engine.attention_backend, dict(engine.extra)],
    }


def continues(recipe: Recipe, sampling: Sampling) -> bool:
    """Whether unfinished responses can be continued.

    A stop text may begin before the cut and end after it, where SGLang would not see it; speculative decoding may add
    several tokens to an aborted response that it has not looked at. Responses with random streams of their own are
    sampled again from the start: the run promises the same bits.
    """
    return not sampling.stop and sampling.stream is None and not recipe.engine.extra.get("speculative_algorithm")


class Unfinished:
    """The groups of a stage of which there are tokens and no row of the stage yet, by their index.

    A group stays here until it is stored, finished or not: one that waits for its score is not sampled twice.
    """

    def __init__(self, directory: Path, writer: int, of: Mapping[str, Any], stored: Collection[int] = ()) -> None:
        """Read what all writers of the stage in `directory` left that is not `stored`, sampled with the same `of`."""
        self._path, self._of = unfinished_path(directory, writer), of
        self._groups: dict[int, Begun] = {}
        self._own: set[int] = set()
        """Those that this writer has on disk or has worked on, and so writes."""
        for path in sorted(directory.glob(FILES)):
            for index, group in read_unfinished(path, of).items():
                if path == self._path:
                    self._own.add(index)
                if index not in self._groups or group.tokens > self._groups[index].tokens:
                    self._groups[index] = group
        for index in stored:
            self._groups.pop(index, None)
        self._had = {index: group.tokens for index, group in self._groups.items()}

    @property
    def tokens(self) -> int:
        """Response tokens of all groups."""
        return sum(group.tokens for group in self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)

    def begun(self, prompt: Prompt, n: int) -> list[Response] | None:
        """What there is of the `n` responses to a prompt; None for another prompt of the same index."""
        group = self._groups.get(prompt.index)
        if group is None or group.prompt_ids != prompt.ids or len(group.responses) != n:
            return None
        return group.responses

    def put(self, index: int, group: Begun) -> None:
        """Hold a group as far as it is sampled."""
        self._groups[index] = group
        self._own.add(index)

    def had(self, index: int) -> int:
        """Response tokens of the group that were there from the start."""
        return self._had.get(index, 0)

    def stored(self, index: int) -> None:
        """The group is a row of the stage now."""
        self._groups.pop(index, None)

    def save(self, stored: Collection[int]) -> int:
        """Write what this writer has sampled of groups that are not `stored`, durably; how many tokens these are."""
        own = {index: self._groups[index] for index in sorted(self._own - set(stored)) if index in self._groups}
        write_unfinished(self._path, own, self._of)
        return sum(group.tokens for group in own.values())
