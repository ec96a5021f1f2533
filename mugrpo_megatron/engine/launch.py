"""SGLang's settings from a recipe: engine arguments, process environment, sampling parameters."""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from mugrpo_megatron.cpu.sglang import most_kv_bytes, replicas_of
from mugrpo_megatron.cuda import may_find_cuda
from mugrpo_megatron.engine import sglang_compat
from mugrpo_megatron.engine.placement import ALONE, EngineSlot, slot_of_environment
from mugrpo_megatron.engine.process import HostProcess
from mugrpo_megatron.engine.wire import RouterShape, Sampling
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import attention_layers, experts_of, has_delta, read_model_config
from mugrpo_megatron.observe.environment import usable_cores
from mugrpo_megatron.recipe.policy import ModelSection, RolloutSection
from mugrpo_megatron.recipe.scoring import EvalSection
from mugrpo_megatron.recipe.sections import RunSection
from mugrpo_megatron.recipe.systems import BLOCK, EngineSection, LearnerSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FP8 = {
    # The backends that SGLang would choose rearrange scales once, after loading, so that the scales of a later sync
    # would be in another order than they expect.
    "fp8_gemm_runner_backend": "triton",
    "moe_runner_backend": "triton",
    "load_format": "dummy",  # no file has quantised weights; the first sync sends them
}
"""Arguments of an fp8 engine, whose weights the sync quantises."""
STATES_PER_REQUEST = 4
"""How many states of gated delta networks an engine on CPU keeps for each request that it decodes. SGLang takes three
(mem_cache/kv_cache_configurator.py), and one more is for cached prefixes."""
SHARED_PREFIX_TOKENS = 32
"""If requests that arrive together share a prefix of this length or more, SGLang delays all but one of them, so that
the others find it in the cache (`IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD`, managers/schedule_policy.py)."""
SUMMING = "mugrpo_megatron.engine.engine_group.write_sums"
"""Import path of the `custom_weight_loader` that writes checksums."""
SEED_STRIDE = 7_919
"""Difference between the random seeds of two neighbouring engines."""
EARLIER_STARTS = 1000
"""Largest number of earlier starts that `starts_before` returns, so that seeds stay below 2^32."""
LENGTH_MARGIN = 8
"""Positions that an engine gets beyond those of prompt and response, because SGLang leaves the last 6 unused
(`max_req_input_len`, managers/tp_worker.py)."""
LARGEST_GRAPH = 1024
"""Largest batch whose decode step is captured as a CUDA graph. In larger batches the kernels take longer than their
launches, so a graph gains nothing."""
GC_THRESHOLD = (50_000, 20, 50)
"""Thresholds of Python's garbage collection in an engine, instead of (700, 10, 10). On CPU the scheduler's process
inherits them, and 8,192 answers of four tokens took 5.4 instead of 5.9 s (two cores)."""
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
"""Argument of SGLang that `[engine.extra]` may not set -> what decides it: keys of the recipe, or a variable."""
BY_PROJECT = {
    "weight sync": ("custom_weight_loader", "load_format", "json_model_override_args", "fp8_gemm_runner_backend"),
    "checking the engine's weights": (
        *("ep_size", "moe_a2a_backend", "ep_num_redundant_experts", "enable_eplb", "init_expert_location"),
        *("disable_shared_experts_fusion", "enforce_shared_experts_fusion"),
    ),
    "placing engines": ("pp_size", "dp_size", "node_rank", "dist_init_addr", "gpu_id_step"),
    "the engine's protocol": ("skip_tokenizer_init", "tokenizer_path", "grammar_backend", "enable_lora"),
    "the engine's process": ("host", "port", "nccl_port", "skip_server_warmup", "log_level"),
    "running no code of a checkpoint": ("trust_remote_code",),
    "opening no port beyond the machine": (
        *("disaggregation_mode", "elastic_ep_backend", "enable_elastic_expert_backup", "encoder_only", "language_only"),
        *("kv_events_config", "enable_custom_logit_processor"),
    ),
}
"""Part of this project -> arguments of SGLang that it depends on, so that a user cannot set them."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The settings of a recipe that decide how an engine is started; `run.engine_spec` makes it from a recipe."""

    section: EngineSection
    dtype: str
    max_prompt_tokens: int
    max_response_tokens: int
    """Most tokens of a response, in training and evaluation."""
    seed: int
    deterministic: bool
    needs_tokenizer: bool
    """Whether SGLang loads the tokenizer; it must if certain texts end a response, or if it parses tool calls."""
    returns_routes: bool
    """Whether SGLang returns the experts of each token."""
    episodes: Callable[[Any], Any] | None = None
    """Makes the object that plays the recipe's episodes on an engine; None if responses have one turn."""


