"""`mugrpo sft` on the user's own rows and model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mugrpo_megatron.checks.preflight import check_warm_start
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import Recipe
from tests.tiny import mugrpo, save_model, write_recipe


def test_what_cannot_be_learned_is_told_first(tmp_path: Path) -> None:
    rows = tmp_path / "x.jsonl"
    rows.touch()
    for given, said in (
        ({"sft": {"train": "arithmetic"}}, "is a bundled task"),
        ({"sft": {"train": "no such thing"}}, "is not a file, a hub name"),
        ({"sft": {"train": "y.jsonl"}}, "y.jsonl does not exist"),
        ({"sft": {"train": str(rows)}, "model": {"path": str(tmp_path)}}, "not a Hugging Face checkpoint"),
        ({"data": {"train": "x.jsonl"}}, "rows of prompts and responses with sft.train"),
    ):
        with pytest.raises(UserError, match=said):
            check_warm_start(Recipe.model_validate(given))


@pytest.mark.process
def test_a_model_learns_the_responses_of_rows_and_not_their_prompts(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    rows = [{"prompt": f"{n}?", "response": "yes"} for n in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    sft = {"train": str(tmp_path / "rows.jsonl"), "output": str(out), "lr": 3e-3, "batch": 8, "epochs": 40}
    recipe = write_recipe(tmp_path / "recipe.toml", model, tmp_path / "run", sft=sft)
    said = mugrpo("sft", recipe).stdout
    assert "16 rows, 80 updates" in said
    assert "the first prompt as the model sees it (plain): '0?'" in said
    assert "and its response: 'yes<|im_end|>'" in said
    tokenizer = AutoTokenizer.from_pretrained(out / "hf")
    likely = []
    for directory in (model, out / "hf"):
        policy = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        ids = torch.tensor([tokenizer.encode("7?yes<|im_end|>")])
        with torch.no_grad():
            logprobs = policy(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        likely.append((float(logprobs[1:].exp().min()), float(logprobs[0])))
    (before, _), (after, question) = likely
    assert before < 0.1
    assert after > 0.5  # `yes` and the end are learned
    assert question < -1.0  # and what the prompt says is not
    assert "exists; remove" in mugrpo("sft", recipe).stdout
    assert "another recipe" in mugrpo("sft", recipe, "--set", "sft.epochs=2", code=2).stderr
