"""The oracle: the slots of all heads gathered, and put."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def run(pages: Float[Array, "P R W"], table: Int[Array, "H N"], source: Int[Array, "H C"]) -> Float[Array, "P R W"]:
    """See `api.compact_in_place`; the slots of all heads are gathered at once."""
    number, size, _ = pages.shape
    count = table.shape[1] * size
    slots = jnp.arange(count, dtype=jnp.int32)[None]
    wanted = jnp.pad(source, ((0, 0), (0, count - source.shape[1])), constant_values=-1)
    wanted = jnp.where(wanted >= 0, wanted, slots)
    heads = jnp.arange(table.shape[0], dtype=jnp.int32)[:, None]
    held = pages[table].reshape(table.shape[0], count, -1)
    moved = held[heads, wanted].reshape(*table.shape, *pages.shape[1:])
    # A head's missing pages are written nowhere.
    return pages.at[jnp.where(table >= 0, table, number)].set(moved, mode="drop")
