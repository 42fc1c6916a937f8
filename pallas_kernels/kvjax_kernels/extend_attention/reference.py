"""The oracle: the whole matrix of scores."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax_kernels.masking import MASKED


def run(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B K S D"],
    value: Float[Array, "B K S D"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B K S"],
    *,
    window: int | None,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """See `api.extend_attention`."""
    group = query.shape[2] // key.shape[1]
    held = key_positions >= 0
    key, value = (
        jnp.repeat(jnp.where(held[..., None], x, jnp.zeros((), x.dtype)).astype(jnp.float32), group, axis=1)
        for x in (key, value)
    )
    distance = query_positions[:, None, :, None] - jnp.repeat(key_positions, group, axis=1)[:, :, None, :]
    seen = (distance >= 0) & jnp.repeat(held, group, axis=1)[:, :, None, :]
    seen &= (query_positions >= 0)[:, None, :, None]
    if window is not None:
        seen &= distance <= window
    scores = jnp.einsum("btnd,bnsd->bnts", query.astype(jnp.float32), key) / query.shape[3] ** 0.5
    log_sum_exp = jax.nn.logsumexp(jnp.where(seen, scores, MASKED), axis=-1)
    probabilities = jnp.where(seen, jnp.exp(scores - log_sum_exp[..., None]), 0.0)
    output = jnp.einsum("bnts,bnsd->btnd", probabilities, value)
    return output.astype(query.dtype), jnp.where(seen.any(-1), log_sum_exp, MASKED)
