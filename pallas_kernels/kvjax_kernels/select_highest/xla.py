"""Plain JAX: choice by counting instead of sorting."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax_kernels.pooled_selection.ranks import LOWEST, places


@functools.partial(jax.jit, static_argnames="most")
def run(
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
