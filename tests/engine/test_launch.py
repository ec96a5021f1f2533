"""SGLang's arguments and environment that follow from a recipe."""

from __future__ import annotations

import ast
import os
import re
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from mugrpo_megatron.checks.engines import DETERMINISTIC_ATTENTION
from mugrpo_megatron.cpu.sglang import most_kv_bytes
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.engine import launch, sglang_compat
from mugrpo_megatron.engine.launch import (
    EARLIER_STARTS,
    EngineSpec,
    check_allocator,
    check_extra,
    engine_arguments,
    engine_environment,
    held_out_sampling,
    kv_bytes_per_token,
    replayed_routers,
    sampling_note,
    starts_before,
    training_sampling,
)
from mugrpo_megatron.engine.placement import EngineSlot, engine_slot
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.recipe.policy import RolloutSection
from mugrpo_megatron.recipe.scoring import EvalSection
from mugrpo_megatron.recipe.sections import RunSection
from mugrpo_megatron.recipe.systems import EngineSection
from tests import models
from tests.engine.tiny import spec
from tests.refusals import refuses


def half(checkpoint: Path, **engine: object) -> EngineSpec:
    """`spec` in bfloat16, as engines on CUDA need it."""
    return replace(spec(checkpoint, **engine), dtype="bfloat16")


