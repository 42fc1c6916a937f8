"""`column_sums`: checks arguments and chooses an implementation."""

from jaxtyping import Array, Float, Int


def column_sums(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B K S D"],
    log_sum_exp: Float[Array, "B N T"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B K S"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B K S"]:
    """The probability that each key gets, summed over all queries and the query heads of its group; float32.

    A second pass over the keys: with each query's log-sum-exp known, sum_i exp(q_i k_j - lse_i) needs one tile of
    scores at a time. A key is seen by queries at its position or later.

    Args:
        query: rotated queries; N is a multiple of K, consecutive heads share a KV head.
        key: rotated keys, finite even where a slot is empty.
        log_sum_exp: of each query's scaled scores over all that it saw.
        query_positions: absolute positions; queries at negative ones count for nothing.
        key_positions: absolute positions; negative for empty slots, which get 0.
        implementation: "xla" or "reference"; None is "xla" on every platform.

    Raises:
        ValueError: shapes that do not fit each other, or an unknown implementation.
    """
    if query.shape[2] % key.shape[1] or log_sum_exp.shape != (query.shape[0], query.shape[2], query.shape[1]):
        raise ValueError(
            f"`query` [B, T, N, D], `key` [B, K, S, D] and `log_sum_exp` [B, N, T] must agree, "
            f"got {query.shape}, {key.shape} and {log_sum_exp.shape}."
        )
    if implementation in (None, "xla"):
        from kvjax_kernels.column_sums import xla

        return xla.column_sums(query, key, log_sum_exp, query_positions, key_positions)
    if implementation == "reference":
        from kvjax_kernels.column_sums import reference

        return reference.column_sums(query, key, log_sum_exp, query_positions, key_positions)
    raise ValueError(f'`implementation` must be "xla" or "reference", got {implementation!r}.')
