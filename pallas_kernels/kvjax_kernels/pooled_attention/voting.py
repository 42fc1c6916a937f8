"""What queries see, and how their votes become scores: the parts that implementations share."""

import functools
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def seen_tokens(query_positions: Int[Array, "B W"], key_positions: Int[Array, "B K S"]) -> Int[Array, "B K W"]:
    """How many of a head's tokens each query sees: always its first ones. 0 for queries that have no vote."""
    columns = key_positions[:, :, None]
    # A query at -1 sees nothing: every token is after it.
    seen = (columns >= 0) & (columns <= query_positions[:, None, :, None])
    return seen.sum(-1, dtype=jnp.int32)


def voters(query_positions: Int[Array, "B W"]) -> Float[Array, "B"]:
    """Queries of each row that have a vote; 1 where there are none, to divide by."""
    return jnp.maximum((query_positions >= 0).sum(-1, dtype=jnp.float32), 1.0)


def pool(
    scores: Float[Array, "B K R S"],
    counted: Bool[Array, "B K S"],
    *,
    kernel: int,
    pooling: Literal["max", "avg"],
) -> Float[Array, "B K R S"]:
    """Pools along the tokens with a centred window of `kernel`, stride 1, same length.

    Args:
        scores: not negative.
        counted: the tokens that are pooled; the others count as -inf to a maximum and as zeros to an average,
            so that averages are damped at the edges.
        kernel: odd.
        pooling: "max" or "avg".
    """
    outside = 0.0 if pooling == "avg" else -jnp.inf
    half, slots = kernel // 2, scores.shape[3]
    scores = jnp.where(counted[:, :, None], scores, outside)
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, 0), (half, half)), constant_values=outside)
    # Shifted copies, which XLA fuses into one pass; its compiler for TPU takes 15 s over a `reduce_window`.
    shifted = (padded[..., offset : offset + slots] for offset in range(kernel))
    if pooling == "max":
        return functools.reduce(jnp.maximum, shifted)
    return functools.reduce(jnp.add, shifted) / kernel


def pooled(
    attention: Float[Array, "B K R S"],
    key_positions: Int[Array, "B K S"],
    *,
    excluded: int,
    kernel: int,
    pooling: Literal["max", "avg"],
    group_reduce: Literal["mean", "max"],
) -> Float[Array, "B K S"]:
    """The scores of a head's tokens from the attention that each of its R rows gives them.

    Args:
        attention: of single query heads, or R = 1 where the group is reduced already.
        key_positions: negative for empty slots.
        excluded: last tokens of each head that score 0, and are not pooled.
        kernel: see `pool`.
        pooling: see `pool`.
        group_reduce: over R.
    """
    lengths = (key_positions >= 0).sum(-1, keepdims=True, dtype=jnp.int32)
    counted = jnp.arange(key_positions.shape[2], dtype=jnp.int32)[None, None] < lengths - excluded
    if kernel > 1:
        attention = pool(attention, counted, kernel=kernel, pooling=pooling)
    scores = attention.mean(2) if group_reduce == "mean" else attention.max(2)
    return jnp.where(counted, scores, 0.0)
