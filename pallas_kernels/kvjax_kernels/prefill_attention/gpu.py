"""cuDNN's flash attention, through `jax.nn.dot_product_attention`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def prefill_attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    *,
    window: int | None,
) -> Float[Array, "B T N D"]:
    """See `api.prefill_attention`."""
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"cuDNN's attention takes bfloat16 or float16, got {query.dtype}.")
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        local_window_size=None if window is None else (window, 0),
        implementation="cudnn",
    )