def check_extra(extra: Mapping[str, Any]) -> None:
    """Raise UserError for a key of `[engine.extra]` that another key or this project decides.

    Whether SGLang knows the other keys is not checked here.
    """
    for name in extra:
        key = f"engine.extra.{name}"
        if name in BY_RECIPE:
            raise UserError(f"{key}: this is decided by {BY_RECIPE[name]}; set that instead")
        if reason := next((reason for reason, names in BY_PROJECT.items() if name in names), ""):
            raise UserError(f"{key}: this program decides it, because {reason} depends on it; remove the key")


def engine_arguments(spec: EngineSpec, model_dir: Path, cuda: bool, slot: EngineSlot = ALONE) -> dict[str, Any]:
    """The arguments of `sglang.Engine` for the engine of `slot`, with a random seed of its own.

    Raises UserError if `model_dir` is not a checkpoint, if the longest prompt and response together exceed the model's
    positions, or if, on CPU, its config lacks a field that the size of the KV cache depends on. Other limits of an
    engine are checked before, in `checks.engines`.
    """
    config = read_model_config(model_dir)
    tokens = spec.max_prompt_tokens + spec.max_response_tokens
    positions = config.get("max_position_embeddings") or tokens + LENGTH_MARGIN
    if tokens > positions:
        raise UserError(
            f"data.max_prompt_tokens {spec.max_prompt_tokens} and responses of {spec.max_response_tokens} tokens "
            f"(rollout.max_response_tokens, eval.max_tokens) exceed the {positions} positions of {model_dir}; lower "
            "one of these keys"
        )
    engine = spec.section
    arguments: dict[str, Any] = {
        "model_path": str(model_dir),
        "dtype": spec.dtype,
        "tp_size": engine.tensor,
        "nnodes": engine.nodes,
        "node_rank": slot.node,
        "context_length": min(tokens + LENGTH_MARGIN, positions),
        "max_running_requests": engine.max_running_requests,
        "skip_tokenizer_init": not spec.needs_tokenizer,
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "sleep_on_idle": True,
        "log_level": "warning",
        # SGLang's watchdog ends it after 300 s in one batch, which a slow CPU may need without hanging. The client
        # notices a silent engine after request_timeout_s, so the watchdog waits at least as long.
        "watchdog_timeout": max(300.0, engine.request_timeout_s),
        "random_seed": spec.seed + SEED_STRIDE * slot.number,
        "trust_remote_code": False,
        "load_format": "safetensors",  # "auto" also loads pickled *.bin (model_loader/loader.py)
        "gc_threshold": list(GC_THRESHOLD),
    }
    if engine.quantization == "fp8":
        scheme = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
        arguments |= FP8 | {"json_model_override_args": json.dumps({"quantization_config": scheme})}
    if spec.returns_routes:
        arguments["enable_return_routed_experts"] = True
    if config.get("n_shared_experts"):  # SGLang would append the shared expert to the routed ones (models/glm4_moe.py)
        arguments["disable_shared_experts_fusion"] = True
    arguments |= _cuda_arguments(spec, slot.gpu) if cuda else _cpu_arguments(spec, config, arguments)
    return arguments | engine.extra


