"""Plain JAX: two matrix products over whole kv rows, or a loop over blocks of them."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax_kernels.masking import MASKED
from kvjax_kernels.ragged_decode_attention import xla_blocks
from kvjax_kernels.ragged_decode_attention.api import DecodeAttention, head_starts
from kvjax_kernels.ragged_decode_attention.parts import combine


class _Piece(NamedTuple):
    """Some KV heads' queries over the rows that they share a product with; M queries.

    Attributes:
        query: [B, K, M, D].
        kv: [B, K, S, 2D].
        valid: [B, K, M | 1, S], the slots that each query sees.
        sink_query: like `query`, or None.
        own_key: [B, K, M, D], the asking token's key for each query, or None.
        own_value: its value.
    """

    query: Float[Array, "B K M D"]
    kv: Float[Array, "B K S twoD"]
    valid: Bool[Array, "B K R S"]
    sink_query: Float[Array, "B K M D"] | None
    own_key: Float[Array, "B K M D"] | None
    own_value: Float[Array, "B K M D"] | None


@functools.partial(jax.jit, static_argnames=("segments", "scale", "sinks", "token_attention"))
def ragged_decode_attention(
    query: Float[Array, "B N D"],
    kv: Float[Array, "B S twoD"],
    lengths: Int[Array, "B K"],
    *,
    segments: tuple[int, ...] | None,
    starts: Int[Array, "B K"] | None,
    own_key: Float[Array, "B K D"] | None,
    own_value: Float[Array, "B K D"] | None,
    scale: float,
    sink_query: Float[Array, "B N D"] | None,
    sinks: int,
    token_attention: bool,
) -> DecodeAttention:
    """See `api.ragged_decode_attention`.

    Segments of one size share one product over all their slots. Otherwise the blocks that heads fill are loaded one
    by one; where the attention of each token is wanted, all heads' queries go over all rows, and what another head
    owns is masked.
    """
    uniform = segments is not None and len(set(segments)) == 1
    if starts is None:
        assert segments is not None
        starts = jnp.broadcast_to(jnp.asarray(head_starts(segments), jnp.int32)[None], lengths.shape)
    if not uniform and not token_attention:
        parts = xla_blocks.attend_parts(query, kv, lengths, starts, scale=scale, sink_query=sink_query, sinks=sinks)
        return combine(
            parts,
            query,
            lengths,
            slots=kv.shape[1],
            segments=segments,
            starts=starts,
            own_key=own_key,
            own_value=own_value,
            scale=scale,
        )
    batch, query_heads, head_dim = query.shape
    kv_heads = lengths.shape[1]
    group = query_heads // kv_heads

    def per_query(x: Float[Array, "B K D"] | None) -> Float[Array, "B K G D"] | None:
        return None if x is None else jnp.broadcast_to(x[:, :, None], (batch, kv_heads, group, head_dim))

    def grouped(x: Float[Array, "B N D"] | None) -> Float[Array, "B K G D"] | None:
        return None if x is None else x.reshape(batch, kv_heads, group, head_dim)

    arrays = grouped(query), grouped(sink_query), per_query(own_key), per_query(own_value)
    pieces = []
    if not uniform and sink_query is None:
        place = jnp.arange(kv.shape[1])[None, None] - starts[:, :, None]
        valid = jnp.repeat((place >= 0) & (place < lengths[:, :, None]), group, axis=1)
        flat = [None if x is None else x.reshape(batch, 1, query_heads, head_dim) for x in arrays]
        assert flat[0] is not None
        pieces.append(_Piece(flat[0], kv[:, None], valid[:, None], *flat[1:]))
    else:
        assert segments is not None
        for heads, rows in _by_segment(kv, segments):
            valid = jnp.arange(rows.shape[2])[None, None] < lengths[:, heads, None]
            part = [None if x is None else x[:, heads] for x in arrays]
            assert part[0] is not None
            pieces.append(_Piece(part[0], rows, valid[:, :, None], *part[1:]))
    results = [_attend(piece, scale=scale, sinks=sinks) for piece in pieces]
    output = jnp.concatenate([r[0] for r in results], axis=1).reshape(batch, query_heads, head_dim)
    log_sum_exp = jnp.concatenate([r[1] for r in results], axis=1).reshape(batch, query_heads)
    attention, own_attention = None, None
    if token_attention:
        attention = jnp.concatenate([r[2].sum(2).reshape(batch, -1) for r in results], axis=1)
        own = jnp.concatenate([r[3] for r in results], axis=1)
        own_attention = own.reshape(batch, kv_heads, group).sum(2)
    return DecodeAttention(output, log_sum_exp, attention, own_attention)


def _by_segment(kv: Float[Array, "B S twoD"], segments: tuple[int, ...]) -> list[tuple[slice, jax.Array]]:
    """KV heads, and their rows [B, heads, S, 2D]: all together where the segments are equal."""
    if len(set(segments)) == 1:
        return [(slice(0, len(segments)), kv.reshape(kv.shape[0], len(segments), segments[0], -1))]
    starts = head_starts(segments)
    return [
        (slice(head, head + 1), kv[:, None, start : start + slots])
        for head, (start, slots) in enumerate(zip(starts, segments, strict=True))
    ]


def _attend(
    piece: _Piece, *, scale: float, sinks: int
) -> tuple[Float[Array, "B K M D"], Float[Array, "B K M"], Float[Array, "B K M S"], Float[Array, "B K M"]]:
    """Output, log-sum-exp, the probabilities of the slots, and of the asking token."""
    query, kv, valid, sink_query, own_key, own_value = piece
    head_dim = query.shape[-1]
    # [q | 0] . [k | v] = q . k: slicing the keys out of the rows would copy half the cache.
    padded = jnp.pad(query, ((0, 0), (0, 0), (0, 0), (0, head_dim)))
    scores = _product("bkmd,bksd->bkms", padded, kv)
    if sink_query is not None:
        to_sinks = _product("bkmd,bksd->bkms", sink_query, kv[:, :, :sinks, :head_dim])
        scores = jax.lax.dynamic_update_slice(scores, to_sinks, (0, 0, 0, 0))
    scores = jnp.where(valid, scores * scale, MASKED)
    largest = scores.max(axis=-1)
    own_score = jnp.full_like(largest, MASKED)
    if own_key is not None:
        own_score = (query.astype(jnp.float32) * own_key.astype(jnp.float32)).sum(-1) * scale
        largest = jnp.maximum(largest, own_score)
    weights = jnp.where(valid, jnp.exp(scores - largest[..., None]), 0.0)
    own_weight = jnp.where(own_score > MASKED, jnp.exp(own_score - largest), 0.0)
    sees_nothing = ~valid.any(-1) & (own_score == MASKED)
    total = jnp.where(sees_nothing, 1.0, weights.sum(-1) + own_weight)
    probabilities, own_probability = weights / total[..., None], own_weight / total

    def weighted(rows: jax.Array) -> jax.Array:
        return _product("bkms,bksd->bkmd", probabilities.astype(rows.dtype), rows)[..., head_dim:]

    # An empty slot may hold NaN, and 0 * NaN is NaN. Clearing the empty slots first copies the cache, so it is
    # done only when the plain product shows that it has to be.
    output = weighted(kv)
    output = jax.lax.cond(
        jnp.isfinite(output).all(),
        lambda: output,
        lambda: weighted(jnp.where(valid.any(2)[..., None], kv, jnp.zeros((), kv.dtype))),
    )
    if own_value is not None:
        output = output + own_probability[..., None] * own_value.astype(jnp.float32)
    log_sum_exp = jnp.where(sees_nothing, MASKED, largest + jnp.log(total))
    return output, log_sum_exp, probabilities, own_probability


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    # In the cache's dtype, whatever the model's: casting the cache would copy it.
    return jnp.einsum(subscripts, a.astype(b.dtype), b, preferred_element_type=jnp.float32)
