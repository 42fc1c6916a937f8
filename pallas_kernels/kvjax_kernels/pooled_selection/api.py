"""`pooled_attention`, `select_highest` and `pooled_selection`: check arguments and choose an implementation.

B batch, W queries that vote, N query heads, K KV heads, S slots, D head dim, C chosen tokens.
"""

import functools
from typing import Literal

from jaxtyping import Array, Bool, Float, Int

from kvjax_kernels.dispatch import choose
from kvjax_kernels.pooled_selection.ranks import ABSENT, PROTECTED, protect


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

    def no_tpu() -> str | None:
        from kvjax_kernels.pooled_selection import tpu

        return tpu.attention_obstacle(query, kv)

    def no_gpu() -> str | None:
        from kvjax_kernels.pooled_selection import gpu

        return gpu.attention_obstacle(query, kv, interpret=implementation == "gpu-interpret")

    choice = choose("pooled_attention", implementation, {"tpu": no_tpu, "gpu": no_gpu})
    # Imported here, so that a backend's module is loaded only where it is used.
    if choice.backend == "reference":
        from kvjax_kernels.pooled_selection.reference import pooled_attention as run
    elif choice.backend == "xla":
        from kvjax_kernels.pooled_selection.xla import pooled_attention as run
    elif choice.backend == "tpu":
        from kvjax_kernels.pooled_selection import tpu

        run = functools.partial(tpu.pooled_attention, interpret=choice.interpret)
    else:
        from kvjax_kernels.pooled_selection import gpu

        run = functools.partial(gpu.pooled_attention, interpret=choice.interpret)
    return run(
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


def select_highest(
    scores: Float[Array, "B K S"], counts: Int[Array, "B K"], *, most: int, implementation: str | None = None
) -> tuple[Int[Array, "B K C"], Bool[Array, "B K C"]]:
    """The `counts` highest of each head, in ascending order; of equal scores the lower index wins.

    Args:
        scores: any float32; `ABSENT` where there is no token. Subnormal numbers are equal to zero, NaN comes after
            `ABSENT`.
        counts: how many each head keeps, at most `most` and at most the tokens that it has.
        most: static bound, C = min(most, S).
        implementation: one of `dispatch.IMPLEMENTATIONS`; None picks by platform.

    Returns:
        Indices along S, and which of them are chosen; those not chosen come last.

    Raises:
        ValueError: shapes that do not fit each other, or an unknown implementation.
        NotImplementedError: the named implementation cannot do this.
    """
    if scores.shape[:2] != counts.shape:
        raise ValueError(f"`scores` [B, K, S] and `counts` [B, K] must agree, got {scores.shape} and {counts.shape}.")
    if most < 1:
        raise ValueError(f"`most` must be at least 1, got {most}.")

    def no_tpu() -> str | None:
        from kvjax_kernels.pooled_selection import tpu_selection

        return tpu_selection.obstacle(scores)

    def no_gpu() -> str | None:
        from kvjax_kernels.pooled_selection import gpu_selection

        return gpu_selection.obstacle(scores, interpret=implementation == "gpu-interpret")

    choice = choose("select_highest", implementation, {"tpu": no_tpu, "gpu": no_gpu})
    if choice.backend == "reference":
        from kvjax_kernels.pooled_selection.reference import select_highest as run
    elif choice.backend == "xla":
        from kvjax_kernels.pooled_selection.xla import select_highest as run
    elif choice.backend == "tpu":
        from kvjax_kernels.pooled_selection import tpu_selection

        run = functools.partial(tpu_selection.select_highest, interpret=choice.interpret)
    else:
        from kvjax_kernels.pooled_selection import gpu_selection

        run = functools.partial(gpu_selection.select_highest, interpret=choice.interpret)
    return run(scores, counts, most=min(most, scores.shape[2]))


def pooled_selection(
    query: Float[Array, "B W N D"],
    kv: Float[Array, "B K S twoD"],
    query_positions: Int[Array, "B W"],
    key_positions: Int[Array, "B K S"],
    counts: Int[Array, "B K"],
    *,
    most: int,
    sinks: int,
    recent: Int[Array, "B K"],
    excluded: int = 0,
    kernel: int = 1,
    pooling: Literal["max", "avg"] = "max",
    group_reduce: Literal["mean", "max"] = "mean",
    reduce: Literal["before_pooling", "after_pooling"] = "before_pooling",
    implementation: str | None = None,
) -> tuple[Int[Array, "B K C"], Bool[Array, "B K C"]]:
    """The tokens that stay: the first and last ones, and those that the queries attend to most.

    Args:
        query: see `pooled_attention`.
        kv: see `pooled_attention`.
        query_positions: see `pooled_attention`.
        key_positions: see `pooled_attention`.
        counts: see `select_highest`.
        most: see `select_highest`.
        sinks: positions below it stay.
        recent: last tokens of each head that stay.
        excluded: see `pooled_attention`.
        kernel: see `pooled_attention`.
        pooling: see `pooled_attention`.
        group_reduce: see `pooled_attention`.
        reduce: see `pooled_attention`.
        implementation: of both; see `pooled_attention`.

    Returns:
        See `select_highest`.
    """
    scores = pooled_attention(
        query,
        kv,
        query_positions,
        key_positions,
        excluded=excluded,
        kernel=kernel,
        pooling=pooling,
        group_reduce=group_reduce,
        reduce=reduce,
        implementation=implementation,
    )
    ranks = protect(scores, key_positions, sinks=sinks, recent=recent)
    return select_highest(ranks, counts, most=most, implementation=implementation)


__all__ = ["ABSENT", "PROTECTED", "pooled_attention", "pooled_selection", "protect", "select_highest"]
