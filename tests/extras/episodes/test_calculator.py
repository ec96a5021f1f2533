"""The bundled task: masks of every token against the text, its rows, and what its tool takes."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from mugrpo_megatron.extras.episodes.calculator import demonstrations, value
from mugrpo_megatron.samples import Response
from tests.extras.episodes.fake import TOKENIZER
from tests.extras.episodes.test_episodes import played, recipe_of
from tests.tiny import save_model


def mask_by_text(response: Response) -> list[bool]:
    """The mask by an oracle that only reads: after a turn that ends with a question mark, what the tool says to it.

    A token is a byte here, or the end of a turn.
    """
    text = str(TOKENIZER.decode(response.ids, skip_special_tokens=True))
    mask: list[bool] = []
    place = 0
    while place < len(text):
        mask.append(True)
        place += 1
        if text[place - 1] == "?" and place < len(text):
            asked = text[: place - 1].split("? ")[-1].split(" ")[-1]
            terms = re.fullmatch(r"\d{1,9}(\+\d{1,9})*", asked)
            said = f" {sum(map(int, asked.split('+'))) if terms else 'no sum'} "
            assert text[place : place + len(said)] == said, (text, place)
            mask += [False] * len(said)
            place += len(said)
    return mask + [True] * (len(response.ids) - len(mask))


@pytest.mark.process
def test_the_mask_of_every_token_is_what_the_text_says(tmp_path: Path) -> None:
    """A model that babbles sums, calls and nonsense."""
    draw = random.Random(3)

    def says(context: str) -> str:
        pieces = [draw.choice(["12+7", "3", " ", "x", "\\boxed{4}", "99+1+5"]) for _ in range(draw.randrange(4))]
        return "".join(pieces) + draw.choice(["?", "?", ""])

    recipe = recipe_of(save_model(tmp_path / "model"), "mugrpo_megatron.extras.episodes.calculator:episode")
    found = played(recipe, says, [f"{n}+{n}=" for n in range(10, 42)], n=4)
    turns = 0
    for responses in found.values():
        for response in responses:
            assert not response.episode.failed, response.episode.why
            assert response.episode.mask.tolist() == mask_by_text(response)
            assert not response.logprobs[~response.episode.mask].any()
            assert (response.logprobs[response.episode.mask] < 0).all()
            turns = max(turns, int(response.episode.parts["turns"]))
    assert turns == 4, "several turns are among them"


def test_the_rows_are_right_and_every_fifth_calls() -> None:
    rows = demonstrations(50)
    for place, row in enumerate(rows):
        answer = str(eval(row["prompt"].rstrip("=")))
        call = f"{row['prompt'].rstrip('=')}? {answer} " if place % 5 == 0 else ""
        assert row["response"] == f"{call}\\boxed{{{answer}}}"
    assert json.loads(json.dumps(rows)) == rows


def test_the_tool_adds_and_does_nothing_else() -> None:
    assert value("37+5+10") == "52"
    assert value("7") == "7"
    for other in ("", "2*3", "1e9", "__import__('os')", "1++2", "+1", "9" * 100, "1+"):
        with pytest.raises(ValueError, match="no sum"):
            value(other)
