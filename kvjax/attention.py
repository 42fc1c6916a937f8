"""Attention as policies need it: pieces that are merged by their log-sum-exps."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.state import EMPTY, Rows
from kvjax_kernels import extend_attention, prefill_attention
from kvjax_kernels.masking import MASKED


def merge(
    output: Float[Array, "*shape D"],
    log_sum_exp: Float[Array, "*shape"],
    other_output: Float[Array, "*shape D"],
    other_log_sum_exp: Float[Array, "*shape"],
) -> tuple[Float[Array, "*shape D"], Float[Array, "*shape"]]:
    """Attention over two disjoint sets of keys from the attention over each; float32.

    A piece that saw nothing has a log-sum-exp of -1e30 and counts for nothing.
    """
    largest = jnp.maximum(log_sum_exp, other_log_sum_exp)
    weight, other_weight = jnp.exp(log_sum_exp - largest), jnp.exp(other_log_sum_exp - largest)
    weight = jnp.where(log_sum_exp <= MASKED / 2, 0.0, weight)
    other_weight = jnp.where(other_log_sum_exp <= MASKED / 2, 0.0, other_weight)
    total = jnp.maximum(weight + other_weight, jnp.finfo(jnp.float32).tiny)
    merged = output * (weight / total)[..., None] + other_output * (other_weight / total)[..., None]
    return merged, jnp.where(weight + other_weight > 0, largest + jnp.log(total), MASKED)


def streaming_prefill_attention(
    query: Float[Array, "B T N D"],
    sink_query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    positions: Int[Array, "B T"],
    *,
    window: int,
    sinks: int,
) -> Float[Array, "B T N D"]:
    """A prompt's attention where every token sees `sinks`, the `window` tokens before it, and itself.

    Args:
        query: queries rotated to `positions`.
        sink_query: queries rotated to the place from which they see the sinks.
        key: keys rotated to `positions`.
        value: values.
        positions: 0, 1, 2, ..., then `EMPTY` for pads.
        window: tokens before each one that it sees.
        sinks: first tokens that all see.
    """
    output, log_sum_exp = prefill_attention(query, key, value, window=window, log_sum_exp=True)
    if not sinks:
        return output
    assert log_sum_exp is not None
    # The band shows the sinks to the first tokens; the others see them beside it.
    outside = jnp.maximum(positions - window - 1, EMPTY)
    first = Rows(
        key[:, :sinks].swapaxes(1, 2),
        value[:, :sinks].swapaxes(1, 2),
        jnp.broadcast_to(positions[:, None, :sinks], (key.shape[0], key.shape[2], min(sinks, key.shape[1]))),
    )
    return _with_sinks(output, log_sum_exp, sink_query, outside, first)


def streaming_extend_attention(
    query: Float[Array, "B T N D"],
    sink_query: Float[Array, "B T N D"],
    rows: Rows,
    positions: Int[Array, "B T"],
    *,
    window: int | None,
    sinks: int,
) -> Float[Array, "B T N D"]:
    """Attention of further tokens over `rows`, sinks seen by `sink_query`.

    Args:
        query: queries rotated to `positions`.
        sink_query: queries rotated to the place from which they see the sinks.
        rows: cached and new tokens, in ascending position.
        positions: absolute, `EMPTY` for pads.
        window: tokens before each one that it sees beside the sinks; None for all.
        sinks: first positions, seen by all.
    """
    key, value = rows.key.astype(query.dtype), rows.value.astype(query.dtype)
    others = jnp.where(rows.positions < sinks, EMPTY, rows.positions)
    output, log_sum_exp = extend_attention(query, key, value, positions, others, window=window)
    if not sinks:
        return output
    first = rows.positions[:, :, :sinks]
    first = Rows(key[:, :, :sinks], value[:, :, :sinks], jnp.where(first < sinks, first, EMPTY))
    return _with_sinks(output, log_sum_exp, sink_query, positions, first)


def _with_sinks(
    output: Float[Array, "B T N D"],
    log_sum_exp: Float[Array, "B N T"],
    sink_query: Float[Array, "B T N D"],
    sees_up_to: Int[Array, "B T"],
    first: Rows,
) -> Float[Array, "B T N D"]:
    """Adds the first tokens to attention over others."""
    to_sinks, sink_log_sum_exp = extend_attention(sink_query, first.key, first.value, sees_up_to, first.positions)
    merged, _ = merge(
        output.astype(jnp.float32),
        log_sum_exp.swapaxes(1, 2),
        to_sinks.astype(jnp.float32),
        sink_log_sum_exp.swapaxes(1, 2),
    )
    return merged.astype(output.dtype)
