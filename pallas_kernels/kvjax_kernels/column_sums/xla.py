"""Plain JAX: a tile of scores at a time, only the tiles that some query can see."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax_kernels.blocks import pad_to
from kvjax_kernels.masking import MASKED

#: Sides of a tile: larger than attention's, since there is one product to a tile.
_TILE = 512


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
    query_block, key_block = min(_TILE, length), min(_TILE, slots)
    scaled = (query.astype(jnp.float32) * head_dim**-0.5).astype(query.dtype)
    scaled = pad_to(scaled, 1, query_block, fill=0)
    positions = pad_to(query_positions, 1, query_block, fill=-1)
    # Pads give nothing: exp(score - 1e30) = 0.
    log_sum_exp = jnp.where((query_positions >= 0)[:, None], log_sum_exp, -MASKED)
    log_sum_exp = pad_to(log_sum_exp, 2, query_block, fill=-MASKED)
    key = pad_to(kv[..., :head_dim], 2, key_block, fill=0)
    key_positions = pad_to(key_positions, 2, key_block, fill=-1)
    query_blocks, key_blocks = scaled.shape[1] // query_block, key.shape[2] // key_block
    scaled = scaled.reshape(batch, query_blocks, query_block, kv_heads, group, head_dim).transpose(1, 0, 3, 4, 2, 5)
    log_sum_exp = log_sum_exp.reshape(batch, kv_heads, group, query_blocks, query_block).transpose(3, 0, 1, 2, 4)
    positions = positions.reshape(batch, query_blocks, query_block).swapaxes(0, 1)

    latest = jnp.iinfo(jnp.int32).max
    oldest = jnp.where(positions >= 0, positions, latest).min((1, 2))

    def one_block(index: jax.Array) -> jax.Array:
        keys = jax.lax.dynamic_slice_in_dim(key, index * key_block, key_block, axis=2)
        columns = jax.lax.dynamic_slice_in_dim(key_positions, index * key_block, key_block, axis=2)

        def add(block: jax.Array, total: jax.Array, *, masked: bool) -> jax.Array:
            rows = scaled[block].reshape(batch, kv_heads, group * query_block, head_dim)
            scores = jnp.einsum("bkqd,bksd->bkqs", rows, keys, preferred_element_type=jnp.float32)
            probabilities = jnp.exp(scores - log_sum_exp[block].reshape(batch, kv_heads, -1, 1))
            if masked:
                seen = columns[:, :, None] <= positions[block][:, None, :, None]
                grouped = probabilities.reshape(batch, kv_heads, group, query_block, key_block)
                probabilities = jnp.where(seen[:, :, None], grouped, 0.0).reshape(probabilities.shape)
            return total + probabilities.sum(2)

        # The first query blocks see none of it where they end before its first key. The running maximum, because a
        # block of pads at the end has no position, and must not count as one of the first.
        held = columns >= 0
        first = (jax.lax.cummax(positions.max((1, 2))) < jnp.where(held, columns, latest).min()).sum(dtype=jnp.int32)
        # The last ones see all of it, and need no mask.
        whole = jnp.maximum((oldest < columns.max()).sum(dtype=jnp.int32), first)
        total = jnp.zeros((batch, kv_heads, key_block), jnp.float32)
        total = jax.lax.fori_loop(first, whole, functools.partial(add, masked=True), total)
        total = jax.lax.fori_loop(whole, query_blocks, functools.partial(add, masked=False), total)
        return jnp.where(held, total, 0.0)

    sums = jax.lax.map(one_block, jnp.arange(key_blocks))
    return sums.transpose(1, 2, 0, 3).reshape(batch, kv_heads, -1)[:, :, :slots]
