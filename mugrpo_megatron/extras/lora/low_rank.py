"""The adapter of one parallel linear layer: A and B of each Hugging Face layer in it, sharded as the layer is.

With tensor parallelism, the adapter of a column-parallel layer has all of A on every rank and a part of B's rows. That
of a row-parallel layer has a part of A's columns and all of B. Ranks exchange only u = A x, which has `rank` numbers
for a token. In a column-parallel layer each rank computes u for its part of the sequence, and the parts are gathered.
In a row-parallel layer each rank computes its summand of u, the sum is scattered over the sequence, and each rank
applies B to its part.

In layers of experts, Megatron's dispatcher moves the tokens: a rank has all tokens of its experts, and the dispatcher
sums outputs and the inputs' gradients over the tensor parallel ranks. There, ranks exchange only the gradient of the
factor that every rank has whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from mugrpo_megatron.extras.lora.targets import Leaf, leaves_of
from mugrpo_megatron.megatron_compat import make_sharded_tensors_for_checkpoint, tensor_parallel
from mugrpo_megatron.recipe.policy import LoraSection
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.table import Entry, split_to_hf


def merge(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """W + scale B A for W [m, n], A [r, n] and B [m, r]: in float32 on a CPU; on CUDA rounded once to W's dtype."""
    # On CUDA, tensor cores add in float32 and round at the end, so no copies in float32 are needed, and a merge takes 8
    # bytes of memory for each parameter instead of 28.
    if weight.is_cuda:
        return torch.addmm(weight, b, a, alpha=scale)
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)


