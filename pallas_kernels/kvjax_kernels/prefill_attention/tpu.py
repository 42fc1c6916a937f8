"""Splash attention, JAX's own TPU kernel, with grouped queries."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_BLOCK = 128


def unsupported_reason(query: Float[Array, "B T N D"], *_: Any, **__: Any) -> str | None:
    """Why splash attention cannot do this; None if it can."""
    length, head_dim = query.shape[1], query.shape[3]
    if length % _BLOCK:
        return f"splash attention takes whole blocks of {_BLOCK} tokens, not {length} tokens"
    if head_dim not in (64, 96) and head_dim % 128:
        return f"splash attention takes head sizes 64, 96 and multiples of 128, not {head_dim}"
    if query.dtype == jnp.float16:
        return "splash attention takes bfloat16 or float32, not float16"
    return None


def run(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    *,
    window: int | None,
    log_sum_exp: bool = True,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """See `api.prefill_attention`; log-sum-exps are always given."""
    from jax.experimental.pallas.ops.tpu import splash_attention

    _, length, query_heads, head_dim = query.shape
    if window is None:
        mask = splash_attention.CausalMask((length, length))
    else:
        mask = splash_attention.LocalMask((length, length), (window, 0), offset=0)
    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([mask] * query_heads),
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
        interpret=interpret,
    )
    scaled = (query.astype(jnp.float32) * head_dim**-0.5).astype(query.dtype)
    del log_sum_exp
    output, (sums,) = jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (scaled, key, value)))
    return output.swapaxes(1, 2).astype(query.dtype), sums
