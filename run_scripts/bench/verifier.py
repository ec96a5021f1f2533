"""Measures the verifier: responses per second, and the cost of answers that are made to break it.

    PYTHONPATH=. python run_scripts/bench/verifier.py --problems math500.jsonl gsm8k_test.jsonl [--cases labelled.jsonl]

Problems are rows with `answer`. Each has eight responses: its gold, the gold spelled differently, and golds of other
problems. Labelled cases are rows {"pred", "gold", "equal"}. `math-verify alone` scores the same normal responses with
math-verify's `parse` and `verify` in a pool of as many processes, which parse each gold once for its eight responses.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from multiprocessing import get_context
from pathlib import Path

import psutil
from math_verify import parse, verify

from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.pool import Verifier
from tests.rewards.hostile import hostile_answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=Path, nargs="+", required=True)
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--normal", type=int, default=5000)
    parser.add_argument("--hostile", type=int, default=500)
    options = parser.parse_args()
    section = RewardSection(workers=options.workers)
    golds = [str(row["answer"]) for path in options.problems for row in _rows(path)]
    random.Random(0).shuffle(golds)
    normal = _responses(golds, options.normal)
    hostile = [(f"\\boxed{{{answer}}}", gold) for answer, gold in hostile_answers(options.hostile)]
    mixed = [*normal, *hostile]
    random.Random(1).shuffle(mixed)
    if options.cases:
        _label(section, options.cases)
    alone = _measure("normal answers", section, normal)
    together = _measure("the same, mixed with hostile answers", section, mixed)
    bare = _math_verify(normal, options.workers)
    print(f"math-verify alone: {bare:.2f} s, {bare / alone:.1f} times the verifier's")
    print(f"hostile answers cost {together - alone:.2f} s; twice the normal time is {2 * alone:.2f} s")


def _rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _responses(golds: list[str], count: int) -> list[tuple[str, str]]:
    """(response, gold), eight to a gold."""
    rng = random.Random(0)
    made = []
    for gold in golds:
        others = rng.sample(golds, 3)
        spelled = (gold.replace("\\frac", "\\dfrac") + " ", f"x = {gold}")
        for answer in (gold, gold, gold, *spelled, *others):
            made.append((f"First we simplify. Then the rest follows.\n\nSo we get $\\boxed{{{answer}}}$.", gold))
    if len(made) < count:
        raise SystemExit(f"{count} normal responses need {count // 8} problems, there are {len(golds)}")
    return made[:count]


def _label(section: RewardSection, path: Path) -> None:
    cases = _rows(path)
    with Verifier(section) as verifier:
        scores = verifier.score([str(case["pred"]) for case in cases], [str(case["gold"]) for case in cases])
    right = sum(bool(score.reward) == case["equal"] for score, case in zip(scores, cases, strict=True))
    accepted = sum(bool(score.reward) and not case["equal"] for score, case in zip(scores, cases, strict=True))
    print(f"labelled cases: {right}/{len(cases)} right, {accepted} accepted that are labelled unequal")


def _math_verify(pairs: list[tuple[str, str]], workers: int) -> float:
    """Seconds of a pool of processes, started before, for all pairs."""
    groups = [pairs[start : start + 8] for start in range(0, len(pairs), 8)]
    with get_context("spawn").Pool(workers) as pool:
        pool.map(_verified, groups[: 4 * workers], chunksize=1)
        start = time.perf_counter()
        right = sum(pool.map(_verified, groups, chunksize=4))
        seconds = time.perf_counter() - start
    print(f"math-verify: {right} right, {len(pairs) / seconds:.0f}/s")
    return seconds


def _verified(group: list[tuple[str, str]]) -> int:
    """How many of a gold's responses math-verify accepts."""
    gold = parse(f"${group[0][1]}$")
    return sum(verify(gold, parse(response)) for response, _ in group)


def _processes() -> list[psutil.Process]:
    """The workers and their guards."""
    return psutil.Process().children(recursive=True)


def _measure(name: str, section: RewardSection, pairs: list[tuple[str, str]]) -> float:
    responses, golds = [response for response, _ in pairs], [gold for _, gold in pairs]
    with Verifier(section) as verifier:
        verifier.score([f"\\boxed{{{i}x+1}}" for i in range(64)], ["x+1"] * 64)  # workers have started and imported
        idle = sum(child.cpu_times().user + child.cpu_times().system for child in _processes())
        start = time.perf_counter()
        pending = verifier.submit(responses, golds)
        submitted = time.perf_counter() - start
        peak = 0
        while not pending.done():
            children = _processes()
            peak = max(peak, *(child.memory_info().rss for child in children if child.is_running()), 0)
            time.sleep(0.02)
        scores = pending.result()
        seconds = time.perf_counter() - start
        busy = [child.cpu_times() for child in _processes()]
    assert len(scores) == len(pairs)
    graded = [score for score in scores if score.seconds]
    killed = sum(score.why.startswith("killed") for score in scores)
    late = sum(score.why.startswith("gave up") for score in scores)
    died = sum(score.why.startswith("the worker died") for score in scores)
    correct = sum(score.reward for score in scores)
    processor = sum(times.user + times.system for times in busy) - idle
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(
        f"{name}: {len(pairs)} responses in {seconds:.2f} s = {len(pairs) / seconds:.0f}/s, {section.workers} workers "
        f"({processor:.2f} s of processor time in living workers, {submitted:.2f} s in submit)\n"
        f"  {correct:.0f} right; {len(graded)} scores from workers; {killed} killed, {late} timed out, {died} died; "
        f"largest worker {peak / 2**20:.0f} MiB, parent {memory:.0f} MiB"
    )
    return seconds


if __name__ == "__main__":
    main()
