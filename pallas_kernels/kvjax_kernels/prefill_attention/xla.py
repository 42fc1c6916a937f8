"""Blockwise attention in plain JAX: one block of some heads' queries at a time walks over the keys it can see.

The running maximum and sum are those of FlashAttention (arXiv 2205.14135). Memory beside the inputs is one
tile of scores; the time is that of the blocks that some query of the row can see.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax_kernels.blocks import Tile, choose_tile, pad_to, query_tiles
from kvjax_kernels.masking import MASKED


class KeyBlocks(NamedTuple):
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
@functools.partial(jax.jit, static_argnames=("window", "log_sum_exp"))
def run(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    *,
    window: int | None,
    log_sum_exp: bool = True,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """See `api.prefill_attention`. Blocks outside the triangle, or the window's band, are not computed."""
    del log_sum_exp
    length, kv_heads = key.shape[1:3]

    def count(side: int) -> int:
        blocks = -(-length // side)
        across = blocks if window is None else min(-(-window // side) + 1, blocks)
        # The first blocks of queries see fewer than `across`, and are a triangle.
        return across * (2 * blocks - across + 1) // 2

    tile = choose_tile(key.shape[0] * kv_heads, query.shape[2] // kv_heads, length, length, count)

    def key_blocks(block: jax.Array) -> KeyBlocks:
        end = jax.lax.div((block + 1) * tile.queries - 1, tile.keys) + 1
        if window is None:
            return KeyBlocks(jnp.zeros_like(end), jax.lax.div(block * tile.queries, tile.keys), end)
        first = jax.lax.div(jnp.maximum(block * tile.queries - window, 0), tile.keys)
        return KeyBlocks(first, first, end)

    def mask(part: jax.Array, block: jax.Array, key_start: jax.Array) -> jax.Array:
        del part
        rows = block * tile.queries + jnp.arange(tile.queries, dtype=jnp.int32)
        distance = rows[:, None] - (key_start + jnp.arange(tile.keys, dtype=jnp.int32))[None, :]
        inside = distance >= 0 if window is None else (distance >= 0) & (distance <= window)
        return inside[None, None]

    return blockwise(query, key.swapaxes(1, 2), value.swapaxes(1, 2), tile, mask, key_blocks)


def blockwise(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B K S D"],
    value: Float[Array, "B K S D"],
    tile: Tile,
    mask: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    key_blocks: Callable[[jax.Array], KeyBlocks],
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Attention, tile by tile, of one part of the heads after the other.

    Args:
        query: rotated queries.
        key: rotated keys.
        value: values.
        tile: `heads` of the rows' KV heads, in order, are a part.
        mask: `mask(part, query block, first key)`, [heads|1, 1, queries, keys], of what is seen.
        key_blocks: those to look at for a block of queries.
    """
    batch, length, query_heads, head_dim = query.shape
    kv_heads = key.shape[1]
    group = query_heads // kv_heads
    scaled = (query.astype(jnp.float32) * head_dim**-0.5).astype(query.dtype)
    scaled = query_tiles(pad_to(scaled, 1, tile.queries, fill=0), kv_heads, tile)
    blocks, padded = scaled.shape[1], -(-key.shape[2] // tile.keys) * tile.keys
    key, value = (pad_to(x, 2, tile.keys, fill=0).reshape(-1, tile.heads, padded, head_dim) for x in (key, value))
    matrix = (tile.heads, group * tile.queries)

    def one_block(index: jax.Array, buffers: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        part, block = jax.lax.div(index, blocks), jax.lax.rem(index, blocks)
        rows = jax.lax.dynamic_index_in_dim(buffers[0], index, keepdims=False)

        def step(column: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array], *, masked: bool):
            output, largest, total = carry
            first = column * tile.keys
            size = (1, tile.heads, tile.keys, head_dim)
            keys, values = (jax.lax.dynamic_slice(x, (part, 0, first, 0), size)[0] for x in (key, value))
            scores = jnp.einsum("hqd,hsd->hqs", rows, keys, preferred_element_type=jnp.float32)
            if masked:
                scores = scores.reshape(tile.heads, group, tile.queries, tile.keys)
                scores = jnp.where(mask(part, block, first), scores, MASKED).reshape(*matrix, tile.keys)
            new_largest = jnp.maximum(largest, scores.max(-1))
            # A row that has seen nothing yet has exp(MASKED - MASKED) = 1: its rubbish is scaled away by
            # `correction` = 0 at the first key it sees, and cleared below if there is none.
            weights = jnp.exp(scores - new_largest[..., None])
            correction = jnp.exp(largest - new_largest)
            product = jnp.einsum(
                "hqs,hsd->hqd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
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
        # Not `.at[index].set`, which becomes a scatter: many small operations, in every layer's program.
        return (
            jax.lax.dynamic_update_index_in_dim(outputs, output.astype(query.dtype), index, 0),
            jax.lax.dynamic_update_index_in_dim(sums, log_sum_exp, index, 0),
        )

    # A block's output takes the place of its queries. Not `lax.map`: XLA's CPU compiler makes the buffers that it
    # fills for all layers of a model at the program's start.
    parts = scaled.shape[0]
    scaled = scaled.reshape(parts * blocks, *matrix, head_dim)
    buffers = scaled, scaled[..., 0].astype(jnp.float32)
    output, log_sum_exp = jax.lax.fori_loop(0, parts * blocks, one_block, buffers)
    split = (batch, kv_heads, blocks, group, tile.queries)
    output = output.reshape(parts, blocks, *matrix, head_dim).swapaxes(1, 2)
    output = output.reshape(*split, head_dim).transpose(0, 2, 4, 1, 3, 5).reshape(batch, -1, query_heads, head_dim)
    log_sum_exp = (
        log_sum_exp.reshape(parts, blocks, *matrix)
        .swapaxes(1, 2)
        .reshape(split)
        .transpose(0, 1, 3, 2, 4)
        .reshape(batch, query_heads, -1)
    )
    return output[:, :length], log_sum_exp[:, :, :length]
