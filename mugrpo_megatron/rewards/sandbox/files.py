"""Writes the files of a jail."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_files(root: str, files: Mapping[str, str]) -> None:
    """Write each file, `/`-separated path -> text, below `root`."""
    for name, text in files.items():
        path = Path(root + name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
