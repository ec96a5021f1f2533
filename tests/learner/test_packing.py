"""Packing: nothing lost, nothing doubled, balanced, full."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.learner.packing import TokenSequence, pack, plan

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=200)


@given(LENGTHS, st.integers(1, 4), st.integers(1, 2000), st.sampled_from([1, 2, 8]), st.sampled_from([1, 2, 4]))
def test_every_sequence_is_packed_once_and_fits(
    lengths: list[int], dp_size: int, budget: int, multiple: int, count_multiple: int
) -> None:
    made = plan(lengths, dp_size, budget, multiple, count_multiple)
    bins = [indices for rank in made.micro_batches for indices in rank]
    assert sorted(i for indices in bins for i in indices) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in indices) for indices in bins) <= made.length
    assert made.length < max(budget, max(lengths)) + multiple
    assert made.length % multiple == 0
    assert len({len(rank) for rank in made.micro_batches}) == 1
    assert len(made.micro_batches[0]) % count_multiple == 0
    assert made.efficiency == sum(lengths) / (made.length * len(bins))


@given(st.integers(0, 2**32), st.integers(1, 4), st.floats(1.05, 3.0))
def test_heavy_tailed_lengths_fill_at_least_95_percent(seed: int, dp_size: int, tail: float) -> None:
    """Responses drawn from a Pareto tail, cut at 4k tokens; micro-batches of four times the longest."""
    drawn = 50 * (1 + np.random.default_rng(seed).pareto(tail, 256))
    lengths = [int(n) for n in np.minimum(drawn, 4096)]
    assert plan(lengths, dp_size, 4 * max(lengths)).efficiency >= 0.95


@given(st.lists(st.tuples(st.integers(1, 9), st.lists(st.booleans(), max_size=9)), max_size=12), st.integers(0, 30))
def test_a_packed_row_says_what_the_sequences_say(sizes: list[tuple[int, list[bool]]], padding: int) -> None:
    """And trains the tokens of their masks."""
    rng = np.random.default_rng(0)
    sequences = [
        TokenSequence(rng.integers(1, 99, n + len(mask)), n, mask=np.array(mask, dtype=bool)) for n, mask in sizes
    ]
    length = sum(len(s.ids) for s in sequences) + padding or 1
    batch = pack(sequences, list(range(len(sequences))), length, torch.device("cpu"))
    assert batch.ids.shape == batch.positions.shape == (1, length)
    assert batch.targets.tolist() == [t for s in sequences for t in s.ids[s.prompt :][s.mask]]
    assert batch.lengths.tolist() == [sum(mask) for _, mask in sizes]
    assert batch.ids[0, batch.rows + 1].tolist() == batch.targets.tolist()
    cu = batch.packing.cu_seqlens_q
    assert cu[-1] == length
    assert (batch.positions[0] == 0).nonzero()[:, 0].tolist() == cu[:-1].tolist()
    for i, sequence in enumerate(sequences):
        assert batch.ids[0, cu[i] : cu[i + 1]].tolist() == sequence.ids.tolist()


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12), st.sampled_from([2, 3, 4]))
def test_context_ranks_hold_a_row_together(sizes: list[tuple[int, int]], cp_size: int) -> None:
    """Gathered rank after rank, their rows are the row; their trained tokens are all trained tokens, once."""
    rng = np.random.default_rng(0)
    sequences = [TokenSequence(rng.integers(1, 99, prompt + response), prompt) for prompt, response in sizes]
    length = -(-sum(len(s.ids) for s in sequences) // (2 * cp_size)) * 2 * cp_size
    every, cpu = list(range(len(sequences))), torch.device("cpu")
    alone = pack(sequences, every, length, cpu)
    batches = [pack(sequences, every, length, cpu, rank, cp_size) for rank in range(cp_size)]
    gathered = torch.cat([part.ids[0] for part in batches])
    assert sorted(gathered.tolist()) == sorted(alone.ids[0].tolist())
    assert sorted(i for part in batches for i in part.indices) == every
    result = {}
    for part in batches:
        for index, targets, rows in zip(
            part.indices, part.targets.split(part.lengths.tolist()), part.rows.split(part.lengths.tolist()), strict=True
        ):
            sequence = sequences[index]
            assert targets.tolist() == sequence.ids[sequence.prompt :].tolist()
            assert gathered[rows].tolist() == sequence.ids[sequence.prompt - 1 : -1].tolist()[: len(targets)]
            result[index] = True
    assert len(result) == len(sequences)
    for part in batches:
        split = part.packing.split
        assert sum(split.queries) == length // cp_size
        last_of_parts = np.cumsum(split.keys) - 1
        rows = torch.from_numpy(np.cumsum(split.queries) - 1)
        assert gathered[split.key_rows[last_of_parts]].tolist() == part.ids[0, rows].tolist()
        assert (torch.tensor(split.keys) == part.positions[0, rows] + 1).all()
