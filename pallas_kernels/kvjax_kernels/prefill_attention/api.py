"""`prefill_attention`: checks arguments and chooses an implementation."""

from jaxtyping import Array, Float

from kvjax_kernels.dispatch import run


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
        implementation: one of `dispatch.IMPLEMENTATIONS`: "tpu" is JAX's splash attention, "gpu" cuDNN's; None picks
            by platform.

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
    settings = {"window": window, "log_sum_exp": log_sum_exp}
    return run("prefill_attention", implementation, query, key, value, **settings)
