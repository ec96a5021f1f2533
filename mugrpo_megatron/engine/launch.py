"""SGLang's settings from a recipe: engine arguments, process environment, sampling parameters."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mugrpo_megatron.cpu.sglang import replicas_of
from mugrpo_megatron.cuda import may_find_cuda
from mugrpo_megatron.engine import sglang_compat
from mugrpo_megatron.engine.placement import ALONE, EngineSlot, slot_of_environment
from mugrpo_megatron.engine.process import HostProcess
from mugrpo_megatron.engine.wire import Routed, Sampling
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import experts_of, read_model_config
from mugrpo_megatron.observe.environment import usable_cores
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.policy import RolloutSection
from mugrpo_megatron.recipe.systems import BLOCK, EngineSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FP8 = {
    # As the weights come, they are multiplied; the backends that SGLang would choose rearrange scales once, at a start.
    "fp8_gemm_runner_backend": "triton",
    "moe_runner_backend": "triton",
    "load_format": "dummy",  # the directory has weights of another type; the first sync brings these
}
"""Arguments of an engine whose weights a sync quantises."""
CPU_KV_BYTES = 1 << 29
"""Largest KV cache of an engine on CPU; SGLang writes all of it at start, so unused cache costs memory too."""
SHARED_PREFIX_TOKENS = 32
"""SGLang makes requests that arrive together wait for a common prefix of at least this length."""
SUMMING = "mugrpo_megatron.engine.engine_group.write_sums"
"""Import path of the "loader of weights" that takes their checksums."""
SEED_STRIDE = 7_919
"""Distance between the random seeds of two engines."""
EARLIER_STARTS = 1000
"""Starts that earlier processes may have made: seeds have to stay below 2^32."""
LENGTH_MARGIN = 8
"""SGLang refuses the last few positions of its context; the window is this much longer than prompt and response."""
LARGEST_GRAPH = 1024
"""Most responses for which a decode step is captured as a CUDA graph; larger batches hide the launches anyway."""
GC_THRESHOLD = (50_000, 20, 50)
"""When Python looks for cycles among the objects of thousands of requests; by default after 700 new ones. On CPU the
scheduler's process inherits it. 8,192 answers of four tokens took 5.4 instead of 5.9 s (two cores)."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
TORCHRUN_PREFIXES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMP_NUM_THREADS")


BY_RECIPE = {
    "model_path": "model.path",
    "dtype": "model.dtype",
    "tp_size": "engine.tensor",
    "base_gpu_id": "engine.tensor",
    "context_length": "data.max_prompt_tokens and rollout.max_response_tokens",
    "max_running_requests": "engine.max_running_requests",
    "mem_fraction_static": "engine.memory_fraction",
    "enable_memory_saver": "engine.between_stages",
    "enable_return_routed_experts": "learner.routing_replay",
    "random_seed": "run.seed",
    "enable_deterministic_inference": "run.deterministic",
    "device": "CUDA_VISIBLE_DEVICES",
    "quantization": "engine.quantization",
    "nnodes": "engine.nodes",
    "preferred_sampling_params": "[rollout]",
}
"""Arguments of SGLang that a key of the recipe decides."""
BY_PROJECT = {
    **dict.fromkeys(
        ("custom_weight_loader", "load_format", "json_model_override_args", "fp8_gemm_runner_backend"), "weight sync"
    ),
    **dict.fromkeys(
        (
            "ep_size",
            "moe_a2a_backend",
            "ep_num_redundant_experts",
            "enable_eplb",
            "init_expert_location",
            "disable_shared_experts_fusion",
            "enforce_shared_experts_fusion",
        ),
        "checking the engine's weights",
    ),
    **dict.fromkeys(("pp_size", "dp_size", "node_rank", "dist_init_addr", "gpu_id_step"), "placing engines"),
    **dict.fromkeys(
        ("skip_tokenizer_init", "tokenizer_path", "grammar_backend", "enable_lora"), "the engine's protocol"
    ),
    **dict.fromkeys(("host", "port", "nccl_port", "skip_server_warmup", "log_level"), "the engine's process"),
    "trust_remote_code": "running no code of a checkpoint",
}
"""Those that have to be as they are, and for what."""


