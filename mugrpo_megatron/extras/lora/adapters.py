"""Adds, fills, turns off and gathers the adapters of a recipe with `[lora]` (protocol: `learner.model.Adapters`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mugrpo_megatron.extras.lora.low_rank import LowRank
from mugrpo_megatron.extras.lora.peft_files import adapter_files, read_adapter
from mugrpo_megatron.extras.lora.targets import Leaf, adapted_rows, row_kinds, target_kinds
from mugrpo_megatron.learner.model import PolicyModel
from mugrpo_megatron.megatron_compat import parallel_state
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.record import ADAPTER as DIRECTORY
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.families import fingerprint
from mugrpo_megatron.weights.table import ADAPTER, entries, whole_name


class LoraAdapters:
    """`learner.model.Adapters` for one learner; the protocol documents the methods."""

    def __init__(self, recipe: Recipe, architecture: Architecture) -> None:
        self._recipe, self._architecture = recipe, architecture
        section = recipe.lora
        assert section.rank is not None
        self._kinds = target_kinds(architecture, section.targets)
        self._base = fingerprint(recipe.model.directory)
        self.identity: Mapping[str, str | int] = {
            "lora_rank": section.rank,
            "lora_alpha": str(section.alpha),
            "lora_targets": " ".join(self._kinds),
            "base": self._base,
        }

    def attach(self, chunk: PolicyModel) -> None:
        """Freeze the model, and add a LowRank beside each linear layer that `lora.targets` names.

        The adapter is a sibling of the layer and not its child, so that checkpoints include it: a Megatron module saves
        its children, but a linear layer does not.
        """
        chunk.requires_grad_(False)
        table, rows, section = entries(self._architecture), adapted_rows(self._architecture), self._recipe.lora
        for name, module in list(chunk.named_modules()):
            if not isinstance(getattr(module, "weight", None), torch.nn.Parameter):
                continue
            entry = table.get(whole_name(chunk, f"{name}.weight", self._architecture))
            if entry is None or entry.row not in rows or not {*row_kinds(entry.row)} & {*self._kinds}:
                continue
            above, _, child = name.rpartition(".")
            adapter = LowRank(module, entry, self._architecture, section, self._kinds)
            chunk.get_submodule(above).add_module(f"{ADAPTER}{child}", adapter)
        if chunk.pre_process and self._recipe.learner.recompute == "full":
            # Activation recompute gives a layer gradients only if its input requires one. The output of a frozen
            # embedding does not.
            chunk.embedding.register_forward_hook(lambda _, inputs, output: output.requires_grad_())

    @torch.no_grad()
    def start(self, chunks: Sequence[PolicyModel]) -> None:
        """Set the factors at the run's start: those of the adapter in `lora.start`, or else A drawn as PEFT draws it
        (uniform within 1 / sqrt(inputs)) and B = 0."""
        section = self._recipe.lora
        start = read_adapter(section.start, self._architecture).read() if section.start else None
        for adapter in _adapters(chunks):
            for leaf in adapter.adapted():
                expert = adapter.entry.expert
                if start:
                    a, b = leaf.of_expert(start[leaf.a], start[leaf.b], expert)
                else:
                    a, b = self._drawn(leaf, expert)
                adapter.fill(leaf, a, b)

    @torch.no_grad()
    def turn_off(self, chunks: Sequence[PolicyModel]) -> None:
        """Set every B to 0, so that the adapters change nothing."""
        for adapter in _adapters(chunks):
            for factor in adapter.b.values():
                factor.zero_()

    def files(self, chunks: Sequence[PolicyModel]) -> dict[str, Any]:
        """On rank 0, the content of each of PEFT's two files, by its path below the merged weights' folder; empty on
        other ranks. Collective."""
        tensors = gather(chunks)
        section, model = self._recipe.lora, self._recipe.model
        if dist.get_rank() != 0:
            return {}
        assert section.rank is not None
        files = adapter_files(tensors, section.rank, section.alpha, self._kinds, model.path, self._base)
        return {f"{DIRECTORY}/{name}": content for name, content in files.items()}

    def _drawn(self, leaf: Leaf, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's A [rank, inputs], drawn from `run.seed` and the layer's name so that every layout has the same, and
        its B [outputs, rank], which is 0."""
        words = [self._recipe.run.seed, leaf.name, *([expert] if leaf.experts else [])]
        digest = hashlib.sha256(" ".join(map(str, words)).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        rank = self._recipe.lora.rank or 0
        a = torch.rand(rank, leaf.inputs, generator=generator)
        return (2 * a - 1) / leaf.inputs**0.5, torch.zeros(leaf.outputs, rank)


@torch.no_grad()
def gather(chunks: Sequence[PolicyModel]) -> dict[str, torch.Tensor]:
    """The whole factors of every adapter, by PEFT's names, in the host memory of every rank. Collective."""
    tensors: dict[str, torch.Tensor] = {}
    experts: dict[Leaf, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for adapter in _adapters(chunks):
        for leaf in adapter.adapted():
            a, b = adapter.whole(leaf)
            if leaf.experts:
                experts.setdefault(leaf, []).append((a, b))
            else:
                tensors |= leaf.named(a.cpu(), b.cpu())
    for leaf, here in experts.items():
        tensors |= leaf.named(*(_over_experts(torch.stack(factor)).cpu() for factor in zip(*here, strict=True)))
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list[dict[str, torch.Tensor]] = [{}] * group.size()
    dist.all_gather_object(stages, tensors, group=group)
    return {name: tensor for stage in stages for name, tensor in stage.items()}


def _adapters(chunks: Sequence[PolicyModel]) -> Iterator[LowRank]:
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, LowRank))


def _over_experts(here: torch.Tensor) -> torch.Tensor:
    """Gather one factor of all experts, [experts, ...]; `here` has this rank's experts. Collective over expert
    parallelism."""
    group = parallel_state.get_expert_model_parallel_group()
    parts = [torch.empty_like(here) for _ in range(group.size())]
    dist.all_gather(parts, here, group=group)
    return torch.cat(parts)
