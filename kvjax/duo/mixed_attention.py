"""Attention between full and streaming: what a head gives while it is being decided which of the two it is.

B batch, T tokens, N query heads, K KV heads, G = N / K, D head dim.

The keys that a query sees are two disjoint sets: *near*, what streaming attention sees too (the sinks, and a band of
recent tokens), and the rest. One pass over the tiles of scores serves both branches, with one exponential a score:
with c the share of a query's softmax that falls on the near keys,

    full = c * near + (1 - c) * rest,    mixed = alpha * full + (1 - alpha) * near.

The backward pass walks over the tiles again, so nothing of the size T x T is ever kept.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax_kernels.blocks import pad_to
from kvjax_kernels.masking import MASKED

#: Queries and keys of a tile.
_BLOCK = 256


class Streaming(NamedTuple):
    """What a streaming head sees beside the token itself.

    Attributes:
        sinks: tokens from the start.
        recent: tokens before each one.
    """

    sinks: int
    recent: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def mixed_attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    alpha: Float[Array, "K"],
    streaming: Streaming,
) -> Float[Array, "B T N D"]:
    """Causal attention of a prompt: `alpha` of full attention and `1 - alpha` of streaming attention.

    Differentiable in the four arrays; forward and backward need memory that is linear in T.

    Args:
        query: rotated queries; consecutive heads share a KV head.
        key: rotated keys.
        value: values.
        alpha: of each KV head.
        streaming: what the streaming branch sees.
    """
    return _forward(query, key, value, alpha, streaming)[0]


class _Parts(NamedTuple):
    """Both branches of every query, in blocks of queries [blocks, B, K, G * queries, ...].

    Attributes:
        near: attention over the near keys.
        rest: attention over the other keys, zero where there are none.
        near_log_sum_exp: of the near keys' scores.
        log_sum_exp: of all keys' scores.
    """

    near: Float[Array, "blocks B K rows D"]
    rest: Float[Array, "blocks B K rows D"]
    near_log_sum_exp: Float[Array, "blocks B K rows"]
    log_sum_exp: Float[Array, "blocks B K rows"]

    @property
    def share(self) -> Float[Array, "blocks B K rows"]:
        """How much of each softmax falls on the near keys."""
        return jnp.exp(self.near_log_sum_exp - self.log_sum_exp)

    @property
    def full(self) -> Float[Array, "blocks B K rows D"]:
        """Full attention."""
        share = self.share[..., None]
        return share * self.near + (1.0 - share) * self.rest


class _Running(NamedTuple):
    """A softmax over some keys, as far as they have been seen (FlashAttention, arXiv 2205.14135)."""

    output: Float[Array, "B K rows D"]
    largest: Float[Array, "B K rows"]
    total: Float[Array, "B K rows"]

    def with_more(self, largest: jax.Array, weights: jax.Array, values: jax.Array) -> "_Running":
        """The softmax with further keys, whose weights are relative to the new `largest`."""
        correction = jnp.exp(self.largest - largest)
        kind = self.output.dtype
        product = jnp.einsum("bkqs,bksd->bkqd", weights.astype(values.dtype), values, preferred_element_type=kind)
        output = self.output * correction[..., None] + product
        return _Running(output, largest, self.total * correction + weights.sum(-1))

    def finished(self) -> tuple[jax.Array, jax.Array]:
        """Output and log-sum-exp: zero and `MASKED` where nothing has been seen."""
        nothing = self.largest <= MASKED / 2
        total = jnp.where(nothing, 1.0, self.total)
        output = jnp.where(nothing[..., None], 0.0, self.output / total[..., None])
        return output, jnp.where(nothing, MASKED, self.largest + jnp.log(total))


def _forward(query, key, value, alpha, streaming: Streaming):
    blocks, keys, values = _query_blocks(query, key.shape[2]), _by_head(key), _by_head(value)
    kind, size = sums_dtype(query), _block_size(query)
    shape = blocks.shape[1:]

    def one_block(arguments: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        index, rows = arguments

        def step(key_index: jax.Array, parts: tuple[_Running, _Running]) -> tuple[_Running, _Running]:
            scores = jnp.einsum("bkqd,bksd->bkqs", rows, _block(keys, key_index, size), preferred_element_type=kind)
            seen, is_near = _masks(index, key_index, size, rows.shape[2], streaming)
            scores = jnp.where(seen, scores, MASKED)
            largest = [
                jnp.maximum(part.largest, jnp.where(chosen, scores, MASKED).max(-1))
                for part, chosen in zip(parts, (is_near, ~is_near), strict=True)
            ]
            # A row that has seen none of a set has exp(MASKED - MASKED) = 1: scaled away by its first key, and
            # cleared at the end if there is none.
            weights = jnp.exp(scores - jnp.where(is_near, largest[0][..., None], largest[1][..., None]))
            block = _block(values, key_index, size)
            near, rest = (
                part.with_more(new_largest, jnp.where(chosen, weights, 0.0), block)
                for part, new_largest, chosen in zip(parts, largest, (is_near, ~is_near), strict=True)
            )
            return near, rest

        nothing = _Running(jnp.zeros(shape, kind), jnp.full(shape[:-1], MASKED, kind), jnp.zeros(shape[:-1], kind))
        near, rest = jax.lax.fori_loop(0, index + 1, step, (nothing, nothing))
        (near, near_log_sum_exp), (rest, rest_log_sum_exp) = near.finished(), rest.finished()
        return near, rest, near_log_sum_exp, jnp.logaddexp(near_log_sum_exp, rest_log_sum_exp)

    parts = _Parts(*jax.lax.map(one_block, (jnp.arange(len(blocks)), blocks)))
    weight = alpha.astype(kind).reshape(1, 1, -1, 1, 1)
    mixed = weight * parts.full + (1.0 - weight) * parts.near
    return _from_blocks(mixed, query).astype(query.dtype), (query, key, value, alpha, parts)


def _backward(streaming: Streaming, saved, cotangent):
    query, key, value, alpha, parts = saved
    keys, values = _by_head(key), _by_head(value)
    kind, size = sums_dtype(query), _block_size(query)
    blocks, outer = _query_blocks(query, key.shape[2]), _query_blocks(cotangent, key.shape[2], factor=1.0)
    near_mean, full_mean = ((outer.astype(kind) * part).sum(-1) for part in (parts.near, parts.full))
    weight = alpha.astype(kind).reshape(1, 1, -1, 1)
    # With p a key's weight in the softmax of its own set (the near keys', or all keys'), its weight in the mixed
    # output is p a, and the derivative by its score p (a (outer . value) - b).
    near_a, rest_a = weight * parts.share + 1.0 - weight, jnp.broadcast_to(weight, full_mean.shape)
    near_b, rest_b = weight * parts.share * full_mean + (1.0 - weight) * near_mean, weight * full_mean

    def one_block(sums: tuple[jax.Array, jax.Array], arguments):
        index, rows, outer_rows, log_sum_exps, factors, means = arguments

        def step(key_index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
            query_sum, key_sum, value_sum = carry
            some_keys, some_values = _block(keys, key_index, size), _block(values, key_index, size)
            seen, is_near = _masks(index, key_index, size, rows.shape[2], streaming)
            log_sum_exp, a, b = (
                jnp.where(is_near, near[..., None], rest[..., None]) for near, rest in (log_sum_exps, factors, means)
            )
            scores = jnp.einsum("bkqd,bksd->bkqs", rows, some_keys, preferred_element_type=kind)
            weights = jnp.exp(jnp.where(seen, scores, MASKED) - log_sum_exp)
            slope = jnp.einsum("bkqd,bksd->bkqs", outer_rows, some_values, preferred_element_type=kind)
            by_score = (weights * (a * slope - b)).astype(query.dtype)
            weights = (weights * a).astype(query.dtype)
            query_sum += jnp.einsum("bkqs,bksd->bkqd", by_score, some_keys, preferred_element_type=kind)
            key_part = jnp.einsum("bkqs,bkqd->bksd", by_score, rows, preferred_element_type=kind)
            value_part = jnp.einsum("bkqs,bkqd->bksd", weights, outer_rows, preferred_element_type=kind)
            return query_sum, _added(key_sum, key_index, key_part), _added(value_sum, key_index, value_part)

        start = (jnp.zeros(rows.shape, kind), *sums)
        query_sum, key_sum, value_sum = jax.lax.fori_loop(0, index + 1, step, start)
        return (key_sum, value_sum), query_sum

    arguments = (
        jnp.arange(len(blocks)),
        blocks,
        outer,
        (parts.near_log_sum_exp, parts.log_sum_exp),
        (near_a, rest_a),
        (near_b, rest_b),
    )
    nothing = jnp.zeros(keys.shape, kind)
    (key_sum, value_sum), query_sum = jax.lax.scan(one_block, (nothing, nothing), arguments)
    length, head_dim = query.shape[1], query.shape[3]
    by_query = (_from_blocks(query_sum, query) * head_dim**-0.5).astype(query.dtype)
    by_key, by_value = (x[:, :, :length].swapaxes(1, 2).astype(query.dtype) for x in (key_sum, value_sum))
    by_alpha = (full_mean - near_mean).sum((0, 1, 3)).astype(alpha.dtype)
    return by_query, by_key, by_value, by_alpha


mixed_attention.defvjp(_forward, _backward)


def _masks(
    query_block: jax.Array, key_block: jax.Array, size: int, rows: int, streaming: Streaming
) -> tuple[Bool[Array, "1 1 rows size"], Bool[Array, "1 1 rows size"]]:
    """Which keys a block of queries sees, and which of them streaming attention would see if they are."""
    column = key_block * size + jnp.arange(size)[None]
    distance = query_block * size + jnp.arange(size)[:, None] - column
    is_near = (distance <= streaming.recent) | (column < streaming.sinks)
    seen, is_near = (jnp.tile(x, (rows // size, 1))[None, None] for x in (distance >= 0, is_near))
    return seen, is_near


def _query_blocks(x: jax.Array, kv_heads: int, *, factor: float | None = None) -> jax.Array:
    """[B, T, N, D] as [blocks, B, K, G * queries, D], times 1 / sqrt(D) unless told otherwise."""
    batch, _, heads, head_dim = x.shape
    size = _block_size(x)
    scale = head_dim**-0.5 if factor is None else factor
    x = pad_to((x.astype(sums_dtype(x)) * scale).astype(x.dtype), 1, size, fill=0)
    x = x.reshape(batch, -1, size, kv_heads, heads // kv_heads, head_dim).transpose(1, 0, 3, 4, 2, 5)
    return x.reshape(*x.shape[:3], -1, head_dim)


def _from_blocks(x: jax.Array, query: jax.Array) -> jax.Array:
    """[blocks, B, K, G * queries, D] as [B, T, N, D]."""
    batch, length, heads, head_dim = query.shape
    x = x.reshape(len(x), batch, heads, _block_size(query), head_dim).transpose(1, 0, 3, 2, 4)
    return x.reshape(batch, -1, heads, head_dim)[:, :length]


def _by_head(x: jax.Array) -> jax.Array:
    """[B, T, K, D] as [B, K, S, D], S whole blocks."""
    return pad_to(x.swapaxes(1, 2), 2, _block_size(x), fill=0)


def _block(x: Float[Array, "B K S D"], index: jax.Array, size: int) -> Float[Array, "B K size D"]:
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis=2)


def _added(x: Float[Array, "B K S D"], index: jax.Array, part: Float[Array, "B K size D"]) -> Float[Array, "B K S D"]:
    """`x` with `part` added to a block."""
    size = part.shape[2]
    return jax.lax.dynamic_update_slice_in_dim(x, _block(x, index, size) + part, index * size, axis=2)


def _block_size(x: jax.Array) -> int:
    """Queries and keys of a tile: square, so that few tiles on the diagonal are computed in vain."""
    return min(_BLOCK, x.shape[1])


def sums_dtype(x: jax.Array) -> Any:
    """What sums over `x` are made in: float32, or float64 for float64."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32
