"""`pooled_attention`: checks arguments and chooses an implementation.

B batch, W queries that vote, N query heads, K KV heads, S slots, D head dim.
"""

from typing import Literal

from jaxtyping import Array, Float, Int

from kvjax_kernels.dispatch import run


def pooled_attention(
    query: Float[Array, "B W N D"],
    kv: Float[Array, "B K S twoD"],
    query_positions: Int[Array, "B W"],
    key_positions: Int[Array, "B K S"],
    *,
    excluded: int = 0,
    kernel: int = 1,
    pooling: Literal["max", "avg"] = "max",
    group_reduce: Literal["mean", "max"] = "mean",
    reduce: Literal["before_pooling", "after_pooling"] = "before_pooling",
    implementation: str | None = None,
) -> Float[Array, "B K S"]:
    """The attention that each token gets from some queries, averaged over them and pooled along the tokens; float32.

    Every softmax is over all the tokens that the query sees: those at its position or before.

    Args:
        query: rotated queries; N is a multiple of K, consecutive heads share a KV head.
        kv: one row a token, the rotated key, then the value, so that the last axis fills a TPU's lanes. Tokens of a
            head are a prefix of its slots, in ascending position; the slots behind may hold anything, NaN included.
        query_positions: absolute positions; queries at negative ones have no vote.
        key_positions: absolute positions; negative for empty slots, which score 0.
        excluded: last tokens of each head that are not voted on: they score 0, and are not pooled.
        kernel: width of the centred window of the pooling, odd; 1 pools nothing.
        pooling: "max"; or "avg", where what is outside counts as zeros.
        group_reduce: over the query heads of a KV head.
        reduce: whether the group is reduced before or after the pooling.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None picks by platform.

    Raises:
        ValueError: shapes that do not fit each other, a width that is not odd, or an unknown implementation.
        NotImplementedError: the named implementation cannot do this.
    """
    batch, window, query_heads, head_dim = query.shape
    if kv.shape[-1] != 2 * head_dim:
        raise ValueError(f"`kv` rows must hold key and value, 2 * {head_dim} wide, got {kv.shape[-1]}.")
    if key_positions.shape != kv.shape[:3] or query_positions.shape != (batch, window) or kv.shape[0] != batch:
        raise ValueError(
            f"`query` [B, W, N, D], `kv` [B, K, S, 2D], `query_positions` [B, W] and `key_positions` [B, K, S] must "
            f"agree, got {query.shape}, {kv.shape}, {query_positions.shape} and {key_positions.shape}."
        )
    if query_heads % kv.shape[1]:
        raise ValueError(f"{query_heads} query heads do not group over {kv.shape[1]} KV heads.")
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"`kernel` must be odd and positive, got {kernel}.")
    if excluded < 0:
        raise ValueError(f"`excluded` must not be negative, got {excluded}.")
    return run(
        "pooled_attention",
        implementation,
        query,
        kv,
        query_positions,
        key_positions,
        excluded=excluded,
        kernel=kernel,
        pooling=pooling,
        group_reduce=group_reduce,
        reduce=reduce,
    )
