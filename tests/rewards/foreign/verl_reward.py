# mypy: disable-error-code="no-untyped-def"
"""A reward for verl: `custom_reward_function.path=verl_reward.py`."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The score, whether it is right, and what was found, as verl logs them."""
    found = solution_str.strip().split("=")[-1].strip()
    right = found == str(ground_truth)
    easy = bool(extra_info and extra_info.get("level") == "easy")
    return {"score": (1.0 if easy else 3.0) * right - 0.5 * (data_source != "sums"), "acc": right, "pred": found}
