"""Plain JAX: XLA's own gather and scatter, a chunk of rows at a time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax_kernels.blocks import pad_to
from kvjax_kernels.compact_in_place.paths import physical

# Rows of each head that move at a time: what is read before it is written is all that lies in memory twice.
_CHUNK = 256


def run(pages: Float[Array, "P R W"], table: Int[Array, "H N"], source: Int[Array, "H C"]) -> Float[Array, "P R W"]:
    """See `api.compact_in_place`."""
    number, size, width = pages.shape
    count = source.shape[1]
    if count == 0:
        return pages
    chunk = min(_CHUNK, count)
    source = pad_to(source, 1, chunk, fill=-1)
    slots = jax.lax.broadcasted_iota(jnp.int32, source.shape, 1)
    moved_from = physical(table, source, size)
    # A slot that keeps what it holds has a target past the end, which is dropped; each one of its own.
    nowhere = number * size + jnp.arange(source.size, dtype=jnp.int32).reshape(source.shape)
    moved_to = jnp.where(moved_from >= 0, physical(table, slots, size), nowhere)

    def move(index: jax.Array, rows: jax.Array) -> jax.Array:
        # Later chunks move rows of later slots: none of theirs is overwritten.
        here = jax.lax.dynamic_slice_in_dim(moved_from, index * chunk, chunk, axis=1).reshape(-1)
        there = jax.lax.dynamic_slice_in_dim(moved_to, index * chunk, chunk, axis=1).reshape(-1)
        taken = rows.at[jnp.maximum(here, 0)].get(mode="promise_in_bounds")
        return rows.at[there].set(taken, mode="drop", unique_indices=True)

    rows = jax.lax.fori_loop(0, source.shape[1] // chunk, move, pages.reshape(number * size, width))
    return rows.reshape(pages.shape)
