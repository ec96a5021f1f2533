"""The table of metrics."""

from __future__ import annotations

from collections import Counter

import pytest

from mugrpo_megatron.observe.metrics import KINDS, METRICS, NAMES, ROW_KEYS, Kind, check_metrics


def test_a_name_is_defined_once_for_a_kind_and_is_not_a_place_key() -> None:
    assert max(Counter((metric.kind, metric.name) for metric in METRICS).values()) == 1
    for kind in KINDS:
        assert NAMES[kind].isdisjoint({"kind", "not_finite", *ROW_KEYS[kind]})


def test_held_out_metrics_take_the_name_of_a_set_and_parts_of_the_reward_any_name() -> None:
    sets = ["accuracy/math500", "accuracy/a-test_2", "accuracy/mean", "low/mean", "problems/math500", "tokens"]
    check_metrics("eval", sets)
    check_metrics("stage", ["reward/math", "reward/compute_score.acc"])
    check_metrics("update", ["reward/overlong"])
    undefined: tuple[tuple[Kind, list[str]], ...] = (
        ("eval", ["accuracy", "accuracy/", "accuracy/a/b", "accuracy/a b", "tokens/math500", "pass/math500"]),
        ("eval", ["problems/mean", "reward/own.part"]),
        ("update", ["accuracy/math500"]),
        ("stage", ["reward/", "reward/a/b", "reward/a b"]),
    )
    for kind, names in undefined:
        for name in names:
            with pytest.raises(ValueError, match=name):
                check_metrics(kind, [name])
