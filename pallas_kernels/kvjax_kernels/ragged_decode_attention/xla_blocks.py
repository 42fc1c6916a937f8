"""Plain JAX for heads of different lengths: a loop over the blocks that they fill, each loaded once."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax_kernels.masking import MASKED
from kvjax_kernels.ragged_decode_attention.dense import product
from kvjax_kernels.ragged_decode_attention.types import Parts

#: Rows of a block: enough to hide what a turn of the loop costs, few enough to stay in a core's cache.
BLOCK = 512


class _Softmax(NamedTuple):
    """The softmax so far of every head of every row; H = B * K.

    Attributes:
        values: [H, G, D], weighted.
        largest: [H, G], score.
        total: [H, G], weight.
    """

    values: Float[Array, "H G D"]
    largest: Float[Array, "H G"]
    total: Float[Array, "H G"]


def block_rows(slots: int) -> int:
    """Rows of a block of a cache of so many slots."""
    return min(BLOCK, slots)


def loaded_blocks(lengths: Any, slots: int) -> Any:
    """Blocks that are loaded of heads that hold so many tokens: the loop has so many turns in all."""
    return (lengths + block_rows(slots) - 1) // block_rows(slots)


def attend_parts(
    query: Float[Array, "B N D"],
    kv: Float[Array, "B S twoD"],
    lengths: Int[Array, "B K"],
    *,
    segments: tuple[int, ...] | None,
    starts: Int[Array, "B K"],
    scale: float,
    sink_query: Float[Array, "B N D"] | None,
    sinks: int,
    scores: bool,
) -> Parts:
    """Attention over each head's cached tokens, in one part, without scores; see `api.ragged_decode_attention`."""
    del segments, scores
    (batch, _, head_dim), kv_heads = query.shape, lengths.shape[1]
    slots = kv.shape[1]
    block = block_rows(slots)
    first, held = starts.reshape(-1), lengths.reshape(-1)
    blocks = loaded_blocks(held, slots)
    ends = jnp.cumsum(blocks, dtype=jnp.int32)

    def by_head(x: Float[Array, "B N D"]) -> Float[Array, "H G D"]:
        return x.astype(kv.dtype).reshape(batch * kv_heads, -1, head_dim)

    queries = by_head(query)
    to_sinks = None if sink_query is None else by_head(sink_query)

    def add(step: Int[Array, ""], softmax: _Softmax) -> _Softmax:
        head = (ends <= step).sum(dtype=jnp.int32)
        begin = first[head] + (step - (ends[head] - blocks[head])) * block
        # The last block of all may not reach over the end; it is read from further up, and starts in its middle.
        origin = jnp.minimum(begin, slots - block)
        slot = origin + jnp.arange(block, dtype=jnp.int32)
        valid = (slot >= begin) & (slot < first[head] + held[head])
        rows = lax.dynamic_slice(kv, (head // kv_heads, origin, jnp.zeros_like(head)), (1, block, 2 * head_dim))[0]
        # An empty slot may hold NaN, and 0 * NaN is NaN.
        rows = jnp.where(valid[:, None], rows, jnp.zeros((), rows.dtype))
        key, value = rows[:, :head_dim], rows[:, head_dim:]
        scores = product("gd,sd->gs", queries[head], key)
        if to_sinks is not None:
            near = (slot - first[head] < sinks)[None]
            scores = jnp.where(near, product("gd,sd->gs", to_sinks[head], key), scores)
        scores = jnp.where(valid[None], scores * scale, MASKED)
        largest = jnp.maximum(softmax.largest[head], scores.max(-1))
        weights, shrunk = jnp.exp(scores - largest[:, None]), jnp.exp(softmax.largest[head] - largest)
        added = product("gs,sd->gd", weights, value)
        return _Softmax(
            values=softmax.values.at[head].set(softmax.values[head] * shrunk[:, None] + added),
            largest=softmax.largest.at[head].set(largest),
            total=softmax.total.at[head].set(softmax.total[head] * shrunk + weights.sum(-1)),
        )

    shape = queries.shape[:2]
    nothing = _Softmax(
        jnp.zeros(queries.shape, jnp.float32), jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    )
    values, largest, total = lax.fori_loop(0, ends[-1], add, nothing)
    empty = total == 0
    safe = jnp.where(empty, 1.0, total)

    def one_part(x: Float[Array, "H *shape"]) -> Float[Array, "B K 1 *shape"]:
        return x.reshape(batch, kv_heads, 1, *x.shape[1:])

    return Parts(
        output=one_part(values / safe[..., None]),
        log_sum_exp=one_part(jnp.where(empty, MASKED, largest + jnp.log(safe))),
    )
