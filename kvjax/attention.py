"""Attention as policies need it: the queries of a call, and pieces that are merged by their log-sum-exps."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.rope import Rotation
from kvjax.state import EMPTY, Rows
from kvjax_kernels import extend_attention, prefill_attention
from kvjax_kernels.dispatch import Implementation, implementation_of
from kvjax_kernels.log_sum_exps import weights


class Asked(NamedTuple):
    """The queries of one call, for attention, and for policies that score tokens by the attention they get.

    Attributes:
        query: [B, T, N, D], rotated to `positions`.
        unrotated: the same before RoPE.
        positions: [B, T], `EMPTY` for pads.
        log_sum_exp: [B, N, T], of each query's scaled scores over all that it saw; None before the attention, and
            unless the policy asks for it by `needs_log_sum_exp`.
        rope: the model's position embedding.
        implementation: which kernels run; None picks by platform.
    """

    query: Float[Array, "B T N D"]
    unrotated: Float[Array, "B T N D"]
    positions: Int[Array, "B T"]
    log_sum_exp: Float[Array, "B N T"] | None
    rope: Rotation
    implementation: Implementation = None

    def implementation_of(self, operation: str) -> str | None:
        """The implementation of one operation."""
        return implementation_of(self.implementation, operation)


def merge(
    output: Float[Array, "*shape D"],
    log_sum_exp: Float[Array, "*shape"],
    other_output: Float[Array, "*shape D"],
    other_log_sum_exp: Float[Array, "*shape"],
) -> tuple[Float[Array, "*shape D"], Float[Array, "*shape"]]:
    """Attention over two disjoint sets of keys from the attention over each; float32.

    A piece that saw nothing has a log-sum-exp of -1e30 and counts for nothing.
    """
    (weight, other_weight), total, merged_log_sum_exp = weights(jnp.stack([log_sum_exp, other_log_sum_exp]), 0)
    merged = output * (weight / total)[..., None] + other_output * (other_weight / total)[..., None]
    return merged, merged_log_sum_exp


def streaming_prefill_attention(
    asked: Asked,
    sink_query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    *,
    window: int,
    sinks: int,
) -> Float[Array, "B T N D"]:
    """A prompt's attention where every token sees `sinks`, the `window` tokens before it, and itself.

    Args:
        asked: the queries, at positions 0, 1, 2, ..., then `EMPTY` for pads.
        sink_query: queries rotated to the place from which they see the sinks.
        key: keys rotated to their positions.
        value: values.
        window: tokens before each one that it sees.
        sinks: first tokens that all see.
    """
    positions = asked.positions
    output, log_sum_exp = prefill_attention(
        asked.query,
        key,
        value,
        window=window,
        log_sum_exp=True,
        implementation=asked.implementation_of("prefill_attention"),
    )
    if not sinks:
        return output
    assert log_sum_exp is not None
    # The band shows the sinks to the first tokens; the others see them beside it.
    outside = jnp.maximum(positions - window - 1, EMPTY)
    first = jnp.broadcast_to(positions[:, None, :sinks], (key.shape[0], key.shape[2], min(sinks, key.shape[1])))
    return _with_sinks(
        output,
        log_sum_exp,
        asked._replace(query=sink_query, positions=outside),
        key[:, :sinks].swapaxes(1, 2),
        value[:, :sinks].swapaxes(1, 2),
        first,
    )


def streaming_extend_attention(
    asked: Asked, sink_query: Float[Array, "B T N D"], rows: Rows, *, window: int | None, sinks: int
) -> Float[Array, "B T N D"]:
    """Attention of further tokens over `rows`, sinks seen by `sink_query`.

    Args:
        asked: the queries.
        sink_query: queries rotated to the place from which they see the sinks.
        rows: cached and new tokens, in ascending position.
        window: tokens before each one that it sees beside the sinks; None for all.
        sinks: first positions, seen by all.
    """
    query, positions = asked.query, asked.positions
    key, value = rows.key.astype(query.dtype), rows.value.astype(query.dtype)
    others = jnp.where(rows.positions < sinks, EMPTY, rows.positions)
    output, log_sum_exp = extend_attention(
        query,
        key,
        value,
        positions,
        others,
        window=window,
        implementation=asked.implementation_of("extend_attention"),
    )
    if not sinks:
        return output
    first = rows.positions[:, :, :sinks]
    first = jnp.where(first < sinks, first, EMPTY)
    asked = asked._replace(query=sink_query)
    return _with_sinks(output, log_sum_exp, asked, key[:, :, :sinks], value[:, :, :sinks], first)


def _with_sinks(
    output: Float[Array, "B T N D"],
    log_sum_exp: Float[Array, "B N T"],
    asked: Asked,
    key: Float[Array, "B K S D"],
    value: Float[Array, "B K S D"],
    positions: Int[Array, "B K S"],
) -> Float[Array, "B T N D"]:
    """Adds the first tokens to attention over others."""
    to_sinks, sink_log_sum_exp = extend_attention(
        asked.query,
        key,
        value,
        asked.positions,
        positions,
        implementation=asked.implementation_of("extend_attention"),
    )
    merged, _ = merge(
        output.astype(jnp.float32),
        log_sum_exp.swapaxes(1, 2),
        to_sinks.astype(jnp.float32),
        sink_log_sum_exp.swapaxes(1, 2),
    )
    return merged.astype(output.dtype)