def check_extra(extra: Mapping[str, Any]) -> None:
    """UserError for a key of `[engine.extra]` that the recipe or the project decides; SGLang judges the others."""
    for name in extra:
        key = f"engine.extra.{name}"
        if name in BY_RECIPE:
            raise UserError(f"{key}: this is decided by {BY_RECIPE[name]}; set that instead")
        if name in BY_PROJECT:
            raise UserError(f"{key}: {BY_PROJECT[name]} depends on it, so it cannot be set; remove it")


def engine_arguments(recipe: Recipe, model_dir: Path, cuda: bool, slot: EngineSlot = ALONE) -> dict[str, Any]:
    """Arguments of `sglang.Engine`; each engine of a run has its own random seed.

    Raises UserError when `model_dir` is not a checkpoint, or when prompt and response exceed the model's positions.
    What else an engine cannot do is checked before (`checks.engines`).
    """
    config = read_model_config(model_dir)
    response = recipe.longest_response
    limits = recipe.data.max_prompt_tokens + response
    positions = config.get("max_position_embeddings") or limits + LENGTH_MARGIN
    if limits > positions:
        raise UserError(
            f"data.max_prompt_tokens {recipe.data.max_prompt_tokens} and responses of {response} tokens "
            f"(rollout.max_response_tokens, eval.max_tokens) exceed the {positions} positions of {model_dir}: "
            "lower one of them"
        )
    engine = recipe.engine
    arguments: dict[str, Any] = {
        "model_path": str(model_dir),
        "dtype": recipe.model.dtype,
        "tp_size": engine.tensor,
        "nnodes": engine.nodes,
        "node_rank": slot.node,
        "context_length": min(limits + LENGTH_MARGIN, positions),
        "max_running_requests": engine.max_running_requests,
        # Only texts that end a response need a tokenizer.
        "skip_tokenizer_init": not (recipe.rollout.stop or recipe.rollout.function),
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "sleep_on_idle": True,
        "log_level": "warning",
        "random_seed": recipe.run.seed + SEED_STRIDE * slot.number,
        "trust_remote_code": False,
        "load_format": "safetensors",  # never a pickle next to it
        "gc_threshold": list(GC_THRESHOLD),
    }
    if engine.quantization == "fp8":
        scheme = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
        arguments |= FP8 | {"json_model_override_args": json.dumps({"quantization_config": scheme})}
    if recipe.learner.routing_replay == "rollout":
        arguments["enable_return_routed_experts"] = True
    if config.get("n_shared_experts"):  # SGLang would make some models' shared expert one more routed one
        arguments["disable_shared_experts_fusion"] = True
    arguments |= _cuda_arguments(recipe, slot.gpu) if cuda else _cpu_arguments(recipe, config, arguments)
    return arguments | recipe.engine.extra


def replicas(engine: EngineSection, model_dir: Path, cuda: bool, slot: EngineSlot) -> int:
    """How many SGLang engines of the same weights answer as the slot's engine on this machine."""
    weight_bytes = sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    return replicas_of(engine, weight_bytes, slot.local_engines, None if cuda else usable_cores())


def starts_before(log: Path) -> int:
    """For how many starts of an engine that logs to `log` its random streams are taken.

    0 for a first one, so that equal runs begin alike. Where an earlier process has left its log the number is drawn, so
    that a response that is continued does not meet the random numbers that it began with.
    """
    return 1 + secrets.randbelow(EARLIER_STARTS) if log.exists() else 0


def _cuda_arguments(recipe: Recipe, gpu: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "device": "cuda",
        "base_gpu_id": gpu,
        "mem_fraction_static": recipe.engine.memory_fraction,
        "enable_memory_saver": recipe.engine.between_stages == "sleep",
        "custom_weight_loader": [SUMMING],
        # SGLang captures batches up to 256 on a GPU of this size, and runs larger ones launch by launch.
        "cuda_graph_max_bs_decode": min(recipe.engine.max_running_requests, LARGEST_GRAPH),
        # Prompts are short, and these graphs would keep their memory while the learner trains.
        "cuda_graph_backend_prefill": "disabled",
        # SGLang would compile FlashInfer's kernels for some mixtures of experts; not measured next to the memory saver.
        "enforce_disable_flashinfer_allreduce_fusion": True,
    }
    if recipe.model.dtype == "float32":
        arguments["attention_backend"] = "triton"  # SGLang's choice, FlashAttention 3, takes half precision only
    if recipe.run.deterministic:  # products and attention alike in every batch; the sampler that takes a request's seed
        arguments["enable_deterministic_inference"] = True
    return arguments


