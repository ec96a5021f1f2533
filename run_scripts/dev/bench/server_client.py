"""Compares `mugrpo generate --server` with vLLM's own benchmark, `vllm bench serve`, on one server of this machine.

    python -m run_scripts.dev.bench.server_client MODEL [--vllm vllm] [--pairs 5] [--prompts 256] [--responses 4]
        [--tokens 64] [--running 64] [--cores 0 1] [--out FILE]

Both send the same prompts, ask for `responses` of `tokens` tokens to each prompt in one request, with the tokens' ids
and log-probabilities, and have the same number of requests in flight. The server runs on the first core, in eager mode;
client and benchmark take turns on the second, and each pair changes their order. Before the pairs, the client fills one
stage that does not count. `vllm bench` needs pandas.

Start-up counts on neither side. The benchmark's time is its own `duration`, from its first request to its last answer.
The client's time begins at its first connection, on which it asks for the served names, and ends when the last row is
on disk. So the learner's checks, the rewards and the files are in it.

MODEL is a Hugging Face directory. A copy is served whose end token has the row of another token, so that hardly any
response ends early. Both sides let a response end, and their numbers of tokens may differ by 2 %; rates are compared.
`other` is the share of both cores that other programs took meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import pyarrow.parquet as pq
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from mugrpo_megatron.cli import main as mugrpo
from mugrpo_megatron.engine.nodes import free_port
from mugrpo_megatron.evaluation.estimators import mean_interval
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.run.initial_model import weights_fingerprint
from mugrpo_megatron.run.record import claim
from run_scripts.dev.bench.machine import describe

NEVER = 3
"""Id of a token that no model answers an arithmetic problem with: `$` in the bundled vocabulary, a token of the
pre-training in SmolLM2's."""
RECIPE = """
[run]
dir = "{run}"
[model]
path = "{model}"
dtype = "float32"
[data]
train = "arithmetic"
eval = "arithmetic"
max_prompt_tokens = 128
[schedule]
stages = 1
updates_per_stage = {updates}
[rollout]
prompts_per_update = 32
responses_per_prompt = {responses}
max_response_tokens = {tokens}
[engine]
max_running_requests = {running}
[reward]
function = "math"
[objective]
name = "mu_grpo"
"""


@dataclass(frozen=True)
class Job:
    """What client and benchmark have to do, and where."""

    folder: Path
    options: argparse.Namespace
    server: psutil.Process
    url: str
    name: str
    """Name of the served weights."""

    def on_second_core(self, command: Sequence[object], seen: Path) -> tuple[dict[str, Any], float]:
        """Run a command that writes a JSON object to `seen`; returns this, and the cores' share of other programs."""
        before, clock = self._busy(), time.perf_counter()
        arguments = ["taskset", "-c", str(self.options.cores[1]), *map(str, command)]
        result = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode:
            raise SystemExit(f"{' '.join(arguments)}\n{result.stdout}")
        cores, server, children = (now - then for now, then in zip(self._busy(), before, strict=True))
        others = (cores - server - children) / (2 * (time.perf_counter() - clock))
        return json.loads(seen.read_text(encoding="utf-8")), max(0.0, others)

    def measured(self, tokens: int, seconds: float, other: float) -> Measured:
        """One side of a pair, nearly all of whose responses must have all of their tokens."""
        options = self.options
        if tokens < 0.98 * options.prompts * options.responses * options.tokens:
            raise SystemExit(f"{tokens} tokens were returned, far from {options.tokens} in each response")
        return Measured(tokens, seconds, other)

    def _busy(self) -> tuple[float, float, float]:
        """CPU seconds: of both cores, of the server's processes, of this process's ended children."""
        cores = [psutil.cpu_times(percpu=True)[core] for core in self.options.cores]
        server = [self.server, *self.server.children(recursive=True)]
        mine = os.times()
        return (
            sum(sum(core) - core.idle - core.iowait - core.guest - core.guest_nice for core in cores),
            sum(sum(process.cpu_times()[:2]) for process in server),
            mine.children_user + mine.children_system,
        )


@dataclass(frozen=True)
class Measured:
    """One side of a pair."""

    tokens: int
    seconds: float
    other: float
    """Share of both cores that other programs took."""

    @property
    def rate(self) -> float:
        """Tokens of responses in a second."""
        return self.tokens / self.seconds


def endless(model: Path, copy: Path) -> None:
    """Write a copy of a model that does not end its responses."""
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("*.safetensors*"))
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    head = "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
    tensors[head][AutoTokenizer.from_pretrained(model).eos_token_id] = tensors[head][NEVER]
    save_file(tensors, copy / file.name, metadata={"format": "pt"})


def client(job: Job) -> Measured:
    """One stage by `mugrpo generate --server`, in a directory as new as the first."""
    run, seen = job.folder / "run", job.folder / "client.json"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(job.folder / "claimed", run)
    module = ["-m", "run_scripts.dev.bench.server_client", "--client", seen, run]
    words = ["generate", job.folder / "recipe.toml", "--server", job.url]
    found, other = job.on_second_core([sys.executable, *module, *words], seen)
    return job.measured(found["tokens"], found["seconds"], other)


def timed_client(seen: Path, run: Path, arguments: Sequence[str]) -> int:
    """Run `mugrpo` in this process; writes the tokens of its stage, and the seconds from connection to last row."""
    connections: list[float] = []

    def note(event: str, values: tuple[Any, ...]) -> None:
        if event == "socket.connect" and isinstance(values[1], tuple):
            connections.append(time.time())

    sys.addaudithook(note)
    code = mugrpo(arguments)
    stage = run / "stages" / "00000"
    end = max(path.stat().st_mtime for path in stage.glob("manifest*.json"))
    tokens = sum(
        len(ids) for path in stage.glob("*.parquet") for ids in pq.read_table(path)["response_ids"].to_pylist()
    )
    seen.write_text(json.dumps({"tokens": tokens, "seconds": end - connections[0]}), encoding="utf-8")
    return code


