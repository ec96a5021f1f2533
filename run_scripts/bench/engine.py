"""Compares responses per second of the project's engine process with SGLang's engines on one batch.

    python -m run_scripts.bench.engine [--model DIR] [--prompts 256] [--n 8] [--tokens 8] [--rounds 7] [--sides ...]

`ours` is the client with the engine that a run has, `torch` the same without a C compiler. `same` is that
engine without host process and client, so that `ours` against it is what these cost; `bare` is `sglang.Engine`. All
have the same arguments and take turns, so that a busy machine slows all; CPU time is affected least. `same` and `bare`
get all prompts, repeated n times, in one call and return Python objects. Ours streams groups of n back as arrays, and
the client's time counts; only ours may have replicas. Without --model the model is a random Qwen2 of 115k parameters.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch

from mugrpo_megatron.engine import client
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.door import engine_type
from mugrpo_megatron.engine.launch import engine_arguments, engine_environment
from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.files.hf_config import read_model_config
from mugrpo_megatron.observe.environment import finds_cuda
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
        cuda = finds_cuda()
        os.environ.update(engine_environment(recipe, model, cuda))
        prompts = [Prompt(i, Problem(str(i), "", ""), _prompt_ids(i, model)) for i in range(options.prompts)]
        sides = {name: _Side(name, recipe, model, cuda, Path(folder), options.replicas) for name in options.sides}
        wall: dict[str, list[float]] = {name: [] for name in sides}
        cpu: dict[str, list[float]] = {name: [] for name in sides}
        tokens: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.rounds + 1):
            for name, side in sides.items():
                used, start = side.cpu_seconds(), time.perf_counter()
                generated = side.generate(prompts, options.n, options.tokens)
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(side.cpu_seconds() - used)
                print(f"  {name}: {wall[name][-1]:.2f} s, {cpu[name][-1]:.2f} CPU s, {generated} tokens", flush=True)
                tokens[name].append(generated / wall[name][-1])
        for side in sides.values():
            side.stop()
    requests = options.prompts * options.n
    for name in sides:  # the first round warms up
        rates = [requests / seconds for seconds in wall[name][1:]]
        milliseconds = 1e3 * statistics.median(cpu[name][1:]) / requests
        print(f"{name}: median {statistics.median(rates):.0f} requests/s, best {max(rates):.0f}; ", end="")
        print(f"{statistics.median(tokens[name][1:]):.0f} tokens/s; {milliseconds:.3f} CPU ms a request")
    first, *others = sides
    for other in others:
        for what, figures in (("rate", wall), ("CPU time", cpu)):
            ratios = [a / b for a, b in zip(figures[first][1:], figures[other][1:], strict=True)]
            print(f"{what}, {first} / {other}: median {statistics.median(ratios):.3f} of ", end="")
            print(" ".join(f"{ratio:.2f}" for ratio in ratios))


class _Side:
    """One engine and its processes; this process is part of every side, and works for one at a time."""

    def __init__(self, name: str, recipe: Recipe, model: Path, cuda: bool, folder: Path, replicas: int) -> None:
        me = psutil.Process()
        before = me.children(recursive=True)
        if name in ("ours", "torch"):
            path = {"PATH": str(_without_compiler(folder))} if name == "torch" else {}
            with patch.dict(os.environ, path), patch.object(client, "replicas", lambda *_: replicas):
                self._ours = Engine.start(recipe, model, folder / f"{name}.log")
            self._ours.wait_ready()
        else:
            self._bare = self._start_bare(name, engine_arguments(recipe, model, cuda))
            self._bare.freeze_gc()
        self._client = name in ("ours", "torch")
        self._processes = [me, *(child for child in me.children(recursive=True) if child not in before)]

    @staticmethod
    def _start_bare(name: str, arguments: dict[str, Any]) -> Any:
        if name == "same":
            torch.set_num_threads(1)  # its processes are forked, and this one has read the environment already
            return engine_type(arguments["device"])(**arguments)
        import sglang  # reads the environment at import

        return sglang.Engine(**arguments)

    def generate(self, prompts: list[Prompt], n: int, tokens: int) -> int:
        """Tokens that were generated."""
        if self._client:
            groups = list(self._ours.generate(prompts, n, Sampling(1.0, 1.0, tokens, ())))
            lengths = [len(response.ids) for _, responses in groups for response in responses]
        else:
            outputs = self._bare.generate(
                input_ids=[prompt.ids for prompt in prompts for _ in range(n)],
                sampling_params={"temperature": 1.0, "top_p": 1.0, "max_new_tokens": tokens},
                return_logprob=True,
            )
            lengths = [len(output["output_ids"]) for output in outputs]
        assert len(lengths) == n * len(prompts)
        return sum(lengths)

    def cpu_seconds(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes if process.is_running())

    def stop(self) -> None:
        if self._client:
            self._ours.stop()
        else:
            self._bare.shutdown()


def _without_compiler(folder: Path) -> Path:
    """A folder for PATH with the one program that SGLang runs."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / "lscpu").symlink_to(str(shutil.which("lscpu")))
    return tools


def _prompt_ids(index: int, model: Path) -> list[int]:
    others = min(500, (read_model_config(model)["vocab_size"] or 0) - 12)
    return [3 + (index * step) % others for step in (1, 7, 31, 57, 111)]


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
    parser.add_argument("--replicas", type=int, default=1, help="replicas of ours on CPU; the others have one engine")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sides", nargs="+", default=["same", "ours"], choices=["same", "bare", "ours", "torch"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
