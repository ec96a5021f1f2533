"""The options of `--server`, and the check that a recipe needs nothing that servers lack. Nothing slow is imported."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.servers.address import KEY, check_address
from mugrpo_megatron.recipe import Recipe


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the command line says about servers."""

    given: tuple[str, ...]
    """URLs, and `@FILE` for those in a file, one a line."""
    timeout_s: float
    """Most seconds that a server may take for the responses to one prompt."""
    patience_s: float
    """Seconds without an answer from any server, after which the run ends."""

    def urls(self) -> list[str]:
        """The addresses of all servers at this moment, each once; UserError for an address that cannot be used.

        A file may be missing: the jobs that serve may not have written it yet.
        """
        texts: list[str] = []
        for text in self.given:
            path = Path(text[1:])
            if not text.startswith("@"):
                texts.append(text)
            elif path.exists():
                texts += [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        key = os.environ.get(KEY)
        return list(dict.fromkeys(check_address(text, key) for text in texts if text))


def server_options(urls: Sequence[str], timeout_s: float, patience_s: float) -> ServerOptions:
    """The options of a command line; UserError for an address or a number that cannot be used."""
    for name, seconds in (("timeout", timeout_s), ("patience", patience_s)):
        if not (math.isfinite(seconds) and seconds > 0):
            raise UserError(f"--{name} {seconds:g}: give a finite number of seconds above 0")
    options = ServerOptions(tuple(urls), timeout_s, patience_s)
    options.urls()  # reports a mistake in an address before anything slow starts
    return options


def check_servers(recipe: Recipe) -> None:
    """Raise UserError for a recipe that needs more of an engine than a server's protocol has."""
    rollout = recipe.rollout
    if rollout.episodes:
        raise UserError(
            "rollout.function, rollout.agent: an episode has several requests, and `--server` sends one for each "
            "prompt; leave out `--server`, and this run's own engines generate"
        )
    if rollout.truncates:
        raise UserError(
            f"rollout.top_k = {rollout.top_k}, rollout.top_p = {rollout.top_p:g}: servers do not say which tokens "
            "could be drawn, so ratios would be wrong; set top_k = 0 and top_p = 1"
        )
    if recipe.learner.routing_replay == "rollout":
        raise UserError('learner.routing_replay = "rollout": servers return no experts; set it to "learner"')
