"""The oracle: every score at once, pooling by XLA's windows."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax_kernels.masking import MASKED


def run(
    query: Float[Array, "B W N D"],
    kv: Float[Array, "B K S twoD"],
    query_positions: Int[Array, "B W"],
    key_positions: Int[Array, "B K S"],
    *,
    excluded: int,
    kernel: int,
    pooling: Literal["max", "avg"],
    group_reduce: Literal["mean", "max"],
    reduce: Literal["before_pooling", "after_pooling"],
) -> Float[Array, "B K S"]:
    """See `api.pooled_attention`."""
    batch, window, query_heads, head_dim = query.shape
    kv_heads, slots = kv.shape[1:3]
    grouped = query.astype(jnp.float32).reshape(batch, window, kv_heads, query_heads // kv_heads, head_dim)
    scores = jnp.einsum("bwkgd,bksd->bkgws", grouped, kv[..., :head_dim].astype(jnp.float32), precision="highest")
    columns = key_positions[:, :, None, None]
    seen = (columns >= 0) & (columns <= query_positions[:, None, None, :, None])
    probabilities = jax.nn.softmax(jnp.where(seen, scores / head_dim**0.5, MASKED), axis=-1)
    voters = jnp.maximum((query_positions >= 0).sum(-1, dtype=jnp.float32), 1.0)[:, None, None, None]
    attention = jnp.where(seen, probabilities, 0.0).sum(3) / voters
    lengths = (key_positions >= 0).sum(-1, keepdims=True, dtype=jnp.int32)
    counted = jnp.arange(slots, dtype=jnp.int32)[None, None] < lengths - excluded

    def reduced(x: jax.Array) -> jax.Array:
        return x.mean(2, keepdims=True) if group_reduce == "mean" else x.max(2, keepdims=True)

    if reduce == "before_pooling":
        attention = reduced(attention)
    outside, combine = (0.0, jax.lax.add) if pooling == "avg" else (-jnp.inf, jax.lax.max)
    attention = jax.lax.reduce_window(
        jnp.where(counted[:, :, None], attention, outside), outside, combine, (1, 1, 1, kernel), (1,) * 4, "SAME"
    )
    if pooling == "avg":
        attention = attention / kernel
    if reduce == "after_pooling":
        attention = reduced(attention)
    return jnp.where(counted, attention[:, :, 0], 0.0)
