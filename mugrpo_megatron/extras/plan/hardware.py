"""Devices, clusters, and the assumptions of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from mugrpo_megatron.cpu.sglang import replicas_of
from mugrpo_megatron.engine.placement import EngineSlot, engine_slot
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.systems import EngineSection

GIB = 1 << 30
MOST_NODES, MOST_PER_NODE = 100_000, 1024
"""Most nodes, and most devices in a node: a plan tries layouts for every divisor of their product."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device of one rank."""

    name: str
    memory: int
    """Bytes that a process can allocate on an empty device."""
    flops: float
    """bfloat16 FLOP/s of a large matrix product."""
    bandwidth: float
    """Bytes/s of a copy within the device's memory: bytes read plus bytes written."""
    cuda: bool = True


DEVICES = {
    # 0.8 of the data sheet's FLOP/s and 0.9 of its bandwidth; run_scripts/dev/bench/ten.py measures both.
    "h200": Device("h200", 139 * GIB, 790e12, 4.3e12),
    "h100": Device("h100", 79 * GIB, 790e12, 3.0e12),
    "a100": Device("a100", 79 * GIB, 250e12, 1.8e12),
    # Its data sheet: 24 GB, 165.15 dense bfloat16 TFLOP/s, 1,008 GB/s (waredb.com/processor/nvidia-geforce-rtx-4090).
    "rtx4090": Device("rtx4090", 23 * GIB, 130e12, 0.9e12),
    "b200": Device("b200", 178 * GIB, 1800e12, 7.2e12),
    "cpu": Device("cpu", 0, 50e9, 10e9, cuda=False),  # one busy core; `make_cluster` fills in the memory
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal nodes with equal devices; each device has one rank."""

    nodes: int
    per_node: int
    device: Device

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.nodes} x {self.per_node} {self.device.name}"


def engines_of(section: EngineSection, cluster: Cluster) -> int:
    """Number of engines of the whole cluster, which share one queue of prompts.

    Raises UserError, which says what to change, when the ranks or nodes cannot be divided into engines.
    """
    return _first_slot(section, cluster).engines


def replicas_of_engines(section: EngineSection, cluster: Cluster, weight_bytes: float) -> int:
    """Number of replicas, each with the `weight_bytes` bytes of weights, that an engine runs; 1 on CUDA. Raises
    UserError when the ranks or nodes cannot be divided into engines."""
    return replicas_of(section, weight_bytes, _first_slot(section, cluster).local_engines, _cores(cluster))


def _first_slot(section: EngineSection, cluster: Cluster) -> EngineSlot:
    return engine_slot(section, 0, cluster.world, 0, cluster.per_node, _cores(cluster))


def _cores(cluster: Cluster) -> int | None:
    """CPU cores of a node if engines run on CPU: those of this machine. None on CUDA."""
    return None if cluster.device.cuda else psutil.cpu_count()


def make_cluster(nodes: int, per_node: int, device: str) -> Cluster:
    """Make a cluster of `nodes` nodes with `per_node` devices each.

    Raises UserError for an unknown device, and for a cluster that is empty or above MOST_NODES x MOST_PER_NODE.
    """
    if device not in DEVICES:
        raise UserError(f"--gpu {device} is not known; choose one of {', '.join(DEVICES)}")
    for option, value, most in (("--nodes", nodes, MOST_NODES), ("--gpus-per-node", per_node, MOST_PER_NODE)):
        if not 1 <= value <= most:
            raise UserError(f"{option} {value}: takes 1 to {most:,}")
    kind = DEVICES[device]
    if not kind.cuda:
        kind = dataclasses.replace(kind, memory=psutil.virtual_memory().total // per_node)
    return Cluster(nodes, per_node, kind)


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Figures that a plan assumes; `--assume name=value` replaces one. A default without a source is our guess."""

    mean_prompt: float = 0.25
    """Mean prompt length as a share of data.max_prompt_tokens."""
    mean_response: float = 0.4
    """Mean response length as a share of rollout.max_response_tokens."""
    spread: float = 0.8
    """Standard deviation of the logarithm of response lengths, which are cut at the maximum."""
    packing: float = 0.97
    """Share of packed tokens that are not padding."""
    mfu: float = 0.4
    """Share of the device's FLOP/s that the learner's passes reach on dense models."""
    mfu_experts: float = 0.15
    """Share of the device's FLOP/s that the learner's passes reach on mixtures of experts, whose experts run one after
    another."""
    decode: float = 0.5
    """Share of the device's bandwidth that decoding reaches."""
    step_floor: float = 0.008
    """Least seconds of a decoding step: scheduling and launches."""
    verifier: float = 545.0
    """Responses/s of one verifier process; docs/rewards.md has a measured figure on short answers."""
    cores: float = 16.0
    """CPU cores for each device."""
    bridge: float = 20e9
    """Bytes/s at which weights go from learner to engines (a published 3 s for 61 GB on 8 H200)."""
    host_link: float = 50e9
    """Bytes/s between a device and pinned host memory, each way."""
    inside: float = 300e9
    """Bytes/s that each device sends to other devices of its node."""
    between: float = 45e9
    """Bytes/s that each device sends to other nodes (one 400 Gb/s port each)."""
    disk: float = 2e9
    """Bytes/s of the run directory's disk, for the whole run."""
    wake: float = 3.0
    """Seconds that an engine needs to sleep and to wake, copies of memory not included."""
    engine_start: float = 40.0
    """Seconds of an engine's start, without reading its weights: an auxiliary model starts in every stage."""
    learner_rest: float = 2.0 * GIB
    """Bytes that an offloaded learner keeps on the device: CUDA context, NCCL, what the allocator cannot free."""
    engine_rest: float = 3.0 * GIB
    """Bytes that a sleeping engine keeps on the device: CUDA context, NCCL, CUDA graphs."""
    engine_work: float = 6.0 * GIB
    """Bytes that a working engine needs besides weights and KV cache: activations of a prefill, CUDA graphs."""
    fragmentation: float = 0.05
    """Memory that the allocator cannot use, as a share of an update's bytes besides weights, gradients and moments."""


SHARES = ("mean_prompt", "mean_response", "packing", "mfu", "mfu_experts", "decode", "fragmentation")
"""Names of assumptions that are shares, so at most 1."""
MOST = {"spread": 10.0, **dict.fromkeys(SHARES, 1.0)}
LEAST, MOST_OTHERS = 1e-9, 1e18
"""Smallest value of an assumption (`fragmentation` may also be 0), and largest one if MOST has none; beyond these,
seconds and bytes overflow."""


def assume(settings: Iterable[str]) -> Assumptions:
    """The defaults with `name=value` replaced. Raises UserError for an unknown name or a value out of its range."""
    known = {field.name for field in dataclasses.fields(Assumptions)}
    rates: dict[str, float] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in known:
            raise UserError(f"--assume {setting}: write it as name=value; names are {', '.join(sorted(known))}")
        try:
            rates[name] = float(text)
        except ValueError:
            raise UserError(f"--assume {setting}: {text!r} is not a number") from None
        most = MOST.get(name, MOST_OTHERS)
        least = 0.0 if name == "fragmentation" else LEAST
        if not least <= rates[name] <= most:
            raise UserError(f"--assume {setting}: takes a number from {least:g} to {most:g}")
    return Assumptions(**rates)
