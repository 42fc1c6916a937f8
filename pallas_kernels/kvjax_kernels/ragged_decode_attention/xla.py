"""Plain JAX: two matrix products over whole kv rows, or a loop over blocks of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax_kernels.ragged_decode_attention import xla_blocks, xla_split
from kvjax_kernels.ragged_decode_attention.dense import Asking, Attended, attend, product
from kvjax_kernels.ragged_decode_attention.parts import combined
from kvjax_kernels.ragged_decode_attention.types import DecodeAttention
from kvjax_kernels.split_rows import SplitRows, head_starts, of_heads


@functools.partial(jax.jit, static_argnames=("segments", "scale", "sinks", "token_attention"))
def run(
    query: Float[Array, "B N D"],
    kv: Float[Array, "B S twoD"] | SplitRows,
    lengths: Int[Array, "B K"],
    *,
    segments: tuple[int, ...] | None,
    starts: Int[Array, "B K"],
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
    by: dict[str, Any] = {"own_key": own_key, "own_value": own_value, "scale": scale}
    by |= {"segments": segments, "sink_query": sink_query, "sinks": sinks, "token_attention": token_attention}
    if isinstance(kv, SplitRows):
        return xla_split.attend_split(query, kv, lengths, **by)
    uniform = segments is not None and len(set(segments)) == 1
    if not uniform and not token_attention:
        return combined(xla_blocks.attend_parts, query, kv, lengths, starts=starts, **by)
    batch, query_heads, head_dim = query.shape
    kv_heads = lengths.shape[1]
    asking = Asking.of(query, sink_query, own_key, own_value, kv_heads=kv_heads)
    if not uniform and sink_query is None:
        # All heads' queries over all rows: as if there were one KV head.
        place = jnp.arange(kv.shape[1], dtype=jnp.int32)[None, None] - starts[:, :, None]
        valid = jnp.repeat((place >= 0) & (place < lengths[:, :, None]), query_heads // kv_heads, axis=1)
        flat = asking.mapped(lambda x: x.reshape(batch, 1, query_heads, head_dim))
        pieces = [_attend(flat, kv[:, None], valid[:, None], scale=scale, sinks=sinks)]
    else:
        assert segments is not None
        pieces = []
        for heads, rows in _by_segment(kv, segments):
            valid = jnp.arange(rows.shape[2], dtype=jnp.int32)[None, None] < of_heads(lengths, heads)[:, :, None]
            pieces.append(_attend(asking.of_heads(heads), rows, valid[:, :, None], scale=scale, sinks=sinks))
    output = jnp.concatenate([piece.output for piece in pieces], axis=1).reshape(batch, query_heads, head_dim)
    log_sum_exp = jnp.concatenate([piece.log_sum_exp for piece in pieces], axis=1).reshape(batch, query_heads)
    attention, own_attention = None, None
    if token_attention:
        attention = jnp.concatenate([piece.probabilities.sum(2).reshape(batch, -1) for piece in pieces], axis=1)
        own = jnp.concatenate([piece.own for piece in pieces], axis=1)
        own_attention = own.reshape(batch, kv_heads, -1).sum(2)
    return DecodeAttention(output, log_sum_exp, attention, own_attention)


def _by_segment(kv: Float[Array, "B S twoD"], segments: tuple[int, ...]) -> list[tuple[tuple[int, ...], jax.Array]]:
    """KV heads, and their rows [B, heads, S, 2D]: all together where the segments are equal."""
    if len(set(segments)) == 1:
        return [(tuple(range(len(segments))), kv.reshape(kv.shape[0], len(segments), segments[0], -1))]
    starts = head_starts(segments)
    return [
        ((head,), kv[:, None, start : start + slots])
        for head, (start, slots) in enumerate(zip(starts, segments, strict=True))
    ]


def _attend(
    asking: Asking,
    rows: Float[Array, "B K S twoD"],
    valid: Bool[Array, "B K R S"],
    *,
    scale: float,
    sinks: int,
) -> Attended:
    """Attention over whole kv rows."""
    head_dim = asking.query.shape[-1]
    # [q | 0] . [k | v] = q . k: slicing the keys out of the rows would copy half the cache.
    padded = jnp.pad(asking.query, ((0, 0), (0, 0), (0, 0), (0, head_dim)))
    scores = product("bkmd,bksd->bkms", padded, rows)
    to_sinks = None
    if asking.sink_query is not None:
        to_sinks = product("bkmd,bksd->bkms", asking.sink_query, rows[:, :, :sinks, :head_dim])
    return attend(asking, scores, to_sinks, rows, valid, scale=scale)
