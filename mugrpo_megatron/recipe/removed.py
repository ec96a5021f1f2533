"""Keys, values and names that recipes of earlier versions hold, and what each of them means now.

The recipe.toml in a run directory holds every key. So that a run continues with a later version, a key that was removed
may still stand in a recipe at the default it had: what remains does the same. CHANGELOG.md lists the same names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mugrpo_megatron.recipe.scoring import GYM_REWARD


class RemovedKey(NamedTuple):
    """A key that recipes no longer have."""

    default: object
    """The value at which a recipe may still hold the key."""
    since: str
    """Day of the removal."""
    why: str
    instead: str
    """What a recipe with another value can do."""


class RemovedValue(NamedTuple):
    """A value that a key of the recipe no longer takes."""

    since: str
    """Day of the removal."""
    why: str
    instead: str
    """What a recipe with the value can do."""


OBJECTIVES_JUDGED = "28 November 2026"
"""The day on which the measured comparison of objectives removed those that lost."""
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
"""(`section.key`, former value) -> the value of the same meaning."""


def as_now(table: dict[str, Any]) -> dict[str, Any]:
    """Returns the tables of a recipe without removed keys that hold their former default, and with today's names."""
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
    return isinstance(given, bool) == isinstance(value, bool) and bool(given == value)  # Python counts False as 0


def removal(key: str, value: object) -> str | None:
    """Returns what to say of a recipe that holds `value` at `key`; None where neither was removed."""
    if removed := KEYS.get(key):
        return f"this key was removed on {removed.since}, because {removed.why}; {removed.instead}"
    if isinstance(value, str) and (gone := VALUES.get((key, value))):
        return f"this value was removed on {gone.since}, because {gone.why}; {gone.instead}"
    return None