def test_torchrun_does_not_leak_into_the_engine(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("DUMPER_SERVER_PORT", "1234")
    monkeypatch.setenv("HF_HOME", "/somewhere")
    environment = engine_environment(EngineSection(), checkpoint, cuda=False)
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & environment.keys()
    assert not {"TORCHELASTIC_RUN_ID", "DUMPER_SERVER_PORT"} & environment.keys()
    assert environment["HF_HOME"] == "/somewhere"


@pytest.mark.parametrize("path", ["/usr/bin:/bin", None])
def test_the_engine_finds_the_tools_of_its_interpreter_first(
    path: str | None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang compiles kernels with the ninja that pip has put next to python."""
    monkeypatch.delenv("PATH")
    if path:
        monkeypatch.setenv("PATH", path)
    found = engine_environment(EngineSection(), checkpoint, cuda=False)["PATH"]
    assert found == f"{os.path.dirname(sys.executable)}:{path or os.defpath}"


@pytest.mark.parametrize("before", ["/opt/lib", None])
def test_the_memory_saver_finds_pip_s_cuda_runtime(
    before: str | None, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cu13" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcudart.so.13").touch()
    spec = ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    whole = launch.find_spec
    monkeypatch.setattr(launch, "find_spec", lambda name: spec if name == "nvidia" else whole(name))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    if before:
        monkeypatch.setenv("LD_LIBRARY_PATH", before)
    found = engine_environment(EngineSection(), checkpoint, cuda=True)["LD_LIBRARY_PATH"]
    assert found == (f"{before}:{folder}" if before else str(folder))
    assert engine_environment(EngineSection(), checkpoint, cuda=False).get("LD_LIBRARY_PATH") == before


def test_nothing_is_made_up_where_pip_has_no_cuda_runtime(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty entry of the variable would be the current directory."""
    whole = launch.find_spec
    monkeypatch.setattr(launch, "find_spec", lambda name: None if name == "nvidia" else whole(name))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert "LD_LIBRARY_PATH" not in engine_environment(EngineSection(), checkpoint, cuda=True)


def test_on_cuda_logprobs_are_chunked_and_compiled_kernels_outlive_the_engine(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environment = engine_environment(EngineSection(), checkpoint, cuda=True)
    assert environment["SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK"] == "1"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/torchinductor_{os.getuid()}"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/kept")
    assert engine_environment(EngineSection(), checkpoint, cuda=True)["TORCHINDUCTOR_CACHE_DIR"] == "/kept"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_reach_no_engine_and_are_refused_in_the_learner(
    name: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for harmless in ("max_split_size_mb:128", "expandable_segments:False"):
        monkeypatch.setenv(name, harmless)
        check_allocator()
    monkeypatch.setenv(name, "max_split_size_mb:128,expandable_segments: True")
    assert name not in engine_environment(EngineSection(), checkpoint, cuda=True)
    refuses(rf"{name}=.*unset the variable", check_allocator)


def test_only_the_checkpoint_s_architecture_is_imported(checkpoint: Path) -> None:
    left_out = engine_environment(EngineSection(), checkpoint, cuda=False)["SGLANG_DISABLED_MODEL_ARCHS"].split(",")
    assert "llama" in left_out
    assert "qwen2" not in left_out


def test_an_engine_of_several_nodes_is_not_bound_to_loopback(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert engine_environment(EngineSection(), checkpoint, cuda=False)["GLOO_SOCKET_IFNAME"] == "lo"
    wide = spec(checkpoint, tensor=4, nodes=2).section
    first, second = (engine_environment(wide, checkpoint, cuda=False, slot=slot) for slot in node_slots(wide))
    for environment in (first, second):
        assert environment["GLOO_SOCKET_IFNAME"] == "eth0"
        bindings = environment["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
        assert len(bindings) == 4
        assert bindings[:2] == bindings[2:], "each node gives its own ranks all of its cores"
    assert "SGLANG_BLOCK_NONZERO_RANK_CHILDREN" not in first
    assert second["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] == "0"


def test_each_node_of_an_engine_has_its_number(checkpoint: Path) -> None:
    wide = half(checkpoint, tensor=4, nodes=2)
    nodes = [engine_arguments(wide, checkpoint, cuda=True, slot=slot) for slot in node_slots(wide.section)]
    assert [(node["nnodes"], node["node_rank"], node["tp_size"]) for node in nodes] == [(2, 0, 4), (2, 1, 4)]
    assert nodes[0] == {**nodes[1], "node_rank": 0}, "and nothing else differs"


def node_slots(wide: EngineSection) -> list[EngineSlot]:
    """Slots of the leader and of the follower node, on two nodes of two ranks."""
    return [engine_slot(wide, rank, 4, local_rank=0, local_world=2, cores=None) for rank in (0, 2)]


def test_the_prefix_cache_is_off_where_prompts_are_too_short_to_share(checkpoint: Path) -> None:
    for tokens, disabled in ((32, True), (33, False)):
        arguments = engine_arguments(replace(spec(checkpoint), max_prompt_tokens=tokens), checkpoint, cuda=False)
        assert arguments["disable_radix_cache"] is disabled


def test_extra_arguments_come_last(checkpoint: Path) -> None:
    extra = {"cuda_graph_max_bs_decode": 8, "kv_cache_dtype": "fp8_e5m2"}
    arguments = engine_arguments(half(checkpoint, extra=extra, memory_fraction=0.5), checkpoint, cuda=True)
    assert {**extra, "mem_fraction_static": 0.5}.items() <= arguments.items()


def test_kv_bytes_of_qwen2_5_7b() -> None:
    config = {"num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
    assert kv_bytes_per_token(config, "bfloat16") == 57_344
    refuses("no field 'hidden_size'", kv_bytes_per_token, {"num_attention_heads": 4}, "bfloat16")


def test_the_cpu_cache_is_bounded(checkpoint: Path) -> None:
    arguments = engine_arguments(spec(checkpoint, max_running_requests=100_000), checkpoint, cuda=False)
    assert arguments["max_total_tokens"] * 2 * 2 * 2 * 16 * 4 <= most_kv_bytes(psutil.virtual_memory().total)
    assert engine_arguments(spec(checkpoint), checkpoint, cuda=False)["max_total_tokens"] == 64 * (232 + 8)


def test_states_of_gated_delta_networks_do_not_depend_on_the_memory_that_is_free(tmp_path: Path) -> None:
    models.save_model(tmp_path, "qwen3_5_text")
    arguments = engine_arguments(spec(tmp_path, max_running_requests=8), tmp_path, cuda=False)
    assert arguments["max_mamba_cache_size"] == 4 * 8


def test_the_routers_are_those_of_the_model_on_this_machine(tmp_path: Path) -> None:
    """A model of the hub is named by its path, and lies elsewhere."""
    snapshot = tmp_path / "snapshot"
    models.save_model(snapshot, "qwen3_moe")
    wanted = load_recipe(None, ["model.path=owner/name", "learner.routing_replay=rollout"])
    wanted = wanted.model_copy(update={"model": wanted.model.at(snapshot)})
    routers = replayed_routers(wanted.learner, wanted.model)
    assert routers
    assert routers.layers > 0
    assert routers.experts > routers.top_k > 0


def test_a_deterministic_engine_and_its_streams(checkpoint: Path) -> None:
    tokenizer, rollout, run = build_arithmetic_tokenizer(), RolloutSection(), RunSection(deterministic=True, seed=3)
    arguments = engine_arguments(replace(half(checkpoint), deterministic=True), checkpoint, cuda=True)
    assert arguments["enable_deterministic_inference"]
    assert "enable_deterministic_inference" not in engine_arguments(half(checkpoint), checkpoint, cuda=True)
    assert training_sampling(rollout, run, tokenizer, None).stream == "3/train"
    assert held_out_sampling(EvalSection(), "arithmetic", rollout, run, tokenizer).stream == "3/eval/arithmetic"
    assert training_sampling(rollout, RunSection(), tokenizer, None).stream is None


@pytest.mark.parametrize(
    ("top_k", "new", "keep", "masked"),
    [(0, True, False, False), (64, False, True, False), (64, True, True, False), (65, False, False, False),
     (65, True, True, True), (4096, True, True, True), (4097, True, False, False)],
)  # fmt: skip
def test_a_stage_keeps_what_the_engine_can_return(
    top_k: int, new: bool, keep: bool, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_compat, "is_new", lambda: new)
    rollout = RolloutSection(max_response_tokens=9, top_k=top_k, top_p=0.9)
    sampling = training_sampling(rollout, RunSection(), build_arithmetic_tokenizer(), None)
    assert (sampling.support_ids, sampling.sampling_masks) == (keep, masked)
    assert (f"rollout.top_k to a number from 1 to {4096 if new else 64}," in sampling_note(rollout)) == (not keep)


def test_the_deterministic_backends_are_those_of_the_installed_sglang() -> None:
    package = find_spec("sglang")
    assert package
    assert package.origin
    srt = Path(package.origin).parent / "srt"
    sources = [path.read_text() for path in (srt / "server_args.py", *(srt / "arg_groups").glob("*.py"))]
    pattern = r"^DETERMINISTIC_ATTENTION_BACKEND_CHOICES = (\[[^\]]*\])"
    [listed] = [one for source in sources for one in re.findall(pattern, source, re.MULTILINE)]
    ours = set(DETERMINISTIC_ATTENTION) - {"auto"}
    others = set(ast.literal_eval(listed)) - ours
    assert others <= {"ascend", "fa4", "intel_xpu"}, "all of them but those of other accelerators"
    assert ours <= set(ast.literal_eval(listed))


def test_only_an_engine_after_another_process_takes_another_stream(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    assert starts_before(log) == 0
    log.touch()
    drawn = {starts_before(log) for _ in range(50)}
    assert len(drawn) > 20
    assert min(drawn) >= 1
    assert 2**31 + 1_000_003 * EARLIER_STARTS < 2**32, "numpy takes no larger seed"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("tp_size", "decided by engine.tensor; set that instead"),
        ("quantization", "decided by engine.quantization"),
        ("preferred_sampling_params", r"decided by \[rollout\]"),
        ("load_format", "weight sync depends on it"),
        ("port", "process depends on it"),
        ("ep_size", "checking the engine's weights depends on it"),
        ("disaggregation_mode", "opening no port beyond the machine depends on it"),
        ("enable_custom_logit_processor", "opening no port beyond the machine depends on it"),
    ],
)
def test_an_argument_of_sglang_that_is_decided_elsewhere_is_refused(name: str, sentence: str) -> None:
    refuses(rf"engine\.extra\.{name}.*{sentence}", check_extra, {"chunked_prefill_size": 4096, name: 1})
    check_extra({"chunked_prefill_size": 4096, "kv_cache_dtype": "fp8_e5m2"})
