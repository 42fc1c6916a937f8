"""How much each token matters: pure functions of arrays, higher = keep."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

#: The score of a token that must be kept, and of a slot that holds none.
PROTECTED, ABSENT = jnp.inf, -jnp.inf


def window_attention(
    query: Float[Array, "B W N D"],
    query_positions: Int[Array, "B W"],
    key: Float[Array, "B K S D"],
    key_positions: Int[Array, "B K S"],
    *,
    group_reduce: Literal["mean", "max", "none"],
) -> Float[Array, "B K R S"]:
    """The attention that each token gets from some queries, averaged over them; float32.

    Every softmax is over all the keys that the query may see.

    Args:
        query: rotated queries.
        query_positions: absolute positions; queries at negative ones do not vote.
        key: rotated keys, finite even where a slot is empty.
        key_positions: absolute positions; negative for empty slots, which get 0.
        group_reduce: over a KV head's G query heads: "mean" or "max" (R = 1), or "none" (R = G).
    """
    batch, _, query_heads, head_dim = query.shape
    kv_heads = key.shape[1]
    scaled = query.astype(jnp.float32).reshape(batch, -1, kv_heads, query_heads // kv_heads, head_dim)
    scaled = scaled.transpose(2, 0, 3, 1, 4) * head_dim**-0.5
    votes = query_positions >= 0
    voters = jnp.maximum(votes.sum(-1, dtype=jnp.float32), 1.0)

    # One KV head at a time: [B, G, W, S] lives, never [B, N, W, S].
    def one_head(arguments: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        queries, keys, positions = arguments
        scores = jnp.einsum("bgwd,bsd->bgws", queries, keys.astype(jnp.float32))
        seen = (positions[:, None] >= 0) & (positions[:, None] <= query_positions[:, :, None])
        probabilities = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), axis=-1)
        probabilities = jnp.where(seen[:, None] & votes[:, None, :, None], probabilities, 0.0)
        attention = probabilities.sum(2) / voters[:, None, None]
        if group_reduce == "mean":
            return attention.mean(1, keepdims=True)
        if group_reduce == "max":
            return attention.max(1, keepdims=True)
        return attention

    scores = jax.lax.map(one_head, (scaled, key.swapaxes(0, 1), key_positions.swapaxes(0, 1)))
    return scores.swapaxes(0, 1)


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
    scores = jnp.where(counted[:, :, None], scores, outside)
    half = kernel // 2
    shape, strides = (1, 1, 1, kernel), (1, 1, 1, 1)
    padding = ((0, 0), (0, 0), (0, 0), (half, half))
    if pooling == "max":
        return jax.lax.reduce_window(scores, -jnp.inf, jax.lax.max, shape, strides, padding)
    return jax.lax.reduce_window(scores, 0.0, jax.lax.add, shape, strides, padding) / kernel


def protect(
    scores: Float[Array, "B K S"], positions: Int[Array, "B K S"], *, sinks: int, recent: Int[Array, "B K"]
) -> Float[Array, "B K S"]:
    """Marks the first `sinks` positions and the last `recent` tokens of each head as kept, empty slots as absent.

    Tokens of a head are a prefix of its slots, in ascending position.
    """
    held = positions >= 0
    order = jnp.arange(positions.shape[2])[None, None]
    last = order >= held.sum(-1, keepdims=True) - recent[..., None]
    scores = jnp.where((positions < sinks) | last, PROTECTED, scores)
    return jnp.where(held, scores, ABSENT)


def highest(
    scores: Float[Array, "B K S"], counts: Int[Array, "B K"], *, most: int
) -> tuple[Int[Array, "B K C"], Bool[Array, "B K C"]]:
    """The `counts` highest of each head, in ascending order; of equal scores the lower index wins.

    Args:
        scores: `ABSENT` where there is no token.
        counts: how many each head keeps, at most `most` and at most the tokens that it has.
        most: static bound, C = min(most, S).

    Returns:
        Indices along S, and which of them are chosen; those not chosen come last.
    """
    slots = scores.shape[2]
    most = min(most, slots)
    # A stable sort, not top_k: a TPU's order of ties is not to be relied on.
    order = jnp.argsort(-scores, axis=-1, stable=True)[..., :most].astype(jnp.int32)
    chosen = jnp.arange(most)[None, None] < counts[..., None]
    index = jnp.sort(jnp.where(chosen, order, slots), axis=-1)
    return jnp.minimum(index, slots - 1), index < slots


def split_shared(scores: Float[Array, "B K S"], counts: Int[Array, "B K"], *, safeguard: float) -> Int[Array, "B K"]:
    """How many tokens each head gets when all heads of a layer choose together (Ada-KV); the total is exact.

    Args:
        scores: of all heads on one scale; `PROTECTED` tokens are taken first, `ABSENT` ones never.
        counts: what each head would get alone; together they get no more than they have.
        safeguard: share of that which every head gets for sure.
    """
    batch, kv_heads, slots = scores.shape
    order = jnp.argsort(-scores, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1, stable=True)
    safe = jnp.floor(counts.astype(jnp.float32) * safeguard + 1e-6).astype(jnp.int32)
    scores = jnp.where((rank < safe[..., None]) & (scores > ABSENT), PROTECTED, scores)
    flat = scores.reshape(batch, 1, kv_heads * slots)
    total = jnp.minimum(counts.sum(-1, keepdims=True), (flat > ABSENT).sum(-1))
    index, held = highest(flat, total, most=kv_heads * slots)
    head = index // slots
    mine = (head[:, 0, :, None] == jnp.arange(kv_heads)[None, None]) & held[:, 0, :, None]
    return mine.sum(1, dtype=jnp.int32)
