"""`extend_attention`: checks arguments and chooses an implementation."""

from jaxtyping import Array, Float, Int

from kvjax_kernels.dispatch import run


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
    arrays = query, key, value, query_positions, key_positions
    return run("extend_attention", implementation, *arrays, window=window)