class LowRank(torch.nn.Module):
    """The adapter of a Megatron linear layer, `linear`, whose weight is the entry `entry` of `weights.table`.

    In the layer's product, `_with_merged` replaces W by W + scale B A in the model's dtype, so that it computes as the
    engine does. A hook on the layer's output gives A and B their gradients. Nothing else of the layer changes.
    """

    _linear: Any

    def __init__(
        self, linear: Any, entry: Entry, architecture: Architecture, section: LoraSection, kinds: Sequence[str]
    ) -> None:
        super().__init__()
        assert section.rank is not None
        self.entry, self.architecture, self.section = entry, architecture, section
        self.scale = section.alpha / section.rank
        self.by_rows = entry.row.split == "rows"
        self.group, self.sequence = linear.tp_group, linear.sequence_parallel and not entry.of_expert
        weight = linear.weight
        self.leaves = leaves_of(entry.row, entry.layer, architecture, kinds)
        rows = [part.numel() // weight.shape[1] for part in split_to_hf(entry, weight, architecture)]
        self.rows = [sum(rows)] if entry.of_expert else rows
        self.a, self.b = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        for leaf, count in zip(self.leaves, self.rows, strict=True):
            if leaf.kind in kinds:
                self.a[leaf.kind] = torch.nn.Parameter(weight.new_empty(section.rank, weight.shape[1]))
                self.b[leaf.kind] = torch.nn.Parameter(weight.new_zeros(leaf.shape_of_b(count, section.rank)))
        for parameter in (self.b if self.by_rows else self.a).values():
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, self._axis(parameter), 1)
        for parameter in (self.a if self.by_rows else self.b).values():
            parameter.sequence_parallel = self.sequence  # if true, its gradient is of this rank's part of the sequence
        for parameter in (*self.a.values(), *self.b.values()):
            # Megatron reduces a gradient over all data parallel ranks, and with `allreduce` false, which an expert's
            # weight has, only over the ranks that hold the same expert.
            parameter.allreduce = weight.allreduce
        object.__setattr__(self, "_linear", linear)  # not as a submodule, whose parameters would count as this module's
        weight.merged = self.merged  # a sync and a save take this merged weight instead of the frozen one
        linear.register_forward_hook(lambda _, inputs, output: (self(inputs[0], output[0]), output[1]))
        linear._forward_impl = partial(self._with_merged, linear._forward_impl)

    def adapted(self) -> list[Leaf]:
        """The Hugging Face layers in this Megatron layer that have an adapter, in order."""
        return [leaf for leaf in self.leaves if leaf.kind in self.a]

    @torch.no_grad()
    def fill(self, leaf: Leaf, a: torch.Tensor, b: torch.Tensor) -> None:
        """Copy this rank's shard of a layer's whole factors, A [rank, inputs] and B [outputs, rank]."""
        own, size, rank = self.b[leaf.kind], self.group.size(), self.group.rank()
        whole = b.reshape(*own.shape[:-2], -1, own.shape[-1])
        self.a[leaf.kind].copy_(a if self.by_rows else a.chunk(size, dim=1)[rank])
        own.copy_(whole.chunk(size, dim=-2)[rank] if self.by_rows else whole)

    @torch.no_grad()
    def whole(self, leaf: Leaf) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a layer's whole factors, which `fill` takes; collective over the tensor parallel ranks."""
        a, b = self.a[leaf.kind].detach(), self.b[leaf.kind].detach()
        part = b if self.by_rows else a
        parts = [torch.empty_like(part) for _ in range(self.group.size())]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        gathered = torch.cat(parts, dim=self._axis(part))
        return (a, gathered.flatten(0, -2)) if self.by_rows else (gathered, b.flatten(0, -2))

    def _axis(self, factor: torch.Tensor) -> int:
        """The dimension along which tensor parallelism divides `factor`, B of a column-parallel layer or A of a
        row-parallel one."""
        return factor.dim() - 2 if self.by_rows else 1

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the layer's output y [t, 1, m] unchanged; in backward the factors get their gradients from that of y
        and from the input x [t, 1, n]."""
        u = self._down(x.detach())  # detached: x gets its gradient through the merged matrix
        b = [factor.flatten(0, -2) for factor in self.b.values()]
        if self.entry.of_expert and not self.by_rows:
            b = [self._summed(factor) for factor in b]
        return _Up.apply(y, u, self, *b)

    def _down(self, x: torch.Tensor) -> torch.Tensor:
        """Returns u = A x of all layers that are fused here, [t, 1, layers * rank], gathered or scattered for B."""
        a, regions = torch.cat(list(self.a.values())), tensor_parallel
        if self.entry.of_expert:
            return x @ (self._summed(a) if self.by_rows else a).T
        u = x @ a.T
        if not self.sequence:
            return u  # without sequence parallelism there is no tensor parallelism: this rank has the whole sum
        if self.by_rows:
            return regions.gather_from_sequence_parallel_region(u, tensor_parallel_output_grad=True, group=self.group)
        return regions.reduce_scatter_to_sequence_parallel_region(u, group=self.group)

    def _summed(self, factor: torch.Tensor) -> torch.Tensor:
        """Return a factor that every tensor parallel rank has whole; its gradient is summed over these ranks."""
        return tensor_parallel.copy_to_tensor_model_parallel_region(factor, group=self.group)

    def parts(self, y: torch.Tensor) -> list[torch.Tensor]:
        """Split this rank's outputs [..., m] into those of each Hugging Face layer, [..., its rows]."""
        if self.entry.row.form == "qkv":
            groups = self.rows[1] // self.architecture.transformer["kv_channels"]  # key/value heads on this rank
            by_group = y.unflatten(-1, (groups, -1)).split([rows // groups for rows in self.rows], dim=-1)
            return [part.flatten(-2) for part in by_group]
        return list(y.split(self.rows, dim=-1))

    @torch.no_grad()
    def merged(self) -> torch.Tensor:
        """This rank's shard of W + scale B A, added in float32 and rounded once, layer by layer."""
        weight = self._linear.weight
        out = torch.empty_like(weight)
        pairs = zip(*(split_to_hf(self.entry, tensor, self.architecture) for tensor in (out, weight)), strict=True)
        for leaf in self.leaves:
            b = self.b[leaf.kind].view(leaf.tensors, -1, self.b[leaf.kind].shape[-1]) if leaf.kind in self.b else None
            for index, (target, part) in enumerate(islice(pairs, leaf.tensors)):
                if b is not None:
                    whole = part.reshape(-1, weight.shape[1])
                    part = merge(whole, self.a[leaf.kind], b[index], self.scale).view(part.shape)
                target.copy_(part)
        return out

    def _with_merged(
        self, product: Callable[..., torch.Tensor], input: torch.Tensor, weight: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Multiply the layer's input with the merged matrix. Backward merges again, so no merged matrix is kept."""
        merged = self.merged()
        place = merged.data_ptr()

        def pack(tensor: torch.Tensor) -> torch.Tensor | None:
            return None if tensor.data_ptr() == place else tensor

        def unpack(tensor: torch.Tensor | None) -> torch.Tensor:
            return self.merged() if tensor is None else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return product(input=input, weight=merged, **options)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the factors as Megatron's sharded tensors; the factor that tensor parallelism divides is sharded."""
        name, factors = ("b", self.b) if self.by_rows else ("a", self.a)
        axes = {f"{name}.{kind}": self._axis(factor) for kind, factor in factors.items()}
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state, prefix, axes, sharded_offsets, tp_group=self.group, dp_cp_group=(metadata or {})["dp_cp_group"]
        )


class _Up(torch.autograd.Function):
    """Returns y, which already contains scale B u; backward returns the gradients of u and B beside that of y."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, u: torch.Tensor, adapter: LowRank, *b: torch.Tensor) -> torch.Tensor:
        ctx.adapter = adapter
        ctx.save_for_backward(u, *b)
        return y.view_as(y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """dB = scale dy^T u, du = scale dy B."""
        u, *b = ctx.saved_tensors
        adapter, dy = ctx.adapter, grads[0]
        parts = [part for leaf, part in zip(adapter.leaves, adapter.parts(dy), strict=True) if leaf.kind in adapter.b]
        du = torch.cat([part @ factor for part, factor in zip(parts, b, strict=True)], dim=-1).mul_(adapter.scale)
        db = [
            (part.flatten(0, -2).T @ activations.flatten(0, -2)).mul_(adapter.scale)
            for part, activations in zip(parts, u.chunk(len(b), dim=-1), strict=True)
        ]
        return dy, du, None, *db
