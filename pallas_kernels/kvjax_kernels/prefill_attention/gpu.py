"""cuDNN's flash attention, through `jax.nn.dot_product_attention`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax_kernels.devices import compute_capability, missing_nvidia_gpu

# Compute capabilities of generations.
_AMPERE, _HOPPER = (8, 0), (9, 0)


def unsupported_reason(query: Float[Array, "B T N D"], *_: Any, interpret: bool, **__: Any) -> str | None:
    """Why cuDNN cannot do this, by the limits that JAX has for it; None if it can."""
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN's attention takes bfloat16 or float16, not {query.dtype}"
    if interpret:
        return "cuDNN's attention has no interpreter"
    capability, head_dim = compute_capability(query), query.shape[3]
    # Hopper's limits where there is no GPU: the program is for another machine's.
    largest = 128 if capability is not None and capability < _HOPPER else 256
    if head_dim % 8 or head_dim > largest:
        return f"cuDNN's attention takes head sizes that 8 divides, up to {largest}, not {head_dim}"
    return missing_nvidia_gpu(query, least=_AMPERE)


def run(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    *,
    window: int | None,
    log_sum_exp: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"] | None]:
    """See `api.prefill_attention`."""
    del interpret
    attend = functools.partial(
        jax.nn.dot_product_attention,
        query,
        key,
        value,
        is_causal=True,
        local_window_size=None if window is None else (window, 0),
        implementation="cudnn",
    )
    if not log_sum_exp:
        return attend(), None
    output, residual = attend(return_residual=True)
    return output, residual.swapaxes(1, 2).astype(jnp.float32)