def write_prompts(job: Job) -> None:
    """The prompts of the client's stage as texts, for the benchmark."""
    tokenizer = AutoTokenizer.from_pretrained(job.folder / "model")
    prompts: dict[int, list[int]] = {}
    for path in sorted((job.folder / "run" / "stages" / "00000").glob("*.parquet")):
        table = pq.read_table(path, columns=["group", "prompt_ids"]).to_pylist()
        prompts |= {row["group"]: row["prompt_ids"] for row in table}
    ids = [prompts[group] for group in sorted(prompts)]
    texts = [tokenizer.decode(prompt) for prompt in ids]
    again = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    if again != ids:
        raise SystemExit("the prompts as texts have other tokens")
    (job.folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    lengths = sorted(map(len, again))
    print(f"{len(texts)} prompts of {lengths[0]} to {lengths[-1]} tokens", flush=True)


def benchmark(job: Job) -> Measured:
    """The same work by `vllm bench serve`."""
    options, folder = job.options, job.folder
    body = {"n": options.responses, "return_token_ids": True, "return_tokens_as_token_ids": True}
    in_flight = max(1, 2 * options.running // options.responses)
    command = [options.vllm, "bench", "serve", "--backend", "openai", "--base-url", job.url, "--model", job.name]
    command += ["--tokenizer", folder / "model", "--endpoint", "/v1/completions", "--temperature", 1.0]
    command += ["--dataset-name", "custom", "--dataset-path", folder / "prompts.jsonl", "--skip-chat-template"]
    command += ["--disable-shuffle", "--custom-output-len", options.tokens, "--num-prompts", options.prompts]
    command += ["--logprobs", 0, "--extra-body", json.dumps(body)]
    command += ["--max-concurrency", in_flight, "--ready-check-timeout-sec", 0, "--disable-tqdm"]
    command += ["--save-result", "--result-dir", folder, "--result-filename", "bench.json"]
    found, other = job.on_second_core(command, folder / "bench.json")
    return job.measured(found["total_output_tokens"], found["duration"], other)


@contextmanager
def serving(folder: Path, options: argparse.Namespace, name: str) -> Iterator[tuple[psutil.Process, str]]:
    """vLLM's server on the first core; yields its process and URL once it answers."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = ["taskset", "-c", str(options.cores[0]), options.vllm, "serve", str(folder / "model")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", name, "--dtype", "float32"]
    command += ["--logprobs-mode", "processed_logprobs", "--enforce-eager", "--no-enable-prefix-caching"]
    command += ["--max-num-seqs", str(options.running), "--max-model-len", str(options.tokens + 128)]
    # `nobind`: vLLM would bind its threads to a core of its own choice.
    own = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    own |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with open(folder / "server.log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | own)
    try:
        while not answers(f"{url}/health"):
            if server.poll() is not None:
                raise SystemExit((folder / "server.log").read_text(encoding="utf-8"))
            time.sleep(1.0)
        yield psutil.Process(server.pid), url
    finally:
        server.terminate()
        server.wait()


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5.0):
            return True
    except (URLError, OSError):
        return False


def measure(folder: Path, options: argparse.Namespace) -> list[float]:
    """The pairs' ratios: tokens in a second of the client over those of the benchmark."""
    endless(options.model, folder / "model")
    sizes = {"updates": options.prompts // 32, **{name: getattr(options, name) for name in SIZES}}
    (folder / "recipe.toml").write_text(RECIPE.format(run=folder / "run", model=folder / "model", **sizes))
    recipe = load_recipe(folder / "recipe.toml")
    (folder / "claimed").mkdir()
    name = claim(folder / "claimed", weights=weights_fingerprint(recipe.model)).id + "-0"
    ratios = []
    with serving(folder, options, name) as (server, url):
        job = Job(folder, options, server, url, name)
        client(job)
        write_prompts(job)
        for pair in range(options.pairs):
            sides = [benchmark, client] if pair % 2 else [client, benchmark]
            found = {side: side(job) for side in sides}
            mine, its = found[client], found[benchmark]
            row = {"pair": pair, "first": sides[0].__name__}
            row |= {"client_tokens": mine.tokens, "benchmark_tokens": its.tokens}
            row |= {"client_s": mine.seconds, "benchmark_s": its.seconds, "ratio": mine.rate / its.rate}
            row |= {"client_other": mine.other, "benchmark_other": its.other}
            print(json.dumps(row), flush=True)
            if options.out:
                with open(options.out, "a", encoding="utf-8") as out:
                    out.write(json.dumps(row | describe(sys.argv)) + "\n")
            ratios.append(mine.rate / its.rate)
    return ratios


SIZES = ("responses", "tokens", "running")


def main() -> None:
    """Measure, and print the mean ratio with its 95 % interval."""
    if sys.argv[1:2] == ["--client"]:
        sys.exit(timed_client(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--vllm", default="vllm")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=256, help="a multiple of 32")
    parser.add_argument("--responses", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--running", type=int, default=64, help="responses that the server decodes at a time")
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ratios = measure(Path(folder), options)
    mean = mean_interval(ratios)
    print(f"client over benchmark: {mean.value:.3f} ({mean.low:.3f} to {mean.high:.3f}), {len(ratios)} pairs")


if __name__ == "__main__":
    main()
