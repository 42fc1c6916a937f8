"""Blockwise attention in plain JAX, masked by position."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax_kernels.blocks import choose_tile, pad_to
from kvjax_kernels.prefill_attention.xla import KeyBlocks, blockwise


@functools.partial(jax.jit, static_argnames="window")
def run(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B K S D"],
    value: Float[Array, "B K S D"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B K S"],
    *,
    window: int | None,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """See `api.extend_attention`."""
    batch, length, query_heads, _ = query.shape
    kv_heads, slots = key.shape[1:3]
    tile = choose_tile(
        batch * kv_heads, query_heads // kv_heads, length, slots, lambda side: -(-length // side) * -(-slots // side)
    )
    held = (key_positions >= 0)[..., None]
    key, value = (jnp.where(held, x, jnp.zeros((), x.dtype)) for x in (key, value))
    query_positions = pad_to(query_positions, 1, tile.queries, fill=-1)
    query_positions = jnp.repeat(query_positions, kv_heads, axis=0).reshape(-1, tile.heads, query_positions.shape[1])
    key_positions = pad_to(key_positions, 2, tile.keys, fill=-1)
    key_positions = key_positions.reshape(-1, tile.heads, key_positions.shape[2])

    def mask(part: jax.Array, block: jax.Array, key_start: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(query_positions[part], block * tile.queries, tile.queries, axis=1)
        columns = jax.lax.dynamic_slice_in_dim(key_positions[part], key_start, tile.keys, axis=1)
        distance = rows[:, :, None] - columns[:, None, :]
        inside = (distance >= 0) & (columns >= 0)[:, None, :]
        if window is not None:
            inside &= distance <= window
        return inside[:, None]

    def key_blocks(block: jax.Array) -> KeyBlocks:
        first = jnp.zeros_like(block)
        return KeyBlocks(first, first, jnp.full_like(block, key_positions.shape[2] // tile.keys))

    return blockwise(query, key, value, tile, mask, key_blocks)
