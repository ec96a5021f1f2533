"""The engine's routes on their way through a stage's shards: a column there, a file of their own once it is sealed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from mugrpo_megatron.samples import HeldRoutes, Sample

COLUMN = "routes"
SIZES = ("layers", "chosen", "width")
"""Field metadata: layers, experts of a token in each, bytes of a choice."""

UpdateRoutes = tuple[list[int], Iterator[np.ndarray]]
"""Tokens with routes of each response, and each layer's experts [T, k] of all of them."""


def add_routes(table: pa.Table, samples: Sequence[Sample]) -> pa.Table:
    """The samples' table with their routes, if they have any, each as the bytes of uint8 or uint16 [L, n, k]."""
    found = [sample.routes for sample in samples]
    if not any(found):
        return table
    held = [routes.experts for routes in found if isinstance(routes, HeldRoutes)]
    if len(held) < len(found):
        raise ValueError("all samples of a stage have the engine's routes, or none")
    (layers, _, chosen), width = held[0].shape, held[0].dtype.itemsize
    metadata = dict(zip(SIZES, map(str, (layers, chosen, width)), strict=True))
    field = pa.field(COLUMN, pa.large_binary(), nullable=False, metadata=metadata)
    values = [experts.astype(f"<u{width}", copy=False).tobytes() for experts in held]
    return table.append_column(field, pa.array(values, pa.large_binary()))


def without_routes(schema: pa.Schema) -> pa.Schema:
    """The schema of the sealed stage."""
    return schema.remove(schema.get_field_index(COLUMN)) if COLUMN in schema.names else schema


def take_routes(table: pa.Table) -> tuple[pa.Table, UpdateRoutes | None]:
    """An update's table without its routes, and the routes."""
    if COLUMN not in table.schema.names:
        return table, None
    layers, chosen, width = (int(table.schema.field(COLUMN).metadata[name.encode()]) for name in SIZES)
    cells = [np.frombuffer(value.as_buffer(), f"<u{width}") for value in table[COLUMN]]
    held = [cell.reshape(layers, -1, chosen) for cell in cells]
    each = (np.concatenate([experts[layer] for experts in held]) for layer in range(layers))
    return table.drop_columns([COLUMN]), ([experts.shape[1] for experts in held], each)
