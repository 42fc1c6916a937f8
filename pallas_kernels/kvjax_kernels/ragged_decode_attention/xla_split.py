"""Plain JAX over keys and values that lie apart: two matrix products over all slots of each group of heads."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax_kernels.ragged_decode_attention.dense import Asking, attend, product
from kvjax_kernels.ragged_decode_attention.types import DecodeAttention
from kvjax_kernels.split_rows import SplitRows, head_groups, in_head_order, of_heads


def attend_split(
    query: Float[Array, "B N D"],
    rows: SplitRows,
    lengths: Int[Array, "B K"],
    *,
    segments: tuple[int, ...],
    own_key: Float[Array, "B K D"] | None,
    own_value: Float[Array, "B K D"] | None,
    scale: float,
    sink_query: Float[Array, "B N D"] | None,
    sinks: int,
    token_attention: bool,
) -> DecodeAttention:
    """See `api.ragged_decode_attention`."""
    asking = Asking.of(query, sink_query, own_key, own_value, kv_heads=len(segments))
    groups = head_groups(segments)
    attended = []
    for heads, key, value in zip(groups, rows.keys, rows.values, strict=True):
        mine = asking.of_heads(heads)
        scores = product("bkmd,bkds->bkms", mine.query, key)
        to_sinks = None
        if mine.sink_query is not None:
            to_sinks = product("bkmd,bkds->bkms", mine.sink_query, key[..., :sinks])
        valid = jnp.arange(key.shape[3], dtype=jnp.int32)[None, None, None] < of_heads(lengths, heads)[:, :, None, None]
        attended.append(attend(mine, scores, to_sinks, value, valid, scale=scale))
    output = jnp.stack(in_head_order([piece.output for piece in attended], groups), axis=1)
    log_sum_exp = jnp.stack(in_head_order([piece.log_sum_exp for piece in attended], groups), axis=1)
    attention, own_attention = None, None
    if token_attention:
        attention = jnp.concatenate(in_head_order([p.probabilities.sum(2) for p in attended], groups), axis=1)
        own_attention = jnp.stack(in_head_order([p.own.sum(2) for p in attended], groups), axis=1)
    return DecodeAttention(output.reshape(query.shape), log_sum_exp.reshape(query.shape[:2]), attention, own_attention)