def replicas(engine: EngineSection, model_dir: Path, cuda: bool, slot: EngineSlot) -> int:
    """The number of replicas of the engine of `slot`: SGLang engines with the same weights that share its requests."""
    weight_bytes = sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    return replicas_of(engine, weight_bytes, slot.local_engines, None if cuda else usable_cores())


def starts_before(log: Path) -> int:
    """The number of earlier starts that an engine's seed is computed from: 0 if its `log` is new, else a random one."""
    # If the log is not new, the number is random: nothing counts the starts of earlier processes, and a resumed stage
    # must not repeat the random stream of the responses that it already holds.
    return 1 + secrets.randbelow(EARLIER_STARTS) if log.exists() else 0


def _cuda_arguments(spec: EngineSpec, gpu: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "device": "cuda",
        "base_gpu_id": gpu,
        "mem_fraction_static": spec.section.memory_fraction,
        "enable_memory_saver": spec.section.between_stages == "sleep",
        "custom_weight_loader": [SUMMING],
        # By default SGLang captures CUDA graphs of batches up to 256 (server_args.py), and launches kernels one by one
        # for larger ones.
        "cuda_graph_max_bs_decode": min(spec.section.max_running_requests, LARGEST_GRAPH),
        # Graphs gain little for short prompts, and keep their memory while the learner trains.
        "cuda_graph_backend_prefill": "disabled",
        # For some mixtures of experts SGLang would compile FlashInfer's kernels, which nobody here has measured
        # together with the memory saver.
        "enforce_disable_flashinfer_allreduce_fusion": True,
    }
    if spec.dtype == "float32":
        arguments["attention_backend"] = "triton"  # SGLang's choice, FlashAttention 3, takes half precision only
    if spec.deterministic:
        # This turns on batch-invariant kernels, and the sampler that takes `sampling_seed` (layers/sampler.py).
        arguments["enable_deterministic_inference"] = True
    return arguments


