"""Named data sets: their repositories and columns on the Hugging Face hub, and the download of their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mugrpo_megatron.data.columns import Columns
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hub import snapshot

PLAIN = Columns("problem", "answer")
PARQUET_BRANCH = "refs/convert/parquet"
"""Branch on which the hub keeps every data set as Parquet files."""


@dataclass(frozen=True, slots=True)
class Preset:
    """How to find and read one data set."""

    repository: str
    columns: Columns = PLAIN
    """A gold that is a worked solution is read for its `####` line or its last box."""
    config: str = "default"
    """Folder of the hub's Parquet branch; `*` takes all."""
    train: str = "train"
    """Split to train on."""
    eval: str = "test"
    """Split to evaluate on."""


_DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
_DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'

PRESETS: dict[str, Preset] = {
    "gsm8k": Preset("openai/gsm8k", Columns("question", "answer"), config="main"),
    "math": Preset("EleutherAI/hendrycks_math", Columns("problem", "solution"), config="*"),
    "deepscaler": Preset("agentica-org/DeepScaleR-Preview-Dataset", eval="train"),
    "dapo-math-17k": Preset(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        Columns("prompt.0.content", "reward_model.ground_truth", _DAPO_PREFIX, _DAPO_SUFFIX),
        eval="train",
    ),
    "amc23": Preset("math-ai/amc23", Columns("question", "answer"), train="test"),
    "amc24": Preset("rawsh/2024_AMC12", eval="train"),
    "aime24": Preset("HuggingFaceH4/aime_2024", eval="train"),
    "aime25": Preset("math-ai/aime25", train="test"),
    "math500": Preset("HuggingFaceH4/MATH-500", train="test"),
    "minerva": Preset("math-ai/minervamath", Columns("question", "answer"), train="test"),
    "olympiadbench": Preset("math-ai/olympiadbench", Columns("question", "final_answer"), train="test"),
}
"""Names that data.train, data.eval and `mugrpo eval --data` take; `NAME@FILE` reads a local copy the same way."""


def download(repository: str, config: str, split: str) -> list[Path]:
    """Parquet files of one split, downloaded or from the local cache; UserError when neither works."""
    name = f"{repository} ({config}, {split})"
    pattern = f"{config}/{split}/*.parquet"
    try:
        folder = snapshot(repository, "dataset", PARQUET_BRANCH, [pattern])
    except ValueError as error:
        raise UserError(
            f"{name} could not be downloaded from the Hugging Face hub ({error}): check the name and the network, "
            "or give a local file, as NAME@FILE for a named data set"
        ) from error
    files = sorted(folder.glob(pattern))
    if not files:
        raise UserError(f"{name} has no Parquet files on the Hugging Face hub: check configuration and split")
    return files
