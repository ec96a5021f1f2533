"""Compares responses per second of the project's engine process with `sglang.Engine.generate` on one batch.

    python -m run_scripts.bench.engine [--model DIR] [--prompts 256] [--n 8] [--tokens 8] [--rounds 7]

Both engines have the same arguments and take turns, so that a busy machine slows both; CPU time is affected least. The
bare engine gets all prompts, repeated n times, in one call and returns Python objects. Ours streams groups of n back as
arrays, and the client's time counts. Without --model the model is a random Qwen2 of 115k parameters.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.launch import engine_arguments, engine_environment, runs_on_cuda
from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.samples import Problem, Prompt
from tests.models import save_model


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or _small_model(Path(folder) / "model")
        recipe = Recipe.model_validate(
            {
                "model": {"path": model, "dtype": options.dtype},
                "data": {"max_prompt_tokens": 32},
                "rollout": {"max_response_tokens": options.tokens},
                "engine": {"max_running_requests": options.running},
            }
        )
        cuda = runs_on_cuda(recipe)
        os.environ.update(engine_environment(recipe, model, cuda))
        import sglang  # reads the environment at import

        bare = sglang.Engine(**engine_arguments(recipe, model, cuda))
        bare.freeze_gc()
        engine = Engine.start(recipe, model, Path(folder) / "engine.log")
        engine.wait_ready()
        prompts = [Prompt(i, Problem(str(i), "", ""), _prompt_ids(i)) for i in range(options.prompts)]
        requests = options.prompts * options.n
        me = psutil.Process()
        host = next(child for child in me.children() if "mugrpo_megatron.engine.host" in child.cmdline())
        theirs = [me, *(child for child in me.children(recursive=True) if child.ppid() == me.pid and child != host)]
        sides: dict[str, tuple[Callable[[], None], list[psutil.Process]]] = {
            "bare": (lambda: _bare_round(bare, prompts, options.n, options.tokens), theirs),
            "ours": (lambda: _our_round(engine, prompts, options.n, options.tokens), [me, host, *host.children()]),
        }
        wall: dict[str, list[float]] = {name: [] for name in sides}
        cpu: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.rounds + 1):
            for name, (one_round, processes) in sides.items():
                used, start = _cpu_seconds(processes), time.perf_counter()
                one_round()
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(_cpu_seconds(processes) - used)
        engine.stop()
        bare.shutdown()
    for name in sides:  # the first round warms up
        rates = [requests / seconds for seconds in wall[name][1:]]
        milliseconds = 1e3 * statistics.median(cpu[name][1:]) / requests
        print(f"{name}: median {statistics.median(rates):.0f} requests/s, best {max(rates):.0f}; ", end="")
        print(f"{options.tokens * statistics.median(rates):.0f} tokens/s; {milliseconds:.3f} CPU ms a request")
    for what, figures in (("rate", wall), ("CPU time", cpu)):
        ratios = [bare / ours for bare, ours in zip(figures["bare"][1:], figures["ours"][1:], strict=True)]
        print(f"{what}, bare / ours: median {statistics.median(ratios):.3f} of {' '.join(f'{r:.2f}' for r in ratios)}")


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _bare_round(engine: Any, prompts: list[Prompt], n: int, tokens: int) -> None:
    outputs = engine.generate(
        input_ids=[prompt.ids for prompt in prompts for _ in range(n)],
        sampling_params={"temperature": 1.0, "top_p": 1.0, "max_new_tokens": tokens},
        return_logprob=True,
    )
    assert len(outputs) == n * len(prompts)


def _our_round(engine: Engine, prompts: list[Prompt], n: int, tokens: int) -> None:
    groups = list(engine.generate(prompts, n, Sampling(1.0, 1.0, tokens, ())))
    assert sum(len(responses) for _, responses in groups) == n * len(prompts)


def _prompt_ids(index: int) -> list[int]:
    return [3 + (index * step) % 500 for step in (1, 7, 31, 57, 111)]


def _small_model(directory: Path) -> Path:
    save_model(
        directory,
        scale=None,
        vocab_size=512,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    return directory


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face checkpoint directory")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--n", type=int, default=8, help="responses per prompt")
    parser.add_argument("--tokens", type=int, default=8, help="tokens per response")
    parser.add_argument("--running", type=int, default=1024, help="engine.max_running_requests")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    main()
