"""`prefill_attention` and `extend_attention`: check arguments and choose an implementation."""

from jaxtyping import Array, Float, Int

from kvjax_kernels.dispatch import choose


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

    def no_tpu() -> str | None:
        from kvjax_kernels.prefill_attention import tpu

        return tpu.obstacle(query)

    def no_gpu() -> str | None:
        from kvjax_kernels.prefill_attention import gpu

        return gpu.obstacle(query, interpret=implementation == "gpu-interpret")

    choice = choose("prefill_attention", implementation, {"tpu": no_tpu, "gpu": no_gpu})
    if choice.backend == "tpu":
        from kvjax_kernels.prefill_attention import tpu

        return tpu.prefill_attention(query, key, value, window=window, interpret=choice.interpret)
    if choice.backend == "gpu":
        from kvjax_kernels.prefill_attention import gpu

        return gpu.prefill_attention(query, key, value, window=window, log_sum_exp=log_sum_exp)
    if choice.backend == "xla":
        from kvjax_kernels.prefill_attention import xla

        return xla.prefill_attention(query, key, value, window=window)
    from kvjax_kernels.prefill_attention import reference

    return reference.prefill_attention(query, key, value, window=window)


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
    if choose("extend_attention", implementation, {}).backend == "xla":
        from kvjax_kernels.prefill_attention import xla

        return xla.extend_attention(query, key, value, query_positions, key_positions, window=window)
    from kvjax_kernels.prefill_attention import reference

    return reference.extend_attention(query, key, value, query_positions, key_positions, window=window)
