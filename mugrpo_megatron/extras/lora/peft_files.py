"""Reads and writes adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Headers are checked without importing torch. The metadata of `adapter_model.safetensors` has the fingerprint
(`weights.families.fingerprint`) of the weights that the adapter was trained on; PEFT ignores it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.lora.targets import DOWN, EXPERTS, GATE_UP, adapted_leaves, target_kinds
from mugrpo_megatron.files.json_text import read_json
from mugrpo_megatron.files.weight_file import open_weights
from mugrpo_megatron.recipe.load import short_repr
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.families import fingerprint

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST = 2**31
"""Rank and alpha have to be below this."""
OF_EXPERTS = re.compile(rf"\.{re.escape(EXPERTS)}(\.base_layer)?\.lora_")
"""Matches the name of a tensor of experts, which does not say what parameter it adapts: `target_parameters` does."""
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
    "init_lora_weights": (False, None, "gaussian", "orthogonal", "eva", True),
    "layer_replication": (None, []),
    "lora_bias": (False, None),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
}
"""Setting of PEFT -> the values that a plain adapter may have, for which the merged weight is W + alpha / r B A."""
TYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter on disk whose names and shapes fit a model."""

    directory: Path
    rank: int
    alpha: float
    kinds: tuple[str, ...]
    base: str
    """Fingerprint of the weights that the adapter was trained on; empty if the file does not name any."""

    def read(self) -> dict[str, torch.Tensor]:
        """All tensors by PEFT's names, on the host. Raises UserError for a damaged file, NaN and infinities."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.directory / WEIGHTS
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise UserError(f"{path} cannot be read ({error}); copy it again") from None
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise UserError(f"{path}: {name} holds NaN or infinity, so the adapter is damaged; copy it again")
        return tensors


def read_adapter(directory: Path, architecture: Architecture, key: str = "lora.start") -> AdapterFile:
    """Read the headers of the adapter in `directory` and check that it fits the model; errors name the setting `key`.

    Raises UserError if it is no LoRA adapter, or not a plain one (`PLAIN`), and if it does not fit: it has a layer that
    the model lacks, only one of A and B, a kind of layer in some of the model's layers only, or another shape.
    """
    where = f"{key} = {directory}"
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise UserError(f"{where}: not an adapter in PEFT's format (no {name} there); name its directory")
    config = read_json(directory / CONFIG)
    # Variants such as use_dora, also those of later versions of PEFT, must be off.
    variants = {name: (False, None) for name in config if name.startswith("use_")}
    for name, plain in (PLAIN | variants).items():
        if config.get(name, plain[-1]) not in plain:
            values = " or ".join(map(json.dumps, plain))
            raise UserError(
                f"{where}: {name} = {short_repr(config[name])}, and only plain LoRA adapters are read: train one whose "
                f"{name} is {values}"
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not (isinstance(rank, int) and isinstance(alpha, int | float) and 0 < rank < MOST and 0 < alpha < MOST):
        raise UserError(
            f"{where}: r = {short_repr(rank)} and lora_alpha = {short_repr(alpha)} are not those of an adapter: r is a "
            f"positive integer, lora_alpha a positive number; copy {CONFIG} again"
        )
    shapes, base = _header(directory / WEIGHTS)
    parameters = config.get("target_parameters") or []
    if not (isinstance(parameters, list) and all(isinstance(name, str) for name in parameters)):
        raise UserError(
            f"{where}: target_parameters = {short_repr(parameters)} is not a list of names; copy {CONFIG} again"
        )
    modules = {name.partition(".lora_")[0] for name in shapes if not OF_EXPERTS.search(name)}
    kinds = {name.rpartition(".")[2] for name in (*modules, *parameters)}
    chosen = target_kinds(architecture, sorted(kinds), where)
    expected: dict[str, tuple[int, ...]] = {}
    for leaf in adapted_leaves(architecture, chosen):
        expected |= leaf.shapes(rank)
    for name in sorted(shapes.keys() ^ expected.keys()):
        wrong = "lacks" if name in expected else f"is not of a {architecture.family} model of this config: it has"
        raise UserError(f"{where} {wrong} {name}; name an adapter of this model")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise UserError(
                f"{where}: {name} has shape {list(shapes[name])}, and the model needs {list(shape)}; name an adapter "
                "of this model"
            )
    return AdapterFile(directory, rank, float(alpha), chosen, base)


def check_base(adapter: AdapterFile, model: Path, key: str = "lora.start") -> None:
    """Raise UserError when the file names other base weights than those in `model`."""
    if adapter.base and adapter.base != fingerprint(model):
        raise UserError(
            f"{key} = {adapter.directory} was trained on other weights than {model} holds; name the model that it "
            "began with"
        )


def adapter_files(
    tensors: Mapping[str, torch.Tensor], rank: int, alpha: float, kinds: Sequence[str], model: Path, base: str
) -> dict[str, Any]:
    """Name -> content of an adapter's two files; `model` and `base`: name and fingerprint of the base weights."""
    from safetensors.torch import save

    routed = any(map(OF_EXPERTS.search, tensors))
    parameters = [name for name in kinds if routed and name in (GATE_UP, DOWN)]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": [name for name in kinds if name not in parameters],
        **({"target_parameters": [f"{EXPERTS}.{name}" for name in parameters]} if parameters else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    data = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return {CONFIG: config, WEIGHTS: save(data, metadata={"base": base})}


def _header(path: Path) -> tuple[dict[str, tuple[int, ...]], str]:
    """The shape of every tensor of a safetensors file, and the fingerprint in its metadata, "" if it has none."""
    with open_weights(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        for name, header in slices.items():
            if header.get_dtype() not in TYPES:
                raise UserError(
                    f"{path}: {name} has type {header.get_dtype()}; save the adapter as {' or '.join(TYPES)}"
                )
        shapes = {name: tuple(header.get_shape()) for name, header in slices.items()}
        return shapes, (file.metadata() or {}).get("base", "")
