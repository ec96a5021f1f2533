"""Groups that a generation left unfinished, on disk next to the stage's shards: the tokens sampled so far.

    stages/00003/unfinished-0002.npz      of writer 2; replaced at the end of each generation, removed with the shards

A file says what its tokens were sampled with. A reader with other weights, sampling or engine settings takes nothing
from it; nor from a damaged file, whose tokens are then sampled again. Token ids are kept, never text.
"""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.files.durable import durable_file, remove_leftovers
from mugrpo_megatron.samples import Response

FILES = "unfinished-*.npz"
FORMAT = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """The responses to one prompt, as far as they are sampled; `finish_reason` says which of them are finished."""

    prompt_ids: list[int]
    responses: list[Response]

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return sum(len(response.ids) for response in self.responses)


def unfinished_path(directory: Path, writer: int) -> Path:
    """The file of a writer of the stage in `directory`."""
    return directory / f"unfinished-{writer:04d}.npz"


def write_unfinished(path: Path, groups: Mapping[int, Begun], of: Mapping[str, Any]) -> None:
    """Replace the file by these groups, or remove it where there are none; `of` is what they were sampled with."""
    remove_leftovers(path.parent, path.name)
    if not groups:
        path.unlink(missing_ok=True)
        return
    every = [response for group in groups.values() for response in group.responses]
    head = {
        "format": FORMAT,
        "of": of,
        "groups": list(groups),
        "sizes": [len(group.responses) for group in groups.values()],
        "finish": [response.finish_reason for response in every],
        "version": [response.weight_version for response in every],
    }
    prompts = [np.array(group.prompt_ids, dtype=np.int32) for group in groups.values()]
    arrays = {
        "head": np.frombuffer(json.dumps(head).encode(), dtype=np.uint8),
        **_flat("prompt", prompts),
        **_flat("ids", [response.ids for response in every]),
        **_flat("logprobs", [response.logprobs for response in every]),
        **_optional("kept", [response.kept for response in every]),
        **_optional("routes", [None if one.routes is None else one.routes.transpose(1, 0, 2) for one in every]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with durable_file(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_unfinished(path: Path, of: Mapping[str, Any]) -> dict[int, Begun]:
    """The groups of a file by their index; empty without the file, where it is damaged, or is not `of` the same."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return _groups(dict(arrays), of)  # which checks the sums of all of them
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, EngineFailure) as error:
        log.warning("%s is damaged (%s); its tokens are sampled again", path, error)
        return {}


def _groups(arrays: Mapping[str, np.ndarray], of: Mapping[str, Any]) -> dict[int, Begun]:
    head = json.loads(arrays["head"].tobytes())
    if head["format"] != FORMAT or head["of"] != json.loads(json.dumps(of)):
        return {}
    total = len(head["finish"])
    columns = [_parts(arrays, name) or [None] * total for name in ("ids", "logprobs", "kept", "routes")]
    responses = iter(
        Response(
            ids, logprobs, finish, version, kept=kept, routes=None if routes is None else routes.transpose(1, 0, 2)
        )
        for ids, logprobs, kept, routes, finish, version in zip(*columns, head["finish"], head["version"], strict=True)
    )
    prompts = _parts(arrays, "prompt")
    return {
        group: Begun(prompt.tolist(), [next(responses) for _ in range(size)])
        for group, size, prompt in zip(head["groups"], head["sizes"], prompts, strict=True)
    }


def _flat(name: str, parts: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays one after another, with their lengths; those without any row have no shape to agree on."""
    whole = [part for part in parts if len(part)] or list(parts[:1])
    return {name: np.concatenate(whole), f"{name}_lengths": np.array([len(part) for part in parts])}


def _optional(name: str, parts: Sequence[np.ndarray | None]) -> dict[str, np.ndarray]:
    """The same for arrays that all responses with tokens have, or none."""
    found = [part for part in parts if part is not None]
    if not found:
        return {}
    return _flat(name, [found[0][:0] if part is None else part for part in parts])


def _parts(arrays: Mapping[str, np.ndarray], name: str) -> list[Any]:
    """What `_flat` put together; empty where it was not given anything."""
    if name not in arrays:
        return []
    whole, lengths = arrays[name], arrays[f"{name}_lengths"]
    if lengths.sum() != len(whole):
        raise ValueError(f"{name} has {len(whole)} rows")
    return np.split(whole, np.cumsum(lengths)[:-1])
