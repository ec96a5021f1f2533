"""The keys, values and names of earlier versions' recipes that are gone, and what a recipe with one of them should do.

The recipe.toml in a run directory has every key. So that a later version can continue the run, a recipe may still have
a removed key if its value is the default that it had: without the key the run does the same. CHANGELOG.md lists the
same names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mugrpo_megatron.recipe.scoring import GYM_REWARD


class RemovedKey(NamedTuple):
    """A key that recipes no longer have."""

    default: object
    """The value with which a recipe may still have the key."""
    since: str
    """Day of the removal."""
    why: str
    instead: str
    """The way out for a recipe with another value."""


class RemovedValue(NamedTuple):
    """A value that a key of the recipe no longer takes."""

    since: str
    """Day of the removal."""
    why: str
    instead: str
    """The way out for a recipe with the value."""


OBJECTIVES_JUDGED = "28 November 2026"
"""Day of the measured comparison of objectives, after which those that lost were removed."""
KEYS = {
    "optimizer.ess_power": RemovedKey(
        0.0, OBJECTIVES_JUDGED, "no measurement favoured it", "remove it and lower optimizer.lr"
    ),
    "learner.flash_attention": RemovedKey(
        "fastest",
        OBJECTIVES_JUDGED,
        "the fastest installed attention is always taken",
        "remove it, and uninstall flash_attn_interface to train with torch's attention",
    ),
}
"""`section.key` -> the removed key."""
VALUES = {
    ("objective.name", "opsm"): RemovedValue(
        OBJECTIVES_JUDGED, "it lost to grpo", "take grpo; a `surrogate` of yours can drop responses"
    ),
    ("objective.name", "geo_rs"): RemovedValue(
        OBJECTIVES_JUDGED, "it lost to grpo", "take seq_mis, which drops responses by their ratio"
    ),
    ("objective.name", "dppo_kl"): RemovedValue(OBJECTIVES_JUDGED, "it lost to dppo", "take dppo"),
    ("objective.surrogate", "dppo_kl"): RemovedValue(OBJECTIVES_JUDGED, "it lost to dppo", "take dppo"),
    ("objective.reject", "negative_mean"): RemovedValue(OBJECTIVES_JUDGED, "it lost to grpo", "take sequence"),
    ("objective.reject", "sequence_mean"): RemovedValue(OBJECTIVES_JUDGED, "it lost to grpo", "take sequence"),
}
"""(`section.key`, value) -> the removed value."""
RENAMED = {("reward.function", "mugrpo_megatron.extras.reasoning_gym.task_reward:task_reward"): GYM_REWARD}
"""(`section.key`, former value) -> the value that means the same now."""


def as_now(table: dict[str, Any]) -> dict[str, Any]:
    """Returns the tables of a recipe in today's form: without removed keys at their former default, and with today's
    names."""
    result = dict(table)
    for key, removed in KEYS.items():
        section, name = key.split(".")
        if _holds(result.get(section), name, removed.default):
            result[section] = {other: value for other, value in result[section].items() if other != name}
    for (key, former), value in RENAMED.items():
        section, name = key.split(".")
        if _holds(result.get(section), name, former):
            result[section] = {**result[section], name: value}
    return result


def _holds(section: object, name: str, value: object) -> bool:
    if not isinstance(section, dict) or name not in section:
        return False
    given = section[name]
    return isinstance(given, bool) == isinstance(value, bool) and bool(given == value)  # in Python False == 0


def removal(key: str, value: object) -> str | None:
    """Returns the sentence about a removed key, or about a value that the key no longer takes; None for a key and value
    that are valid or were never valid."""
    if removed := KEYS.get(key):
        return f"this key was removed on {removed.since}, because {removed.why}; {removed.instead}"
    if isinstance(value, str) and (gone := VALUES.get((key, value))):
        return f"this value was removed on {gone.since}, because {gone.why}; {gone.instead}"
    return None
