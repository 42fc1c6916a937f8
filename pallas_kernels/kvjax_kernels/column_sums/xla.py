"""Plain JAX: a tile of scores at a time, only the tiles that some query can see."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax_kernels.blocks import choose_tile, pad_to, query_tiles
from kvjax_kernels.masking import MASKED

_LATEST = jnp.iinfo(jnp.int32).max


@jax.jit
def run(
    query: Float[Array, "B T N D"],
    kv: Float[Array, "B K S twoD"],
    log_sum_exp: Float[Array, "B N T"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B K S"],
) -> Float[Array, "B K S"]:
    """See `api.column_sums`."""
    batch, length, query_heads, head_dim = query.shape
    kv_heads, slots = kv.shape[1:3]
    group = query_heads // kv_heads

    def count(side: int) -> int:
        rows, columns = -(-length // side), -(-slots // side)
        # Queries are the last tokens, and see no later ones.
        return rows * columns - rows * (rows - 1) // 2

    tile = choose_tile(batch * kv_heads, group, length, slots, count)
    scaled = (query.astype(jnp.float32) * head_dim**-0.5).astype(query.dtype)
    scaled = query_tiles(pad_to(scaled, 1, tile.queries, fill=0), kv_heads, tile)
    parts, query_blocks = scaled.shape[:2]
    # Pads give nothing: exp(score - 1e30) = 0.
    log_sum_exp = jnp.where((query_positions >= 0)[:, None], log_sum_exp, -MASKED)
    log_sum_exp = pad_to(log_sum_exp, 2, tile.queries, fill=-MASKED)
    log_sum_exp = query_tiles(log_sum_exp.swapaxes(1, 2)[..., None], kv_heads, tile)
    positions = pad_to(query_positions, 1, tile.queries, fill=-1)
    positions = jnp.repeat(positions, kv_heads, axis=0).reshape(parts, tile.heads, query_blocks, tile.queries)
    newest = positions.max((1, 3))
    oldest = jnp.where(positions >= 0, positions, _LATEST).min((1, 3))
    key = pad_to(kv[..., :head_dim], 2, tile.keys, fill=0)
    key_blocks = key.shape[2] // tile.keys
    key = key.reshape(parts, tile.heads, -1, head_dim)
    key_positions = pad_to(key_positions, 2, tile.keys, fill=-1).reshape(parts, tile.heads, -1)

    def one_block(index: jax.Array) -> jax.Array:
        part, first = index // key_blocks, index % key_blocks * tile.keys
        none = jnp.zeros_like(part)
        keys = jax.lax.dynamic_slice(key, (part, none, first, none), (1, tile.heads, tile.keys, head_dim))[0]
        columns = jax.lax.dynamic_slice(key_positions, (part, none, first), (1, tile.heads, tile.keys))[0]

        def add(block: jax.Array, total: jax.Array, *, masked: bool) -> jax.Array:
            scores = jnp.einsum("hqd,hsd->hqs", scaled[part, block], keys, preferred_element_type=jnp.float32)
            probabilities = jnp.exp(scores - log_sum_exp[part, block])
            if masked:
                seen = columns[:, None] <= positions[part, :, block, :, None]
                grouped = probabilities.reshape(tile.heads, group, tile.queries, tile.keys)
                probabilities = jnp.where(seen[:, None], grouped, 0.0).reshape(probabilities.shape)
            return total + probabilities.sum(1)

        # The first query blocks see none of it where they end before its first key. The running maximum, because a
        # block of pads at the end has no position, and must not count as one of the first.
        held = columns >= 0
        first_block = jax.lax.cummax(newest[part]) < jnp.where(held, columns, _LATEST).min()
        first_block = first_block.sum(dtype=jnp.int32)
        # Behind the last one that does not see all of it, none needs a mask.
        whole = jnp.where(
            oldest[part] < columns.max(), jnp.arange(1, query_blocks + 1, dtype=jnp.int32), first_block
        ).max()
        total = jnp.zeros((tile.heads, tile.keys), jnp.float32)
        total = jax.lax.fori_loop(first_block, whole, functools.partial(add, masked=True), total)
        total = jax.lax.fori_loop(whole, query_blocks, functools.partial(add, masked=False), total)
        return jnp.where(held, total, 0.0)

    sums = jax.lax.map(one_block, jnp.arange(parts * key_blocks, dtype=jnp.int32))
    sums = sums.reshape(parts, key_blocks, tile.heads, tile.keys).swapaxes(1, 2)
    return sums.reshape(batch, kv_heads, -1)[:, :, :slots]
