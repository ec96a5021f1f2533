"""Routing replay: the routers of a mixture of experts send each token to experts that were recorded earlier.

A router's choice is discrete. After a few updates, or in an engine that rounds differently, it chooses another expert
for some tokens, and their log-probabilities jump (arXiv 2510.11370). With replay the choice is an input, like the token
ids; the weights of the chosen experts still come from the current router, which learns through them.

Megatron-core has an attribute for it, `TopKRouter.router_replay`, which this module sets to a `LayerRoutes`. Rows that
predict nothing (padding, and the last token of a sequence, after which nothing is sampled) get experts round robin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from mugrpo_megatron.learner.context import local_rows
from mugrpo_megatron.learner.groups import Ranks
from mugrpo_megatron.learner.model import policy
from mugrpo_megatron.samples import Routes, expert_type


class LayerRoutes(RouterReplay):
    """Tells one layer's router which experts to use, and records which experts the router itself would choose."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed: torch.Tensor | None = None
        """bool [t]: while recording, the rows that take `target_topk_idx` instead of the router's choice."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores [t, k] and the indices [t, k] of the experts to use, from `scores` [t, experts].

        In a forward pass the router's own choice is recorded too, for `get_recorded_indices`.
        """
        arguments = topk, num_groups, group_topk
        action = self.router_replay_action
        if action in (RouterReplayAction.RECORD, RouterReplayAction.REPLAY_FORWARD):
            assert default_compute_topk is not None
            router_choice = default_compute_topk(scores.detach(), *arguments)[1]
            self.record_indices(router_choice)
            if action == RouterReplayAction.RECORD:
                assert self.fixed is not None
                assert self.target_topk_idx is not None
                chosen = torch.where(self.fixed.unsqueeze(1), self.target_topk_idx, router_choice)
                return scores.gather(1, chosen), chosen
        return super().get_replay_topk(scores, *arguments, default_compute_topk)

    def clear_indices(self) -> None:
        super().clear_indices()
        self.fixed = None


@dataclass(frozen=True)
class Routing:
    """The experts of this rank's rows of a micro-batch, to replay or to record."""

    indices: torch.Tensor
    """int64 [t]: where each row's token stands among all tokens of the update that predict a token; -1 for rows that
    predict nothing, which get experts round robin."""
    experts: Mapping[int, torch.Tensor]
    """Number of a layer of this rank -> uint8 or uint16 [t, k], on the host: the routes to replay. With `record`
    they are round robin, and only those of rows without an index are used."""
    record: bool
    """Whether the routers choose experts for the rows with an index, and `recorded` keeps them; else they replay."""
    recorded: dict[int, torch.Tensor] = field(default_factory=dict)
    """Layer -> uint8 or uint16 [t, k], on the host: the recorded routes."""
    flips: dict[int, torch.Tensor] = field(default_factory=dict)
    """Layer -> bool [t]: whether the router's choice differs from the replayed set of experts."""

    def begin(self, chunk: torch.nn.Module) -> None:
        """Give a chunk's routers their experts, before its forward pass."""
        action = RouterReplayAction.RECORD if self.record else RouterReplayAction.REPLAY_FORWARD
        for layer, routes in layers_of(chunk).items():
            # Converted to int64 on the host, because torch has few operations on uint16.
            routes.set_target_indices(self.experts[layer].to(torch.int64).to(self.indices.device))
            routes.fixed = self.indices < 0 if self.record else None
            routes.set_router_replay_action(action)

    def end(self, chunk: torch.nn.Module, recomputes: bool) -> None:
        """Collect the routers' own choices after a chunk's forward pass.

        With `recomputes`, the backward pass will run the layers once more, so the routers keep the experts to replay.
        """
        for layer, routes in layers_of(chunk).items():
            router_choice, target = routes.get_recorded_indices(), routes.target_topk_idx
            assert router_choice is not None
            assert target is not None
            if self.record:
                self.recorded[layer] = router_choice.cpu().to(self.experts[layer].dtype)
            else:
                self.flips[layer] = (router_choice.sort().values != target.sort().values).any(-1)
            routes.record_indices(None)  # type: ignore[arg-type]  # frees the tensor
            if recomputes and not self.record:
                routes.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
            else:
                routes.clear_indices()
                routes.clear_router_replay_action()


def install(chunks: Sequence[DistributedDataParallel]) -> None:
    """Give every router a `LayerRoutes`. It is used only in a model built with `moe_enable_routing_replay`."""
    for chunk in chunks:
        for router in routers(chunk).values():
            router.router_replay = LayerRoutes()
    # Megatron's class keeps every replay of the process in a global list, which would keep a former learner's alive.
    RouterReplay.clear_global_router_replay_instances()


