"""Where rows of pages lie, and where they go, as the in-place kernels take it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax_kernels.blocks import pad_to


class Paths(NamedTuple):
    """The way of each row, by tiles of consecutive slots of a head; rows are counted through all pages.

    Attributes:
        source: [H, tiles, tile], the row to read for each slot: its own where the slot keeps what it holds. Slots of
            a chunk that is not written repeat a row that the tile reads anyway.
        targets: [H, tiles, chunks], the first row of each chunk of slots, or -1 where all of it keeps what it holds.
        moves: [H, tiles], 1 where some chunk is written, else 0.
    """

    source: Int[Array, "H tiles tile"]
    targets: Int[Array, "H tiles chunks"]
    moves: Int[Array, "H tiles"]


def physical(table: Int[Array, "H N"], slots: Int[Array, "H C"], size: int) -> Int[Array, "H C"]:
    """The row, counted through all pages, of each head's slots; -1 for negative slots and those without a page."""
    index = jnp.minimum(jnp.maximum(slots, 0) // size, table.shape[1] - 1)
    page = jnp.take_along_axis(table, index, axis=1)
    known = (slots >= 0) & (slots < table.shape[1] * size) & (page >= 0)
    return jnp.where(known, page * size + jnp.maximum(slots, 0) % size, -1).astype(jnp.int32)


def paths_of(table: Int[Array, "H N"], source: Int[Array, "H C"], *, size: int, tile: int, chunk: int) -> Paths:
    """See `Paths`.

    Args:
        table: see `api.compact_in_place`.
        source: see there.
        size: slots of a page.
        tile: slots that are read before they are written.
        chunk: slots that are written together; it divides `tile` and `size`.
    """
    heads = source.shape[0]
    padded = pad_to(source.astype(jnp.int32), 1, tile, fill=-1)
    own = jax.lax.broadcasted_iota(jnp.int32, padded.shape, 1)
    place = physical(table, own, size)
    rows = jnp.where(padded >= 0, physical(table, padded, size), place)
    chunks = (heads, -1, tile // chunk, chunk)
    rows, place = rows.reshape(chunks), place.reshape(chunks)
    written = (rows != place).any(-1)
    some = jnp.where(written[..., None], rows, -1).max((2, 3))
    return Paths(
        source=jnp.where(written[..., None], rows, some[:, :, None, None]).reshape(heads, -1, tile),
        targets=jnp.where(written, place[..., 0], -1),
        moves=written.any(-1).astype(jnp.int32),
    )