def _cpu_arguments(recipe: Recipe, config: Mapping[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    batch_tokens = common["max_running_requests"] * common["context_length"]
    affordable = max(CPU_KV_BYTES // kv_bytes_per_token(config, recipe.model.dtype), common["context_length"])
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "custom_weight_loader": ["mugrpo_megatron.cpu.sglang.load_mapped", SUMMING],
        "disable_cuda_graph": True,
        # Small models are bound by the host's work per step; overlapping it needs a core to spare.
        "disable_overlap_schedule": True,
        # Shorter prompts cannot share their prefix within a group, and still pay for the cache.
        "disable_radix_cache": recipe.data.max_prompt_tokens <= SHARED_PREFIX_TOKENS,
        "mem_fraction_static": 0.1,
        "max_total_tokens": min(batch_tokens, affordable),
    }


def kv_bytes_per_token(config: Mapping[str, Any], dtype: str) -> int:
    """KV cache bytes of one token in all layers, from a Hugging Face config; UserError for a missing field."""
    for name in ("num_attention_heads", "hidden_size", "num_hidden_layers"):
        if not config.get(name):
            raise UserError(f"config.json has no field {name!r}, so the size of the engine's KV cache is unknown")
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    numbers = 2 * (config.get("num_key_value_heads") or heads) * head_dim
    if config.get("kv_lora_rank"):  # latent attention caches what keys and values are computed from
        numbers = config["kv_lora_rank"] + (config.get("qk_rope_head_dim") or 0)
    return config["num_hidden_layers"] * numbers * (4 if dtype == "float32" else 2)


def engine_environment(recipe: Recipe, model_dir: Path, cuda: bool, slot: EngineSlot = ALONE) -> dict[str, str]:
    """Environment of the host process: this one's, with what SGLang and its compilers look for.

    Without torchrun's variables, which SGLang would follow, and those of torch's allocator, which its memory saver and
    CUDA's shared memory handles do not work with.
    """
    dropped = (*TORCHRUN_PREFIXES, *ALLOCATOR_VARIABLES)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    environment |= {
        "PYTHONUNBUFFERED": "1",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models(read_model_config(model_dir))),
        "PATH": _joined(os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)),  # ninja is installed here
    }
    if slot.joins:
        environment["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"  # SGLang's Engine would not return
    if cuda:
        libraries = _joined(os.environ.get("LD_LIBRARY_PATH", ""), *cuda_runtime_folders())
        return environment | ({"LD_LIBRARY_PATH": libraries} if libraries else {})
    # A CUDA build of torch brings NCCL, which SGLang would load and call without a device.
    environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_NCCL_SO_PATH": os.devnull}
    if recipe.engine.nodes == 1:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    if recipe.engine.tensor > 1:
        every = sorted(os.sched_getaffinity(0))
        cores = every[slot.local :: slot.local_engines] or every
        here = recipe.engine.tensor // recipe.engine.nodes
        shares = [cores[rank::here] or cores for rank in range(here)] * recipe.engine.nodes  # read on each node
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    return environment


def cuda_runtime_folders() -> list[str]:
    """Where pip has put CUDA's runtime library, which the memory saver's library needs and does not find by itself."""
    package = find_spec("nvidia")
    roots = package.submodule_search_locations or [] if package else []
    return sorted({str(file.parent) for root in roots for file in Path(root).glob("*/lib/libcudart.so.*")})


def check_allocator() -> None:
    """UserError when torch's allocator is set to expandable segments, whose memory another process cannot open."""
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower():
            raise UserError(
                f"{name}={os.environ[name]}: the engine cannot read the learner's weights from expandable segments; "
                "unset the variable, or remove expandable_segments from it"
            )


def _joined(*folders: str) -> str:
    return os.pathsep.join(filter(None, folders))


def _other_models(config: Mapping[str, Any]) -> list[str]:
    """SGLang's model modules that do not define the checkpoint's architecture; importing all 200 takes seconds.

    Empty when no module defines it, so that SGLang imports them all.
    """
    package = find_spec("sglang")
    if package is None or package.origin is None:
        raise UserError("SGLang is not installed, so nothing can be generated: run run_scripts/setup.sh")
    modules = {path.stem: path.read_text() for path in (Path(package.origin).parent / "srt" / "models").glob("*.py")}
    classes = [f"class {architecture}(" for architecture in config.get("architectures") or []]
    defining = {stem for stem, text in modules.items() if any(line in text for line in classes)}
    return sorted(modules.keys() - defining) if defining else []


def sampling(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """How training responses are sampled."""
    rollout = recipe.rollout
    return Sampling(
        rollout.temperature,
        rollout.top_p,
        rollout.max_response_tokens,
        _stop_ids(tokenizer),
        routed=_routed(recipe),
        stop=tuple(rollout.stop),
        top_k=rollout.top_k,
        support_ids=returns_support_ids(rollout),
        sampling_masks=returns_support_ids(rollout) and rollout.top_k > sglang_compat.MOST_TOP_LOGPROBS,
        stream=_stream(recipe, "train"),
    )


def returns_support_ids(rollout: RolloutSection) -> bool:
    """Whether a stage keeps the tokens that could be sampled, so that the learner's softmax runs over the same."""
    return 0 < rollout.top_k <= sglang_compat.most_support_ids()


def _stream(recipe: Recipe, name: str) -> str | None:
    """The random stream that responses draw from where none may depend on the engine's other requests."""
    return f"{recipe.run.seed}/{name}" if recipe.run.deterministic else None


def _routed(recipe: Recipe) -> Routed | None:
    """The routers whose choices come with a training response, if the recipe wants them."""
    if recipe.learner.routing_replay != "rollout":
        return None
    config = read_model_config(recipe.model.directory)
    return Routed(config["num_hidden_layers"] or 0, config["num_experts_per_tok"] or 0, experts_of(config))


def sampling_note(recipe: Recipe) -> str:
    """What to know of the recipe's sampling; empty where ratios are exact."""
    rollout = recipe.rollout
    if not rollout.truncates or returns_support_ids(rollout):
        return ""
    return (
        "The engine samples from a part of the vocabulary, and probabilities are those of the whole one on both sides: "
        f"ratios leave out how the part's share of the probability moves. Set rollout.top_k to "
        f"{sglang_compat.most_support_ids()} or less, with top_p as it is, and the stage keeps the part, so ratios "
        "are exact."
    )


def held_out_sampling(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, name: str) -> Sampling:
    """How evaluation samples the held-out set `name`; temperature 0 is greedy."""
    own = recipe.eval.of(name)
    limit = own.max_tokens or recipe.rollout.max_response_tokens
    return Sampling(
        own.temperature,
        own.top_p,
        limit,
        _stop_ids(tokenizer),
        stop=tuple(recipe.rollout.stop),
        stream=_stream(recipe, f"eval/{name}"),
    )


def _stop_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokenizer's end-of-sequence token; the engine adds those of config.json and generation_config.json."""
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


@contextmanager
def prelaunch_host(recipe: Recipe) -> Iterator[HostProcess | None]:
    """A process that imports SGLang while this one imports Megatron, for the engine that this rank will lead.

    Each import takes seconds. None on CUDA, where the learner loads first and importing SGLang may already take memory
    of the device, and where the engine starts only when the ranks of several nodes have met. It is gone when the block
    ends, whether an engine has used it or not.
    """
    slot = None if may_find_cuda() else slot_of_environment(recipe.engine, cuda=False)
    if slot is None or not slot.leads_engine or recipe.engine.nodes > 1:
        yield None
        return
    host = HostProcess(engine_environment(recipe, recipe.model.directory, cuda=False, slot=slot), cuda=False)
    try:
        yield host
    finally:
        host.end()
