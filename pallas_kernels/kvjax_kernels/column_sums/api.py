"""`column_sums`: checks arguments and chooses an implementation."""

from jaxtyping import Array, Float, Int

from kvjax_kernels.dispatch import run


def column_sums(
    query: Float[Array, "B T N D"],
    kv: Float[Array, "B K S twoD"],
    log_sum_exp: Float[Array, "B N T"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B K S"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B K S"]:
    """The probability that each key gets, summed over all queries and the query heads of its group; float32.

    A second pass over the keys: with each query's log-sum-exp known, sum_i exp(q_i k_j - lse_i) needs one tile of
    scores at a time. A key is seen by queries at its position or later. Tiles that no query can see are neither
    loaded nor computed where positions ascend.

    Args:
        query: rotated queries; N is a multiple of K, consecutive heads share a KV head.
        kv: rows of each KV head: the rotated key, then the value, which is not looked at; in an empty slot anything.
        log_sum_exp: of each query's scaled scores over all that it saw.
        query_positions: absolute positions; queries at negative ones count for nothing.
        key_positions: absolute positions; negative for empty slots, which get 0.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None picks by platform.

    Raises:
        ValueError: shapes that do not fit each other, or an unknown implementation.
        NotImplementedError: the named implementation cannot do this.
    """
    batch, length, query_heads, head_dim = query.shape
    if (
        kv.shape[3] != 2 * head_dim
        or query_heads % kv.shape[1]
        or log_sum_exp.shape != (batch, query_heads, length)
        or kv.dtype != query.dtype
    ):
        raise ValueError(
            f"`query` [B, T, N, D], `kv` [B, K, S, 2D] of the same dtype and `log_sum_exp` [B, N, T] must agree, "
            f"got {query.dtype} {query.shape}, {kv.dtype} {kv.shape} and {log_sum_exp.shape}."
        )
    return run("column_sums", implementation, query, kv, log_sum_exp, query_positions, key_positions)
