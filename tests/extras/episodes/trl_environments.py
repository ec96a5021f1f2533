"""Environments in TRL's convention (`environment_factory`), after the shape of its documented examples."""

from __future__ import annotations

from typing import Any


class EchoEnvironment:
    def __init__(self) -> None:
        self.reward = 0.0

    def reset(self, **kwargs: Any) -> str | None:
        self.columns = sorted(kwargs)
        self.reward = 0.0
        return " Echo it."

    def echo(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        if message == "stop":
            raise ValueError("Game over.")
        self.reward = len(message) / 10
        return message

    def _private(self) -> None: ...
