"""The oracle: the whole matrix of scores, for short prompts."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax_kernels.extend_attention import reference


def run(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    *,
    window: int | None,
    log_sum_exp: bool = True,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """See `api.prefill_attention`; log-sum-exps are always given."""
    del log_sum_exp
    batch, length, kv_heads, _ = key.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (batch, length))
    return reference.run(
        query,
        key.swapaxes(1, 2),
        value.swapaxes(1, 2),
        positions,
        jnp.broadcast_to(positions[:, None], (batch, kv_heads, length)),
        window=window,
    )
