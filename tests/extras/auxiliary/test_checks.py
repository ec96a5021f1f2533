"""What is refused of auxiliary models before anything starts, each in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mugrpo_megatron.cli import main
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.auxiliary import checks
from mugrpo_megatron.extras.auxiliary.checks import check_auxiliaries
from mugrpo_megatron.extras.auxiliary.models import LAST_NORM, make_divider, teacher_recipe, temperature_hook
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.load import validate
from mugrpo_megatron.weights.families import FAMILIES
from tests.refusals import refuses
from tests.tiny import save_model, write_recipe

PARSE = "tests.extras.auxiliary.parsing:score"


def recipe(policy: Path, teacher: Path, engine: dict[str, Any] | None = None, **rollout: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"path": policy, "dtype": "float32"},
            "data": {"max_prompt_tokens": 32},
            "rollout": {"max_response_tokens": 8, **rollout},
            "objective": {"teacher": "big"},
            "auxiliary": {"big": {"model": teacher, "engine": engine or {}}},
        }
    )


def test_a_teacher_with_the_same_vocabulary_is_fine(model: Path) -> None:
    lines: list[str] = []
    check_auxiliaries(recipe(model, model, temperature=0.5), lines.append)
    assert lines == [f"auxiliary model: big, qwen2 ({model})"]


def test_another_vocabulary(model: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other")
    path = other / "tokenizer.json"
    table = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = table["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    path.write_text(json.dumps(table), encoding="utf-8")
    with pytest.raises(UserError, match=r"has another vocabulary than .* \(4 entries differ, the first is 'A'"):
        check_auxiliaries(recipe(model, other), print)


@pytest.mark.parametrize("size", [0, 100, -1])
def test_weights_that_are_cut_are_refused(model: Path, tmp_path: Path, size: int) -> None:
    other = save_model(tmp_path / "other")
    path = other / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:size])
    refuses(r"big\.model = .*model\.safetensors is truncated", check_auxiliaries, recipe(model, other), print)


def test_a_config_of_another_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 999}))
    refuses(r"vocab_size 999, and model\.safetensors has 272 rows", check_auxiliaries, recipe(model, other), print)


def test_a_family_that_no_library_names_is_refused(model: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "evil"}))
    with pytest.raises(
        UserError, match=r"big\.model = .*: neither SGLang nor transformers has a model of model_type 'evil'"
    ):
        check_auxiliaries(recipe(model, other), print)
    for known in FAMILIES:
        checks._check_family({"model_type": known}, "here")


def dry_run(path: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """What the command says last beside the recipe."""
    assert main(["train", str(path), "--dry-run"]) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if code or "auxiliary model: " in line]
    return lines[-1].removeprefix("mugrpo: ")


def test_a_dry_run_checks_guests(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each mistake ends it with one sentence and code 2; of a model that is not here it says so."""
    question = tmp_path / "question.j2"
    question.write_text("{{ response }}", encoding="utf-8")

    def written(auxiliary: dict[str, Any], **judge: Any) -> Path:
        quality = {"function": "judge", "model": "big", "prompt": str(question), "parse": PARSE, **judge}
        functions = {"math": {"function": "math"}, "quality": {"max_tokens": 8, **quality}}
        return write_recipe(
            tmp_path / "r.toml",
            model,
            tmp_path / "run",
            objective={"teacher": "big"},
            reward={"functions": functions},
            auxiliary={"big": auxiliary},
            eval={"every_stages": 0},
        )

    here = {"model": str(model)}
    assert dry_run(written(here), capsys) == f"auxiliary model: big, qwen2 ({model})"
    elsewhere = {"model": "nobody/none"}
    for absent in ("nobody/none", str(tmp_path / "none")):
        assert dry_run(written({"model": absent}), capsys).endswith(f"not on this machine, so not checked: {absent}")
    for auxiliary, judge, words in (
        ({"model": str(tmp_path)}, {}, "auxiliary.big.model = "),
        ({**here, "engine": {"tensors": 2}}, {}, "engine.tensors is not a key of [engine]"),
        ({**here, "engine": {"extra": {"dtype": "bfloat16"}}}, {}, "engine.extra.dtype"),
        ({**here, "engine": {"nodes": 2}}, {}, "auxiliary.big.engine.nodes = 2"),
        (elsewhere, {"prompt": str(tmp_path / "none.j2")}, "quality.prompt = "),
        (elsewhere, {"parse": "tests.extras.auxiliary.parsing:none"}, "cannot be loaded"),
        (here, {"max_tokens": 2000}, "quality.max_tokens = 2000 leaves no room"),
        (here, {"model": "other"}, "there is no such auxiliary model"),
    ):
        said = dry_run(written(auxiliary, **judge), capsys, code=2)
        assert words in said
    assert not (tmp_path / "run").exists()


def test_names_without_a_auxiliary_and_auxiliaries_without_work() -> None:
    with pytest.raises(
        UserError, match=r"objective\.teacher = 'big': there is no such auxiliary model; add \[auxiliary\.big\]"
    ):
        validate({"objective": {"teacher": "big"}}, "recipe")
    with pytest.raises(UserError, match=r"auxiliary\.big: neither objective\.teacher nor a judge names it"):
        validate({"auxiliary": {"big": {"model": "m"}}}, "recipe")
    refuses(r"teacher_coef.*needs a teacher", validate, {"objective": {"teacher_coef": 1.0}}, "recipe")
    with pytest.raises(UserError, match=r"`auxiliary\.big\.modell` is not a recipe key; did you mean"):
        validate({"auxiliary": {"big": {"modell": "m"}}}, "recipe")


def test_a_auxiliaries_engine_loads_its_own_weights_at_the_rollouts_temperature(model: Path) -> None:
    of_policy = recipe(model, model, {"memory_fraction": 0.9}, temperature=0.5, stop=["\n"], function="play:episode")
    own = teacher_recipe(of_policy, "big", model)
    assert own.engine.memory_fraction == 0.9
    assert own.engine.extra == {"forward_hooks": temperature_hook(0.5)}
    assert own.engine.quantization == "none"
    assert own.rollout.stop == []
    assert own.rollout.function is None, "an auxiliary model plays no episodes"
    assert teacher_recipe(recipe(model, model), "big", model).engine.extra == {}


def test_the_hook_divides_logits() -> None:
    """As SGLang's models call their last norm: with a residual, or alone."""
    (hook,) = temperature_hook(0.5)
    assert hook["target_modules"] == [LAST_NORM]
    norm = torch.nn.Identity()
    norm.register_forward_hook(make_divider(hook["config"]))
    assert norm(torch.ones(2)).tolist() == [2.0, 2.0]
    pair = torch.nn.Identity()
    pair.register_forward_hook(make_divider(hook["config"]))
    hidden, residual = pair((torch.ones(2), torch.ones(2)))
    assert (hidden.tolist(), residual.tolist()) == ([2.0, 2.0], [1.0, 1.0])
