"""Prompts of a stage as text, if the run's tokenizer is available."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

FILE = "tokenizer.json"


def prompt_texts(prompts: Sequence[Sequence[int]], run_dir: Path, recipe: Mapping[str, Any]) -> list[str]:
    """Each prompt as the model saw it; empty texts where neither the run nor its model has a tokenizer that can."""
    model = recipe.get("model", {}).get("path", "")
    for path in (run_dir / "hf" / FILE, Path(str(model)) / FILE):
        if not path.is_file():
            continue
        try:
            tokenizer = Tokenizer.from_file(str(path))
            return [tokenizer.decode(list(ids), skip_special_tokens=False) for ids in prompts]
        except Exception:  # tokenizers raises bare Exception for a file that is none
            continue
    return ["" for _ in prompts]
