"""Which tiles of queries by keys there is something to compute in."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

#: The position of an empty slot: past every query.
NOWHERE = jnp.iinfo(jnp.int32).max


class Tiles(NamedTuple):
    """Which tiles some query can see; the kernel loads and computes no others.

    Attributes:
        first: [B, K, key blocks], the first block of queries that sees something of the keys.
        last: [B], the last block that holds a query; -1 where there is none.
        last_keys: [B, K], the last block of keys that some query sees, 0 where there is none.
    """

    first: Int[Array, "B K blocks"]
    last: Int[Array, "B"]
    last_keys: Int[Array, "B K"]


def visible_tiles(
    query_positions: Int[Array, "B T"], columns: Int[Array, "B K S"], *, query_block: int, key_block: int
) -> Tiles:
    """The tiles to compute; both axes are whole blocks, and empty slots stand past every query."""
    batch, kv_heads = columns.shape[:2]
    newest = query_positions.reshape(batch, -1, query_block).max(-1)
    oldest = columns.reshape(batch, kv_heads, -1, key_block).min(-1)
    # The running maximum, because a block of pads has no position, and must not count as one of the first.
    reached = jax.lax.cummax(newest, axis=1)
    first = (reached[:, None, None, :] < oldest[..., None]).sum(-1, dtype=jnp.int32)
    blocks = jnp.arange(newest.shape[1], dtype=jnp.int32)[None]
    last = jnp.where(newest >= 0, blocks, -1).max(-1)
    key_blocks = jnp.arange(oldest.shape[2], dtype=jnp.int32)[None, None]
    last_keys = jnp.where(first <= last[:, None, None], key_blocks, 0).max(-1)
    return Tiles(first, last, last_keys)
