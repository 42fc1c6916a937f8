"""Plain JAX for CPU: two matrix products over whole kv rows."""

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
    """See `api.ragged_decode_attention`. Segments of one size share one product; others take one each."""
    kv_heads = len(segments)
    batch, query_heads, head_dim = query.shape

    def grouped(x: jax.Array) -> jax.Array:
        return x.reshape(batch, kv_heads, query_heads // kv_heads, head_dim)

    query = grouped(query)
    sink_query = None if sink_query is None else grouped(sink_query)
    if len(set(segments)) == 1:
        pieces = [(slice(0, kv_heads), kv.reshape(batch, kv_heads, segments[0], -1))]
    else:
        starts = head_starts(segments)
        pieces = [
            (slice(head, head + 1), kv[:, None, starts[head] : starts[head] + segments[head]])
            for head in range(kv_heads)
        ]
    results = [
        _attend(
            query[:, heads],
            rows,
            lengths[:, heads],
            scale=scale,
            sink_query=None if sink_query is None else sink_query[:, heads],
            sinks=sinks,
        )
        for heads, rows in pieces
    ]
    output, log_sum_exp = (jnp.concatenate([r[i] for r in results], axis=1) for i in (0, 1))
    attention = None
    if token_attention:
        attention = jnp.concatenate([r[2].sum(2).reshape(batch, -1) for r in results], axis=1)
    return DecodeAttention(
        output.reshape(batch, query_heads, head_dim), log_sum_exp.reshape(batch, query_heads), attention
    )


def _attend(
    query: Float[Array, "B K G D"],
    kv: Float[Array, "B K S twoD"],
    lengths: Int[Array, "B K"],
    *,
    scale: float,
    sink_query: Float[Array, "B K G D"] | None,
    sinks: int,
) -> tuple[Float[Array, "B K G D"], Float[Array, "B K G"], Float[Array, "B K G S"]]:
    head_dim = query.shape[-1]
    # [q | 0] . [k | v] = q . k: slicing the keys out of the rows would copy half the cache.
    padded = jnp.pad(query, ((0, 0), (0, 0), (0, 0), (0, head_dim)))
    scores = jnp.einsum("bkgd,bksd->bkgs", padded, kv, preferred_element_type=jnp.float32)
    if sink_query is not None:
        to_sinks = jnp.einsum(
            "bkgd,bksd->bkgs", sink_query, kv[:, :, :sinks, :head_dim], preferred_element_type=jnp.float32
        )
        scores = jax.lax.dynamic_update_slice(scores, to_sinks, (0, 0, 0, 0))
    valid = (jnp.arange(kv.shape[2])[None, None] < lengths[:, :, None])[:, :, None]
    scores = jnp.where(valid, scores * scale, MASKED)
    largest = scores.max(axis=-1, keepdims=True)
    weights = jnp.where(valid, jnp.exp(scores - largest), 0.0)
    total = jnp.maximum(weights.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    probabilities = weights / total

    def weighted(rows: jax.Array) -> jax.Array:
        product = jnp.einsum(
            "bkgs,bksd->bkgd", probabilities.astype(rows.dtype), rows, preferred_element_type=jnp.float32
        )
        return product[..., head_dim:]

    # An empty slot may hold NaN, and 0 * NaN is NaN. Clearing the empty slots first copies the cache, so it is
    # done only when the plain product shows that it has to be.
    output = weighted(kv)
    output = jax.lax.cond(
        jnp.isfinite(output).all(),
        lambda: output,
        lambda: weighted(jnp.where(valid[:, :, 0, :, None], kv, jnp.zeros((), kv.dtype))),
    )
    log_sum_exp = jnp.where(lengths[:, :, None] > 0, (largest + jnp.log(total))[..., 0], MASKED)
    return output, log_sum_exp, probabilities
