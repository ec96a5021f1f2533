"""The table of metrics and the page made from it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mugrpo_megatron.observe.metrics import KINDS, METRICS, NAMES, ROW_KEYS, check_metrics
from run_scripts.metrics_page import markdown

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_page_is_generated_from_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown()


def test_a_name_is_defined_once_for_a_kind_and_is_not_a_place_key() -> None:
    assert max(Counter((metric.kind, metric.name) for metric in METRICS).values()) == 1
    for kind in KINDS:
        assert NAMES[kind].isdisjoint({"kind", "not_finite", *ROW_KEYS[kind]})


def test_a_held_out_metric_takes_the_name_of_any_set_and_nothing_else() -> None:
    check_metrics(
        "eval", ["accuracy/math500", "accuracy/a-test_2", "accuracy/mean", "low/mean", "problems/math500", "tokens"]
    )
    undefined = ("accuracy", "accuracy/", "accuracy/a/b", "accuracy/a b", "tokens/math500", "pass/math500")
    for name in (*undefined, "problems/mean"):
        with pytest.raises(ValueError, match=name):
            check_metrics("eval", [name])
    with pytest.raises(ValueError, match="accuracy/math500"):
        check_metrics("update", ["accuracy/math500"])


def test_a_part_of_the_reward_takes_any_name() -> None:
    check_metrics("stage", ["reward/math", "reward/compute_score.acc"])
    check_metrics("update", ["reward/overlong"])
    for name in ("reward/", "reward/a/b", "reward/a b"):
        with pytest.raises(ValueError, match=name):
            check_metrics("stage", [name])
    with pytest.raises(ValueError, match=r"reward/own\.part"):
        check_metrics("eval", ["reward/own.part"])
