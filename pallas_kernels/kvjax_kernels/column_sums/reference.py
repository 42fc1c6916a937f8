"""The oracle: the whole matrix of probabilities, summed."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def run(
    query: Float[Array, "B T N D"],
    kv: Float[Array, "B K S twoD"],
    log_sum_exp: Float[Array, "B N T"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B K S"],
) -> Float[Array, "B K S"]:
    """See `api.column_sums`."""
    batch, kv_heads, slots = key_positions.shape
    head_dim = query.shape[3]
    group = query.shape[2] // kv_heads
    keys = jnp.repeat(kv[..., :head_dim].astype(jnp.float32), group, axis=1)
    scores = jnp.einsum("btnd,bnsd->bnts", query.astype(jnp.float32), keys) / head_dim**0.5
    rows = query_positions[:, None, :, None]
    columns = jnp.repeat(key_positions, group, axis=1)[:, :, None, :]
    seen = (columns >= 0) & (columns <= rows)
    probabilities = jnp.where(seen, jnp.exp(scores - log_sum_exp[..., None]), 0.0)
    return probabilities.sum(2).reshape(batch, kv_heads, group, slots).sum(2)
