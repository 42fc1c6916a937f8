"""Blockwise attention in plain JAX: one block of queries at a time walks over the keys it can see.

The running maximum and sum are those of FlashAttention (arXiv 2205.14135). Memory beside the inputs is one
tile of scores; the time is that of the blocks that some query of the row can see.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax_kernels.blocks import block_sizes, pad_to
from kvjax_kernels.masking import MASKED


class _KeyBlocks(NamedTuple):
    """The key blocks that a block of queries looks at.

    Attributes:
        first: the first one.
        masked: the first of those that need the mask; all before are seen whole.
        end: the one after the last.
    """

    first: jax.Array
    masked: jax.Array
    end: jax.Array


# Jitted, as the other operations in plain JAX: what all layers of a model call is traced once.
@functools.partial(jax.jit, static_argnames="window")
def prefill_attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    *,
    window: int | None,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """See `api.prefill_attention`. Blocks outside the triangle, or the window's band, are not computed."""
    query_block, key_block = block_sizes(query.shape[1], key.shape[1])

    def key_blocks(block: jax.Array) -> _KeyBlocks:
        end = ((block + 1) * query_block - 1) // key_block + 1
        if window is None:
            return _KeyBlocks(jnp.zeros_like(end), block * query_block // key_block, end)
        first = jnp.maximum(block * query_block - window, 0) // key_block
        return _KeyBlocks(first, first, end)

    def seen(rows: jax.Array, columns: jax.Array) -> jax.Array:
        distance = rows[:, None] - columns[None, :]
        inside = distance >= 0 if window is None else (distance >= 0) & (distance <= window)
        return inside[None, None, None]

    def mask(block: jax.Array, key_start: jax.Array) -> jax.Array:
        rows = block * query_block + jnp.arange(query_block)
        return seen(rows, key_start + jnp.arange(key_block))

    return _blockwise(query, key.swapaxes(1, 2), value.swapaxes(1, 2), mask, key_blocks)


@functools.partial(jax.jit, static_argnames="window")
def extend_attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B K S D"],
    value: Float[Array, "B K S D"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B K S"],
    *,
    window: int | None,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """See `api.extend_attention`."""
    query_block, key_block = block_sizes(query.shape[1], key.shape[2])
    held = (key_positions >= 0)[..., None]
    key, value = (jnp.where(held, x, jnp.zeros((), x.dtype)) for x in (key, value))
    query_positions = pad_to(query_positions, 1, query_block, fill=-1)
    key_positions = pad_to(key_positions, 2, key_block, fill=-1)

    def mask(block: jax.Array, key_start: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(query_positions, block * query_block, query_block, axis=1)
        columns = jax.lax.dynamic_slice_in_dim(key_positions, key_start, key_block, axis=2)
        distance = rows[:, None, :, None] - columns[:, :, None, :]
        inside = (distance >= 0) & (columns >= 0)[:, :, None, :]
        if window is not None:
            inside &= distance <= window
        return inside[:, :, None]

    def key_blocks(block: jax.Array) -> _KeyBlocks:
        first = jnp.zeros_like(block)
        return _KeyBlocks(first, first, jnp.full_like(block, key_positions.shape[2] // key_block))

    return _blockwise(query, key, value, mask, key_blocks)


def _blockwise(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B K S D"],
    value: Float[Array, "B K S D"],
    mask: Callable[[jax.Array, jax.Array], jax.Array],
    key_blocks: Callable[[jax.Array], _KeyBlocks],
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Attention where `mask(query block, first key)` gives [B|1, K|1, 1, queries, keys] of what is seen.

    `key_blocks(query block)` gives the key blocks to look at.
    """
    batch, length, query_heads, head_dim = query.shape
    kv_heads = key.shape[1]
    group = query_heads // kv_heads
    query_block, key_block = block_sizes(length, key.shape[2])
    scaled = (query.astype(jnp.float32) * head_dim**-0.5).astype(query.dtype)
    scaled = pad_to(scaled, 1, query_block, fill=0)
    blocks = scaled.shape[1] // query_block
    # [blocks, B, K, G, queries, D]: a group's queries are one matrix against its KV head's keys.
    scaled = scaled.reshape(batch, blocks, query_block, kv_heads, group, head_dim).transpose(1, 0, 3, 4, 2, 5)
    key, value = (pad_to(x, 2, key_block, fill=0) for x in (key, value))
    matrix = (batch, kv_heads, group * query_block)

    def one_block(block: jax.Array, buffers: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rows = buffers[0][block].reshape(*matrix, head_dim)

        def step(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array], *, masked: bool):
            output, largest, total = carry
            start = index * key_block
            keys, values = (jax.lax.dynamic_slice_in_dim(x, start, key_block, axis=2) for x in (key, value))
            scores = jnp.einsum("bkqd,bksd->bkqs", rows, keys, preferred_element_type=jnp.float32)
            if masked:
                scores = scores.reshape(batch, kv_heads, group, query_block, key_block)
                scores = jnp.where(mask(block, start), scores, MASKED).reshape(*matrix, key_block)
            new_largest = jnp.maximum(largest, scores.max(-1))
            # A row that has seen nothing yet has exp(MASKED - MASKED) = 1: its rubbish is scaled away by
            # `correction` = 0 at the first key it sees, and cleared below if there is none.
            weights = jnp.exp(scores - new_largest[..., None])
            correction = jnp.exp(largest - new_largest)
            product = jnp.einsum(
                "bkqs,bksd->bkqd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
            )
            return (
                output * correction[..., None] + product,
                new_largest,
                total * correction + weights.sum(-1),
            )

        bounds = key_blocks(block)
        start = (
            jnp.zeros((*matrix, head_dim), jnp.float32),
            jnp.full(matrix, MASKED, jnp.float32),
            jnp.zeros(matrix, jnp.float32),
        )
        carry = jax.lax.fori_loop(bounds.first, bounds.masked, functools.partial(step, masked=False), start)
        output, largest, total = jax.lax.fori_loop(
            bounds.masked, bounds.end, functools.partial(step, masked=True), carry
        )
        nothing = largest <= MASKED / 2
        output = jnp.where(nothing[..., None], 0.0, output / jnp.where(nothing, 1.0, total)[..., None])
        log_sum_exp = jnp.where(nothing, MASKED, largest + jnp.log(jnp.where(nothing, 1.0, total)))
        outputs, sums = buffers
        shape = outputs.shape[1:]
        return (
            outputs.at[block].set(output.astype(query.dtype).reshape(shape)),
            sums.at[block].set(log_sum_exp.reshape(shape[:-1])),
        )

    # A block's output takes the place of its queries. Not `lax.map`: XLA's CPU compiler makes the buffers that it
    # fills for all layers of a model at the program's start.
    buffers = scaled, scaled[..., 0].astype(jnp.float32)
    output, log_sum_exp = jax.lax.fori_loop(0, blocks, one_block, buffers)
    output = output.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, query_heads, head_dim)
    log_sum_exp = log_sum_exp.reshape(blocks, batch, query_heads, query_block)
    log_sum_exp = log_sum_exp.transpose(1, 2, 0, 3).reshape(batch, query_heads, -1)
    return output[:, :length], log_sum_exp[:, :, :length]
