# mypy: disable-error-code="no-untyped-def"
"""A reward for slime: `--custom-rm-path slime_reward.reward`, and one for `--group-rm`."""

import asyncio


async def reward(args, sample, **kwargs):
    """1 for the label, and the metadata's bonus."""
    await asyncio.sleep(0)
    return float(sample.response == sample.label) + sample.metadata.get("bonus", 0.0)


async def of_group(args, samples, **kwargs):
    """The rank of each response's length."""
    lengths = sorted(sample.response_length for sample in samples)
    return [lengths.index(sample.response_length) for sample in samples]
