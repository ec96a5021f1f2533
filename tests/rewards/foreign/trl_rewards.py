# mypy: disable-error-code="no-untyped-def"
"""Rewards for TRL's GRPOTrainer: `reward_funcs=[correctness, brevity, agreement]`."""

import re
from collections import Counter


def _text(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def correctness(prompts, completions, answer, **kwargs):
    """2 for the right number at the end, 0 otherwise; None where the answer is no number."""
    rewards = []
    for prompt, completion, gold in zip(prompts, completions, answer, strict=True):
        assert prompt, "TRL gives every completion its prompt"
        found = re.findall(r"-?\d+", _text(completion))
        known = re.fullmatch(r"-?\d+", str(gold))
        rewards.append(None if known is None else 2.0 * bool(found and found[-1] == str(gold)))
    return rewards


def brevity(completions, completion_ids, log_metric=None, **kwargs):
    """Minus a tenth for each token."""
    if log_metric is not None:
        log_metric("longest", max(map(len, completion_ids)))
    return [-len(ids) / 10 for ids in completion_ids]


async def agreement(completions, **kwargs):
    """The share of the group that says the same."""
    said = Counter(map(_text, completions))
    return [said[_text(completion)] / len(completions) for completion in completions]
