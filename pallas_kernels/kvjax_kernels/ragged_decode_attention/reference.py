"""The oracle: one row and one head at a time, masked softmax as in the textbook."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax_kernels.masking import MASKED
from kvjax_kernels.ragged_decode_attention.types import DecodeAttention
from kvjax_kernels.split_rows import SplitRows, join_rows


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
    """See `api.ragged_decode_attention`."""
    batch, query_heads, head_dim = query.shape
    kv_heads = lengths.shape[1]
    group = query_heads // kv_heads
    if isinstance(kv, SplitRows):
        kv = join_rows(kv, segments or ())
    slots = jnp.arange(kv.shape[1], dtype=jnp.int32)

    def one(row: int, head: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Output, log-sum-exp, and the probabilities of all slots, then of the asking token."""
        kv_head = head // group
        place = slots - starts[row, kv_head]
        valid = (place >= 0) & (place < lengths[row, kv_head])
        rows = jnp.where(valid[:, None], kv[row].astype(jnp.float32), 0.0)
        key, value = rows[:, :head_dim], rows[:, head_dim:]
        scores = key @ query[row, head].astype(jnp.float32) * scale
        if sink_query is not None:
            to_sinks = key @ sink_query[row, head].astype(jnp.float32) * scale
            scores = jnp.where(place < sinks, to_sinks, scores)
        if own_key is not None and own_value is not None:
            own_score = own_key[row, kv_head].astype(jnp.float32) @ query[row, head].astype(jnp.float32) * scale
            own = own_value[row, kv_head].astype(jnp.float32)
        else:
            own_score, own = jnp.zeros((), jnp.float32), jnp.zeros(head_dim, jnp.float32)
        valid = jnp.append(valid, own_key is not None)
        scores = jnp.where(valid, jnp.append(scores, own_score), -jnp.inf)
        empty = ~valid.any()
        probabilities = jnp.where(empty, 0.0, jax.nn.softmax(jnp.where(empty, 0.0, scores)))
        log_sum_exp = jnp.where(empty, MASKED, jax.nn.logsumexp(jnp.where(empty, 0.0, scores)))
        return probabilities @ jnp.concatenate([value, own[None]]), log_sum_exp, probabilities

    parts = [[one(row, head) for head in range(query_heads)] for row in range(batch)]
    attention, own_attention = None, None
    if token_attention:
        probabilities = jnp.stack([jnp.stack([part[2] for part in row]) for row in parts])
        attention = probabilities[:, :, :-1].sum(1)
        own_attention = probabilities[:, :, -1].reshape(batch, kv_heads, group).sum(2)
    return DecodeAttention(
        output=jnp.stack([jnp.stack([part[0] for part in row]) for row in parts]),
        log_sum_exp=jnp.stack([jnp.stack([part[1] for part in row]) for row in parts]),
        token_attention=attention,
        own_attention=own_attention,
    )
