"""Three-digit sums alone, out of the bundled task: an easier one, on which other projects report their figures.

python -m run_scripts.study.sums DIR             # writes DIR/train.jsonl and DIR/eval.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mugrpo_megatron.data import arithmetic

TRAIN, EVAL = 50_000, 12_000
"""Problems of the bundled task, of each split, that the sums are picked from."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    splits: tuple[tuple[arithmetic.Split, int], ...] = (("train", TRAIN), ("eval", EVAL))
    for split, count in splits:
        rows = [
            json.dumps({"problem": problem.question, "answer": problem.answer})
            for problem in arithmetic.problems(0, split, count)
            if is_sum(problem.question)
        ]
        (directory / f"{split}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        print(f"{directory / f'{split}.jsonl'}: {len(rows)} problems")


def is_sum(question: str) -> bool:
    """Whether it asks for the sum of two three-digit numbers."""
    left, plus, right = question.rstrip("=").partition("+")
    return bool(plus) and len(left) == len(right) == 3


if __name__ == "__main__":
    main()
