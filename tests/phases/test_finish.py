"""What a run prints at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from mugrpo_megatron.observe.progress import Display
from mugrpo_megatron.phases import finish
from mugrpo_megatron.run.directory import RunDirectory


def test_a_sign_is_a_line_of_its_own_below_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "equal rewards everywhere, " * 5
    summary: dict[str, Any] = {"signs": [{"name": "equal rewards", "text": text, "remedy": "read some"}]}
    monkeypatch.setattr(finish, "summarize", lambda directory: summary)
    monkeypatch.setattr(finish, "summary_table", lambda summary: Table("narrow"))
    console = Console(width=60, record=True)
    finish.show(RunDirectory(tmp_path), Display(console, None))
    assert f"sick? {text}; read some (docs/sick.md)\n" in console.export_text()