def _cpu_arguments(spec: EngineSpec, config: Mapping[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    batch_tokens = common["max_running_requests"] * common["context_length"]
    # SGLang fills the cache with zeros at its start, so that even slots that no request ever uses take memory.
    affordable = most_kv_bytes(psutil.virtual_memory().total) // kv_bytes_per_token(config, spec.dtype)
    # Without these limits SGLang gives the states of gated delta networks a share of all memory that is free now.
    states = {"max_mamba_cache_size": STATES_PER_REQUEST * common["max_running_requests"], "mem_fraction_static": 0.5}
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "custom_weight_loader": ["mugrpo_megatron.cpu.sglang.load_mapped", SUMMING],
        "disable_cuda_graph": True,
        # For small models the scheduler's work takes most of a step. Overlapping it with the next step needs a core of
        # its own.
        "disable_overlap_schedule": True,
        # Requests with prompts this short gain nothing from the prefix cache, and still pay for it.
        "disable_radix_cache": spec.max_prompt_tokens <= SHARED_PREFIX_TOKENS,
        # SGLang compares the free memory at its start with that after loading the weights. It refuses to go on if more
        # than this share of the former is gone, even if another process took it, such as the learner while it loads.
        "mem_fraction_static": 0.9,
        "max_total_tokens": min(batch_tokens, max(affordable, common["context_length"])),
        **(states if has_delta(config) else {}),
    }


def kv_bytes_per_token(config: Mapping[str, Any], dtype: str) -> int:
    """The bytes that one token takes in the KV cache of a model, over all layers with attention.

    Raises UserError if `config` lacks a field that they depend on.
    """
    for name in ("num_attention_heads", "hidden_size", "num_hidden_layers"):
        if not config.get(name):
            raise UserError(
                f"config.json has no field {name!r}, without which the size of the engine's KV cache is unknown; take "
                "the file from the model's release"
            )
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    elements = 2 * (config.get("num_key_value_heads") or heads) * head_dim
    if config.get("kv_lora_rank"):  # MLA caches the latent and the rotary part of the keys
        elements = config["kv_lora_rank"] + (config.get("qk_rope_head_dim") or 0)
    return max(1, attention_layers(config)) * elements * (4 if dtype == "float32" else 2)


def engine_environment(section: EngineSection, model_dir: Path, cuda: bool, slot: EngineSlot = ALONE) -> dict[str, str]:
    """The environment variables of the host process: those of this process, with the changes that SGLang needs."""
    # SGLang would take torchrun's ranks for its own. Expandable segments break its memory saver and CUDA IPC handles.
    # With DUMPER_SERVER_PORT its debugger listens on every interface and evaluates what it gets (CVE-2026-111391).
    dropped = (*TORCHRUN_PREFIXES, *ALLOCATOR_VARIABLES, "DUMPER_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    environment |= {
        "PYTHONUNBUFFERED": "1",
        # SGLang imports every model's module that is not listed here, 200 of them, which takes seconds
        # (models/registry.py).
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models(read_model_config(model_dir))),
        # The folder of this interpreter comes first: `ninja` is installed there.
        "PATH": _joined(os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)),
    }
    # Without this variable SGLang's constructor never returns on a follower node (entrypoints/engine.py).
    if slot.joins:
        environment["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    if cuda:
        environment |= {
            # Without this variable, scoring by a teacher needs two float32 tables of 8,192 rows at once, 10 GB at a
            # vocabulary of 152,064. Newer versions of SGLang cut the tables into chunks by default
            # (layers/logits_processor.py).
            "SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK": "1",
            # torch's default is below the engine's own TMPDIR, which is removed with the engine: every start would
            # compile anew.
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            or f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}",
        }
        libraries = _joined(os.environ.get("LD_LIBRARY_PATH", ""), *cuda_runtime_folders())
        return environment | ({"LD_LIBRARY_PATH": libraries} if libraries else {})
    # A CUDA build of torch brings NCCL, which SGLang would load even without a device
    # (distributed/device_communicators/pynccl_wrapper.py). With os.devnull as its path it finds no library to load.
    environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_NCCL_SO_PATH": os.devnull}
    if section.nodes == 1:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    if section.tensor > 1:
        node_cores = sorted(os.sched_getaffinity(0))
        cores = node_cores[slot.local :: slot.local_engines] or node_cores
        local_ranks = section.tensor // section.nodes
        # The list needs an entry for every rank of the engine, although a node uses only its own ranks' entries
        # (model_executor/model_runner.py).
        bindings = [cores[rank::local_ranks] or cores for rank in range(local_ranks)] * section.nodes
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, binding)) for binding in bindings)
    return environment


def cuda_runtime_folders() -> list[str]:
    """The folders of pip's packages that hold the CUDA runtime library, which SGLang's memory saver does not find."""
    package = find_spec("nvidia")
    roots = package.submodule_search_locations or [] if package else []
    return sorted({str(file.parent) for root in roots for file in Path(root).glob("*/lib/libcudart.so.*")})


def check_allocator() -> None:
    """Raise UserError when torch's allocator uses expandable segments, whose memory another process cannot open."""
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower():
            raise UserError(
                f"{name}={os.environ[name]}: the engine cannot read the learner's weights from expandable segments; "
                "unset the variable, or remove expandable_segments from it"
            )


def _joined(*folders: str) -> str:
    return os.pathsep.join(filter(None, folders))


def _other_models(config: Mapping[str, Any]) -> list[str]:
    """The names of SGLang's model modules that it need not import, because another one defines the checkpoint's model.

    Empty if no module is found that defines it; then all are imported.

    Raises UserError if SGLang is not installed.
    """
    package = find_spec("sglang")
    if package is None or package.origin is None:
        raise UserError("SGLang is not installed, so nothing can be generated: run `mugrpo doctor --fix`")
    modules = {
        path.stem: path.read_text(encoding="utf-8")
        for path in (Path(package.origin).parent / "srt" / "models").glob("*.py")
    }
    classes = [f"class {architecture}(" for architecture in config.get("architectures") or []]
    defining = {stem for stem, text in modules.items() if any(line in text for line in classes)}
    return sorted(modules.keys() - defining) if defining else []


