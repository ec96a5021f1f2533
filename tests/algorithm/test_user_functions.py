"""The user's own diagnostics: the page's example, what they are given, and answers that are none."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from mugrpo_megatron.algorithm.policy_loss import policy_loss
from mugrpo_megatron.algorithm.surrogates import SurrogateLoss, TokenBatch
from mugrpo_megatron.errors import FunctionFailure
from mugrpo_megatron.observe.metrics import is_defined
from mugrpo_megatron.recipe import ObjectiveSection
from tests.algorithm.batches import Batch, flat, random_batch
from tests.checkout import ROOT

HERE = "tests.algorithm.test_user_functions"


def metrics_of(batch: Batch, diagnostics: str) -> dict[str, float]:
    config = ObjectiveSection(name="grpo", diagnostics=diagnostics)
    loss, metrics = policy_loss(batch.leaf(), batch.inputs(config))
    assert loss.requires_grad, "whatever the function does, the loss keeps its gradient"
    return metrics


def looks(tokens: TokenBatch, config: ObjectiveSection) -> Mapping[str, object]:
    assert not any(t.requires_grad for t in (tokens.logprobs, tokens.log_ratio, tokens.ratio))
    return {"mean_ratio": tokens.ratio.mean(), "responses": tokens.segments.responses, "nan": float("nan")}


def answers(value: object) -> Callable[[TokenBatch, ObjectiveSection], object]:
    """A user's function that returns `value`, or raises it."""

    def function(tokens: TokenBatch, config: ObjectiveSection) -> object:
        if isinstance(value, BaseException):
            raise value
        return value

    return function


def test_numbers_are_logged_under_their_names() -> None:
    result = metrics_of(random_batch(1, [5, 0, 8]), f"{HERE}:looks")
    assert result["user/mean_ratio"] == pytest.approx(result["ratio_mean"])
    assert result["user/responses"] == 3.0
    assert result["user/nan"] != result["user/nan"]
    assert all(is_defined("update", name) for name in result)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (KeyError("lost"), "failed: KeyError: 'lost'"),
        ([1.0], "returned list, not a mapping"),
        ({"a/b": 1.0}, "returned the name 'a/b'; a name may have letters"),
        ({"ratios": torch.ones(2)}, "returned ratios as Tensor; it has to be one number"),
    ],
    ids=str,
)
def test_what_is_no_diagnostic_is_told_in_a_sentence(
    answer: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[HERE], "chosen", answers(answer))
    with pytest.raises(FunctionFailure, match=words):
        metrics_of(random_batch(1, [5, 0, 8]), f"{HERE}:chosen")


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(ROOT, "docs/own-functions.md").read_text(encoding="utf-8").split("## Your own diagnostics")[1]
    code = page.split("```python\n")[1].split("```")[0].replace("1000", "3")
    (tmp_path / "my_losses_too.py").write_text(code, encoding="utf-8")
    fields = tomllib.loads(page.split("```toml\n")[1].split("```")[0])["objective"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    batch = random_batch(1, [5, 0, 8])
    result = metrics_of(batch, fields["diagnostics"].replace("my_losses", "my_losses_too"))
    logprobs, behaviour = flat(batch.logprobs), flat(batch.behaviour)
    late = batch.segments(ObjectiveSection()).positions >= 3
    assert result["user/tokens_after_3"] == 2 + 5
    assert result["user/drift_after_3"] == pytest.approx((logprobs - behaviour)[late].square().mean().item())


def surrogate(kind: str) -> Callable[[TokenBatch, ObjectiveSection], object]:
    """A user's token loss that is right, or wrong in one way."""

    def loss(tokens: TokenBatch, config: ObjectiveSection) -> object:
        value = -tokens.ratio * tokens.advantage
        clipped = torch.zeros_like(value, dtype=torch.bool)
        match kind:
            case "exits":
                raise SystemExit(0)
            case "raises":
                raise KeyError("lost")
            case "none":
                return None
        wrong = {"scalar": value.mean(), "half": value.half(), "double": value.repeat(2), "detached": value.detach()}
        return SurrogateLoss(wrong.get(kind, value), clipped if kind != "floats" else value)

    return loss


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("scalar", "returned loss as torch.float64 \\[\\]; it has to be torch.float64 \\[13\\]"),
        ("half", "returned loss as torch.float16"),
        ("double", "returned loss as torch.float64 \\[26\\]"),
        ("detached", "without a gradient"),
        ("floats", "returned clipped as torch.float64"),
        ("none", "returned NoneType, not SurrogateLoss"),
        ("exits", "failed: SystemExit: 0"),
        ("raises", "failed: KeyError: 'lost'"),
    ],
)
def test_an_own_loss_is_what_it_says(kind: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """N8, N13, N14: a scalar trained silently with another loss, and sys.exit ended the run with code 0."""
    config = ObjectiveSection(surrogate=f"{HERE}:chosen")
    batch = random_batch(1, [5, 0, 8])
    monkeypatch.setattr(sys.modules[HERE], "chosen", surrogate("right"))
    policy_loss(batch.leaf(), batch.inputs(config))[0].backward()
    monkeypatch.setattr(sys.modules[HERE], "chosen", surrogate(kind))
    with pytest.raises(FunctionFailure, match=words):
        policy_loss(batch.leaf(), batch.inputs(config))


def chosen(tokens: TokenBatch, config: ObjectiveSection) -> object:
    """Replaced by each test."""
    raise NotImplementedError
