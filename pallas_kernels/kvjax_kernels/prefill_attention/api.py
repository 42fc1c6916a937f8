"""`prefill_attention` and `extend_attention`: check arguments and choose an implementation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_PREFILL = ("xla", "splash", "cudnn", "reference")


def prefill_attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    *,
    window: int | None = None,
    log_sum_exp: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"] | None]:
    """Causal attention of a prompt over itself; scores are scaled by 1 / sqrt(D).

    Rows of a batch may be shorter than T: what stands right of a row's end is seen by none of its tokens.

    Args:
        query: rotated queries; N is a multiple of K, consecutive heads share a KV head.
        key: rotated keys.
        value: values.
        window: if given, token i sees itself and the `window` tokens before it, no more.
        log_sum_exp: whether it is needed.
        implementation: "xla" (any platform), "splash" (TPU), "cudnn" (NVIDIA, 16 bits) or "reference";
            None takes splash on TPU where head size and length allow, cuDNN on NVIDIA in 16 bits, else xla.

    Returns:
        The output in the query's dtype, and each query's natural log-sum-exp of the scaled scores, float32; it may
        be None where it was not asked for.

    Raises:
        ValueError: shapes that do not fit each other, or an unknown implementation.
        NotImplementedError: the named implementation cannot do this shape, dtype or platform.
    """
    if query.shape[:2] != key.shape[:2] or key.shape != value.shape or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"`query` [B, T, N, D], `key` and `value` [B, T, K, D] must agree, "
            f"got {query.shape}, {key.shape} and {value.shape}."
        )
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"{query.shape[2]} query heads do not group over {key.shape[2]} KV heads.")
    if window is not None and window < 0:
        raise ValueError(f"`window` must not be negative, got {window}.")
    name = implementation or _by_platform(query, window, log_sum_exp)
    if name == "xla":
        from kvjax_kernels.prefill_attention import xla

        return xla.prefill_attention(query, key, value, window=window)
    if name == "splash":
        from kvjax_kernels.prefill_attention import tpu

        return tpu.prefill_attention(query, key, value, window=window)
    if name == "cudnn":
        from kvjax_kernels.prefill_attention import gpu

        if log_sum_exp:
            raise NotImplementedError("cuDNN's attention does not give out the log-sum-exp.")
        return gpu.prefill_attention(query, key, value, window=window), None
    if name == "reference":
        from kvjax_kernels.prefill_attention import reference

        return reference.prefill_attention(query, key, value, window=window)
    raise ValueError(f"`implementation` must be one of {', '.join(_PREFILL)}, got {name!r}.")


def _by_platform(query: jax.Array, window: int | None, log_sum_exp: bool) -> str:
    platform = jax.default_backend()
    if platform == "tpu":
        from kvjax_kernels.prefill_attention import tpu

        return "splash" if tpu.supports(query) else "xla"
    if platform == "gpu" and window is None and not log_sum_exp and query.dtype in (jnp.bfloat16, jnp.float16):
        return "cudnn"
    return "xla"


def extend_attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B K S D"],
    value: Float[Array, "B K S D"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B K S"],
    *,
    window: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Attention of new tokens over cached and new ones, by position.

    A key is seen by queries at its position or later, if its position is not negative (an empty slot).

    Args:
        query: rotated queries; N is a multiple of K.
        key: rotated keys of each KV head, in any order.
        value: values.
        query_positions: absolute positions; negative for pads, whose output is zero.
        key_positions: absolute positions; negative for empty slots, which may hold anything.
        window: if given, a query at p sees positions p - window to p only.
        implementation: "xla" or "reference"; None is "xla" on every platform.

    Returns:
        The output in the query's dtype, zeros where a query sees nothing; and the natural log-sum-exp of the
        scaled scores, float32, -1e30 where a query sees nothing.
    """
    if key.shape != value.shape or key.shape[:3] != key_positions.shape:
        raise ValueError(
            f"`key`, `value` [B, K, S, D] and `key_positions` [B, K, S] must agree, "
            f"got {key.shape}, {value.shape} and {key_positions.shape}."
        )
    if query.shape[:2] != query_positions.shape or query.shape[2] % key.shape[1]:
        raise ValueError(
            f"`query` [B, T, N, D] must match `query_positions` [B, T] and group over {key.shape[1]} KV heads, "
            f"got {query.shape} and {query_positions.shape}."
        )
    if implementation in (None, "xla"):
        from kvjax_kernels.prefill_attention import xla

        return xla.extend_attention(query, key, value, query_positions, key_positions, window=window)
    if implementation == "reference":
        from kvjax_kernels.prefill_attention import reference

        return reference.extend_attention(query, key, value, query_positions, key_positions, window=window)
    raise ValueError(f'`implementation` must be "xla" or "reference", got {implementation!r}.')