def training_sampling(
    rollout: RolloutSection, run: RunSection, tokenizer: PreTrainedTokenizerBase, routers: RouterShape | None
) -> Sampling:
    """The sampling parameters of training responses. `routers`: if given, the reply has the experts of every token."""
    support_ids = returns_support_ids(rollout)
    return Sampling(
        rollout.temperature,
        rollout.top_p,
        rollout.max_response_tokens,
        _stop_ids(tokenizer),
        routers=routers,
        stop=tuple(rollout.stop),
        top_k=rollout.top_k,
        support_ids=support_ids,
        sampling_masks=support_ids and rollout.top_k > sglang_compat.MOST_TOP_LOGPROBS,
        stream=_stream(run, "train"),
    )


def returns_support_ids(rollout: RolloutSection) -> bool:
    """Whether the engine returns the support ids, so that the learner's softmax runs over the same tokens."""
    return 0 < rollout.top_k <= sglang_compat.most_support_ids()


def replayed_routers(learner: LearnerSection, model: ModelSection) -> RouterShape | None:
    """The sizes of the model's routers, if the learner replays the choices that they made in the engine; else None."""
    if learner.routing_replay != "rollout":
        return None
    config = read_model_config(model.directory)
    return RouterShape(config["num_hidden_layers"] or 0, config["num_experts_per_tok"] or 0, experts_of(config))


def sampling_note(rollout: RolloutSection) -> str:
    """A note for the user if top-k or top-p sampling makes importance ratios inexact; empty if they are exact."""
    if not rollout.truncates or returns_support_ids(rollout):
        return ""
    return (
        "The engine samples from a part of the vocabulary, and engine and learner compute probabilities over the whole "
        "vocabulary, so importance ratios are not exact. To make them exact, set rollout.top_k to a number from 1 to "
        f"{sglang_compat.most_support_ids()}, and leave top_p as it is: the stage then stores the part."
    )


def held_out_sampling(
    evaluation: EvalSection, name: str, rollout: RolloutSection, run: RunSection, tokenizer: PreTrainedTokenizerBase
) -> Sampling:
    """The sampling parameters of an evaluation on the held-out set `name`; temperature 0 is greedy."""
    settings = evaluation.of(name)
    return Sampling(
        settings.temperature,
        settings.top_p,
        settings.max_tokens or rollout.max_response_tokens,
        _stop_ids(tokenizer),
        stop=tuple(rollout.stop),
        stream=_stream(run, f"eval/{name}"),
    )


def _stream(run: RunSection, name: str) -> str | None:
    return f"{run.seed}/{name}" if run.deterministic else None


def _stop_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokenizer's end-of-sequence token, or none; SGLang adds those of config.json and generation_config.json."""
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


@contextmanager
def prelaunch_host(section: EngineSection, model_dir: Path) -> Iterator[HostProcess | None]:
    """Start a host process that imports SGLang while this process imports Megatron; each import takes seconds.

    Yields None on CUDA, on a rank that starts no engine, and for an engine over several nodes. The process is gone when
    the block ends, whether an engine used it or not.
    """
    # On CUDA the learner loads first, and importing SGLang may already take device memory.
    if may_find_cuda():
        yield None
        return
    with importing_host(section, model_dir, cuda=False) as host:
        yield host


@contextmanager
def importing_host(section: EngineSection, model_dir: Path, cuda: bool) -> Iterator[HostProcess | None]:
    """Start the host process of this rank's engine, which imports SGLang during the block, and end it with the block.

    Yields None on a rank that starts no engine, and for an engine over several nodes, whose processes start only when
    its ranks have agreed on an address.
    """
    slot = slot_of_environment(section, cuda)
    if not slot.leads_engine or section.nodes > 1:
        yield None
        return
    host = HostProcess(engine_environment(section, model_dir, cuda, slot), cuda)
    try:
        yield host
    finally:
        host.end()
