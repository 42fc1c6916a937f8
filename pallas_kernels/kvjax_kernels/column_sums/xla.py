"""Plain JAX: a tile of scores at a time, only the tiles that some query can see."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax_kernels.blocks import block_sizes, pad_to


@jax.jit
def column_sums(
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
    query_block, key_block = block_sizes(length, slots)
    scaled = (query.astype(jnp.float32) * head_dim**-0.5).astype(query.dtype)
    scaled = pad_to(scaled, 1, query_block, fill=0)
    positions = pad_to(query_positions, 1, query_block, fill=-1)
    log_sum_exp = pad_to(log_sum_exp, 2, query_block, fill=0)
    key = pad_to(kv[..., :head_dim], 2, key_block, fill=0)
    key_positions = pad_to(key_positions, 2, key_block, fill=-1)
    query_blocks, key_blocks = scaled.shape[1] // query_block, key.shape[2] // key_block
    scaled = scaled.reshape(batch, query_blocks, query_block, kv_heads, group, head_dim).transpose(1, 0, 3, 4, 2, 5)
    log_sum_exp = log_sum_exp.reshape(batch, kv_heads, group, query_blocks, query_block).transpose(3, 0, 1, 2, 4)
    positions = positions.reshape(batch, query_blocks, query_block).swapaxes(0, 1)

    def one_block(index: jax.Array) -> jax.Array:
        keys = jax.lax.dynamic_slice_in_dim(key, index * key_block, key_block, axis=2)
        columns = jax.lax.dynamic_slice_in_dim(key_positions, index * key_block, key_block, axis=2)

        def add(block: jax.Array, total: jax.Array) -> jax.Array:
            rows = scaled[block].reshape(batch, kv_heads, group * query_block, head_dim)
            scores = jnp.einsum("bkqd,bksd->bkqs", rows, keys, preferred_element_type=jnp.float32)
            scores = scores.reshape(batch, kv_heads, group, query_block, key_block)
            places = positions[block][:, None, :, None]
            seen = ((columns >= 0)[:, :, None] & (columns[:, :, None] <= places))[:, :, None]
            probabilities = jnp.where(seen, jnp.exp(scores - log_sum_exp[block][..., None]), 0.0)
            return total + probabilities.sum((2, 3))

        # The first query blocks see none of it where they end before its first key. The running maximum, because a
        # block of pads at the end has no position, and must not count as one of the first.
        held = jnp.where(columns >= 0, columns, jnp.iinfo(jnp.int32).max)
        first = (jax.lax.cummax(positions.max((1, 2))) < held.min()).sum(dtype=jnp.int32)
        start = jnp.zeros((batch, kv_heads, key_block), jnp.float32)
        return jax.lax.fori_loop(first, query_blocks, add, start)

    sums = jax.lax.map(one_block, jnp.arange(key_blocks))
    return sums.transpose(1, 2, 0, 3).reshape(batch, kv_heads, -1)[:, :, :slots]
