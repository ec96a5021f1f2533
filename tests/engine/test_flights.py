"""Responses in flight: whatever interrupts them, what is continued and what was sampled before make one response."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.engine.queue import Flight, Flights, joined, without_last
from mugrpo_megatron.engine.unfinished import Unfinished
from mugrpo_megatron.engine.wire import Groups, Routed, Sampling, pack
from mugrpo_megatron.samples import UNFINISHED, Problem, Prompt, Response

PROMPT = Prompt(4, Problem("p", "", ""), [1, 2, 3])
ROUTED = Routed(layers=2, chosen=1, experts=4)


def whole(tokens: int) -> Response:
    """A response whose every value names its place."""
    places = np.arange(tokens)
    routes = np.arange(len(PROMPT.ids) + tokens - 1, dtype=np.uint8)
    return Response(
        places.astype(np.int32),
        -places.astype(np.float32),
        "stop",
        3,
        routes=np.stack([routes, routes])[:, :, None],
        kept=np.stack([places, places], 1).astype(np.int32),
    )


def part(of: Response, start: int, end: int) -> Response:
    """The tokens [start, end) as the engine returns them when asked to continue from `start`."""
    assert of.kept is not None
    assert of.routes is not None
    reason = of.finish_reason if end == len(of.ids) else UNFINISHED
    places = len(PROMPT.ids) + end - 1
    return Response(of.ids[start:end], of.logprobs[start:end], reason, 3, of.routes[:, :places], of.kept[start:end])


@given(tokens=st.integers(1, 12), cuts=st.lists(st.integers(1, 12), max_size=4))
def test_a_response_in_parts_is_the_response(tokens: int, cuts: list[int]) -> None:
    of = whole(tokens)
    flight, had = Flight(PROMPT, 1), 0
    group = None
    for end in [*sorted(cut for cut in cuts if cut < tokens), tokens]:
        flight = Flight(PROMPT, 1, group)
        work = flight.work(0)
        had = len(work.begun[0]) if work.begun else 0
        if end > had:
            group = flight.answered([part(of, had, end)])
    assert group is not None
    [response] = group
    for name in ("ids", "logprobs", "kept", "routes"):
        assert np.array_equal(getattr(response, name), getattr(of, name)), name
    assert response.finish_reason == "stop"


def test_the_last_token_of_an_interrupted_response_is_dropped() -> None:
    cut = without_last(part(whole(5), 0, 3))
    assert cut.ids.tolist() == [0, 1]
    assert cut.routes is not None
    assert cut.routes.shape == (2, 3 + 2 - 1, 1)
    assert without_last(whole(5)).ids.tolist() == [0, 1, 2, 3, 4]
    assert joined(part(whole(5), 0, 2), whole(0)).ids.tolist() == [0, 1]


def test_only_what_is_not_finished_is_asked_for(tmp_path: Path) -> None:
    held = Unfinished(tmp_path, 0, {})
    flights = Flights(3, held)
    work, done = flights.begin([PROMPT])
    assert (work[0].n, work[0].begun, done) == (3, None, [])
    answer = [_output(2, "stop"), _output(4, "abort"), _output(1, "abort")]
    assert flights.take_in("groups", _groups(answer)) == []
    [again], done = Flights(3, held).begin([PROMPT])
    assert (again.n, again.begun) == (2, [[7, 7, 7], []])
    flights = Flights(3, held)
    flights.begin([PROMPT])
    [(prompt, responses)] = flights.take_in("groups", _groups([_output(2, "length"), _output(5, "stop")]))
    assert prompt is PROMPT
    assert [(len(one.ids), one.finish_reason) for one in responses] == [(2, "stop"), (5, "length"), (5, "stop")]
    _, [(_, again_whole)] = Flights(3, held).begin([PROMPT])
    assert again_whole == responses, "a group that waits for its score is not sampled again"
    held.stored(PROMPT.index)
    assert len(held) == 0


def test_of_an_engine_that_ended_what_it_told_remains_and_outlives_the_process(tmp_path: Path) -> None:
    held = Unfinished(tmp_path, 1, {"version": 3})
    flights = Flights(2, held)
    flights.begin([PROMPT])
    for tokens in (50, 30):
        flights.take_in("begun", ([1], pack([(0, [_output(tokens, "abort")])], 3, SAMPLING)))
    flights.leave()
    assert held.save(()) == 79
    read = Unfinished(tmp_path, 0, {"version": 3})
    begun = read.begun(PROMPT, 2)
    assert begun is not None
    assert [len(one.ids) for one in begun] == [0, 79]
    assert read.had(PROMPT.index) == 79
    other = Prompt(4, Problem("other", "", ""), [1, 2, 4])
    assert read.begun(other, 2) is None, "another order of the problems"
    assert read.begun(PROMPT, 3) is None
    assert read.save(()) == 0, "the other writer's file holds it"
    assert len(Unfinished(tmp_path, 0, {"version": 4})) == 0
    assert len(Unfinished(tmp_path, 0, {"version": 3}, stored=[4])) == 0


def test_an_aborted_output_counts_as_far_as_all_that_was_asked_for_is_there() -> None:
    routed = Sampling(1.0, 1.0, 9, (), ROUTED)
    waiting = {"finish_reason": {"type": "abort"}, "output_token_logprobs": [(-1.0, 7)] * 3}
    [(_, [response])] = pack([(0, [{"output_ids": [7] * 3, "meta_info": waiting}])], 3, routed).unpack()
    assert (len(response.ids), response.finish_reason) == (0, UNFINISHED)
    [(_, [response])] = pack([(0, [{"output_ids": [7] * 5, "meta_info": waiting}])], 3, SAMPLING).unpack()
    assert len(response.ids) == 3, "fewer logprobs than ids"


SAMPLING = Sampling(1.0, 1.0, 9, (), unfinished=True)


def _output(tokens: int, reason: str) -> dict[str, Any]:
    facts = {"output_token_logprobs": [(-1.0, 7)] * tokens, "finish_reason": {"type": reason}}
    return {"output_ids": [7] * tokens, "meta_info": facts}


def _groups(outputs: list[dict[str, Any]]) -> Groups:
    return pack([(0, outputs)], 3, SAMPLING)
