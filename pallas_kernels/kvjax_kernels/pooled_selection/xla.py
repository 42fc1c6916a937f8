"""Plain JAX: one KV head's scores at a time, and choice by counting instead of sorting."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax_kernels.masking import MASKED
from kvjax_kernels.pooled_selection.ranks import LOWEST, places
from kvjax_kernels.pooled_selection.voting import pooled, voters


@functools.partial(jax.jit, static_argnames=("excluded", "kernel", "pooling", "group_reduce", "reduce"))
def pooled_attention(
    query: Float[Array, "B W N D"],
    kv: Float[Array, "B K S twoD"],
    query_positions: Int[Array, "B W"],
    key_positions: Int[Array, "B K S"],
    *,
    excluded: int,
    kernel: int,
    pooling: Literal["max", "avg"],
    group_reduce: Literal["mean", "max"],
    reduce: Literal["before_pooling", "after_pooling"],
) -> Float[Array, "B K S"]:
    """See `api.pooled_attention`."""
    batch, _, query_heads, head_dim = query.shape
    kv_heads = kv.shape[1]
    scaled = query.astype(jnp.float32).reshape(batch, -1, kv_heads, query_heads // kv_heads, head_dim)
    scaled = scaled.transpose(2, 0, 3, 1, 4) * head_dim**-0.5
    votes = query_positions >= 0

    # One KV head at a time: [B, G, W, S] lives, never [B, N, W, S].
    def one_head(head: jax.Array) -> jax.Array:
        keys = jax.lax.dynamic_index_in_dim(kv, head, axis=1, keepdims=False)[..., :head_dim].astype(jnp.float32)
        # Fused with their slicing the product takes up to three times as long on CPU.
        keys = jax.lax.optimization_barrier(keys)
        positions = jax.lax.dynamic_index_in_dim(key_positions, head, axis=1, keepdims=False)
        scores = jnp.einsum("bgwd,bsd->bgws", scaled[head], keys)
        seen = (positions[:, None] >= 0) & (positions[:, None] <= query_positions[:, :, None])
        probabilities = jax.nn.softmax(jnp.where(seen[:, None], scores, MASKED), axis=-1)
        probabilities = jnp.where(seen[:, None] & votes[:, None, :, None], probabilities, 0.0)
        attention = probabilities.sum(2) / voters(query_positions)[:, None, None]
        if reduce == "after_pooling":
            return attention
        return attention.mean(1, keepdims=True) if group_reduce == "mean" else attention.max(1, keepdims=True)

    attention = jax.lax.map(one_head, jnp.arange(kv_heads, dtype=jnp.int32)).swapaxes(0, 1)
    return pooled(
        attention, key_positions, excluded=excluded, kernel=kernel, pooling=pooling, group_reduce=group_reduce
    )


@functools.partial(jax.jit, static_argnames="most")
def select_highest(
    scores: Float[Array, "B K S"], counts: Int[Array, "B K"], *, most: int
) -> tuple[Int[Array, "B K C"], Bool[Array, "B K C"]]:
    """See `api.select_highest`."""
    counts = jnp.minimum(counts, most)
    return ascending(*_threshold(scores, counts), counts, most)


def mark_highest(scores: Float[Array, "B K S"], counts: Int[Array, "B K"]) -> Bool[Array, "B K S"]:
    """Which are the `counts` highest of each head; of equal scores the lower index wins."""
    kept, _ = _mark_above(*_threshold(scores, counts), counts)
    return kept


def _threshold(
    scores: Float[Array, "B K S"], counts: Int[Array, "B K"]
) -> tuple[Int[Array, "B K 1"], Int[Array, "B K S"]]:
    """The highest rank that `counts` of each head reach, and the ranks of all.

    It is found bit by bit, by counting: a sort costs several times as much on CPU, and the order of ties of `top_k`
    is not to be relied on everywhere.
    """
    rank = places(scores.astype(jnp.float32))

    def reached(threshold: jax.Array) -> jax.Array:
        return (rank >= threshold).sum(-1, keepdims=True, dtype=jnp.int32) >= counts[..., None]

    def refine(step: jax.Array, threshold: jax.Array) -> jax.Array:
        higher = threshold | (jnp.int32(1) << (30 - step))
        return jnp.where(reached(higher), higher, threshold)

    threshold = jnp.where(reached(jnp.zeros_like(counts[..., None])), 0, LOWEST)
    return jax.lax.fori_loop(0, 31, refine, threshold), rank


def _mark_above(
    threshold: Int[Array, "B K 1"], rank: Int[Array, "B K S"], counts: Int[Array, "B K"]
) -> tuple[Bool[Array, "B K S"], Int[Array, "B K S"]]:
    """Which rank above each head's threshold, and the first ones at it, `counts` in all; their number up to each."""
    marks = jnp.stack([rank > threshold, rank == threshold])
    (above, equal), (so_far, ties_so_far) = marks, jnp.cumsum(marks, axis=-1, dtype=jnp.int32)
    ties = counts[..., None] - so_far[..., -1:]
    return above | (equal & (ties_so_far <= ties)), so_far + jnp.minimum(ties_so_far, ties)


def ascending(
    threshold: Int[Array, "B K 1"], rank: Int[Array, "B K S"], counts: Int[Array, "B K"], most: int
) -> tuple[Int[Array, "B K C"], Bool[Array, "B K C"]]:
    """The indices of the `counts` highest of each head, at most `most`, in ascending order; and which are there.

    The threshold is the highest rank that so many reach; of equal ranks the lower index wins.
    """
    kept, so_far = _mark_above(threshold, rank, counts)
    batch, kv_heads, slots = kept.shape
    slot = jnp.arange(slots, dtype=jnp.int32)[None, None]
    # What is not kept goes past the end, each to a place of its own, where the scatter drops it.
    target = jnp.where(kept, so_far - 1, most + slot)
    row, head = jnp.arange(batch, dtype=jnp.int32)[:, None, None], jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    index = jnp.full((batch, kv_heads, most), slots, jnp.int32)
    index = index.at[row, head, target].set(jnp.broadcast_to(slot, kept.shape), mode="drop", unique_indices=True)
    return jnp.minimum(index, slots - 1), index < slots