def clear(chunks: Sequence[torch.nn.Module]) -> None:
    """Let the routers choose experts by themselves again, after an update's last micro-batch."""
    for chunk in chunks:
        for routes in layers_of(chunk).values():
            routes.clear_indices()
            routes.clear_router_replay_action()


def layers_of(chunk: torch.nn.Module) -> dict[int, LayerRoutes]:
    """The `LayerRoutes` of a chunk's routers, by the number of their layer in the whole model, from 0."""
    return {layer: router.router_replay for layer, router in routers(chunk).items()}


def routers(chunk: torch.nn.Module) -> dict[int, TopKRouter]:
    """A chunk's routers by the number of their layer in the whole model, from 0. Dense layers have no router."""
    layers = policy(chunk).decoder.layers
    return {layer.layer_number - 1: layer.mlp.router for layer in layers if hasattr(layer.mlp, "router")}


def make_routing(
    packed: Sequence[tuple[int, int, Routes | None]],
    starts: Sequence[int],
    length: int,
    layers: Sequence[int],
    size: tuple[int, int],
    ranks: Ranks,
    record: bool,
) -> Routing:
    """Make the `Routing` of this rank's part of a packed row of `length` tokens, for its `layers`.

    With `record` no routes are read. Otherwise those of `layers` are, and a sequence without routes raises ValueError.

    Args:
        packed: first row, number of tokens and routes of each sequence in the row.
        starts: where each sequence's first token stands among all tokens of the update that predict a token.
        size: the number of experts in a layer, and the number of them that a token is sent to.
    """
    total, chosen = size
    indices = np.full(length, -1, dtype=np.int64)
    # Round robin, so that padding loads all experts alike.
    round_robin = (np.arange(length)[:, None] * chosen + np.arange(chosen)) % total
    experts = np.repeat(round_robin[None].astype(expert_type(total)), len(layers), axis=0)
    for (row, tokens, routes), start in zip(packed, starts, strict=True):
        indices[row : row + tokens - 1] = np.arange(start, start + tokens - 1)
        if not record:
            if routes is None:
                raise ValueError(
                    "some responses of an update have recorded experts to replay and others have none; set "
                    'learner.routing_replay to "learner", which records those of all responses, or to "off"'
                )
            experts[:, row : row + tokens - 1] = routes.read(layers)
    local = local_rows(length, ranks.cp, ranks.cp_size).reshape(ranks.tp_size, -1)[ranks.tp]
    return Routing(
        torch.from_numpy(indices[local]).to(ranks.device),
        {layer: torch.from_numpy(np.ascontiguousarray(experts[i, local])) for i, layer in enumerate(layers)},
        record,
    )


def gather_flips(routings: Sequence[Routing], tokens: int, layers: int, ranks: Ranks) -> dict[str, float]:
    """Count how often the routers' own choice differs from the replayed experts; returns two metrics, on every rank.

    `tokens` is the number of the update's tokens that have routes, and `layers` the number of layers with a router.
    `routes_flipped_tokens` is the fraction of the tokens for which any layer's choice differs, and `routes_flipped` the
    fraction of all choices, one for each token and layer. Collective.
    """
    table = torch.zeros(tokens, dtype=torch.int32, device=ranks.device)
    for routing in routings:
        indexed = routing.indices >= 0
        for flips in routing.flips.values():
            table[routing.indices[indexed]] += flips[indexed].int()
    if ranks.world > 1:
        dist.all_reduce(table)
    return {
        "routes_flipped_tokens": float((table > 0).double().mean()),
        "routes_flipped": float(table.double().sum()) / (tokens * layers),
    }


def gather_routes(
    routings: Sequence[Routing], tokens: int, layers: int, size: tuple[int, int], ranks: Ranks
) -> Iterator[np.ndarray]:
    """Gather the recorded experts of an update; yields uint8 or uint16 [tokens, k] for each layer, on every rank.

    Every step of the iterator is collective.
    """
    total, chosen = size
    for layer in range(layers):
        table = np.zeros((tokens, chosen), dtype=expert_type(total))
        for routing in routings:
            if layer in routing.recorded:
                indices = routing.indices.cpu().numpy()
                table[indices[indices >= 0]] = routing.recorded[layer].numpy()[indices >= 0]
        # Every choice was made on one rank; the others contribute zero bytes to the sum.
        if ranks.world > 1:
            summed = torch.from_numpy(table.view(np.uint8)).to(ranks.device)
            dist.all_reduce(summed)
            table = summed.cpu().numpy().view(table.dtype)
        yield table
