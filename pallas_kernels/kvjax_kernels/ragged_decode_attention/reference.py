"""The oracle: one row and one head at a time, masked softmax as in the textbook."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax_kernels.masking import MASKED
from kvjax_kernels.ragged_decode_attention.api import DecodeAttention, head_starts


def ragged_decode_attention(
    query: Float[Array, "B N D"],
    kv: Float[Array, "B S twoD"],
    lengths: Int[Array, "B K"],
    *,
    segments: tuple[int, ...],
    scale: float,
    sink_query: Float[Array, "B N D"] | None,
    sinks: int,
    token_attention: bool,
) -> DecodeAttention:
    """See `api.ragged_decode_attention`."""
    group = query.shape[1] // len(segments)
    head_dim = query.shape[2]
    starts = head_starts(segments)

    def one(row: int, head: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        kv_head = head // group
        rows = kv[row, starts[kv_head] : starts[kv_head] + segments[kv_head]].astype(jnp.float32)
        slots = jnp.arange(segments[kv_head])
        valid = slots < lengths[row, kv_head]
        rows = jnp.where(valid[:, None], rows, 0.0)
        key, value = rows[:, :head_dim], rows[:, head_dim:]
        scores = key @ query[row, head].astype(jnp.float32) * scale
        if sink_query is not None:
            to_sinks = key @ sink_query[row, head].astype(jnp.float32) * scale
            scores = jnp.where(slots < sinks, to_sinks, scores)
        scores = jnp.where(valid, scores, -jnp.inf)
        empty = lengths[row, kv_head] == 0
        probabilities = jnp.where(empty, 0.0, jax.nn.softmax(jnp.where(empty, 0.0, scores)))
        log_sum_exp = jnp.where(empty, MASKED, jax.nn.logsumexp(jnp.where(empty, 0.0, scores)))
        return probabilities @ value, log_sum_exp, probabilities

    batch, query_heads, _ = query.shape
    parts = [[one(row, head) for head in range(query_heads)] for row in range(batch)]
    attention = None
    if token_attention:
        attention = jnp.stack(
            [
                jnp.concatenate(
                    [
                        sum((row[k * group + g][2] for g in range(group)), jnp.zeros(segments[k]))
                        for k in range(len(segments))
                    ]
                )
                for row in parts
            ]
        )
    return DecodeAttention(
        output=jnp.stack([jnp.stack([part[0] for part in row]) for row in parts]),
        log_sum_exp=jnp.stack([jnp.stack([part[1] for part in row]) for row in parts]),
        token_attention=attention,
    )
