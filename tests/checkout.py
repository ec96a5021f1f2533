"""Where this checkout is: every test runs in a directory of its own, so no path is relative to it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
