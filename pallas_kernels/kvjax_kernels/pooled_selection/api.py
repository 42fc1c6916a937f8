"""`pooled_selection`: the two operations together."""

from typing import Literal

from jaxtyping import Array, Bool, Float, Int

from kvjax_kernels.pooled_attention.api import pooled_attention
from kvjax_kernels.pooled_selection.ranks import protect
from kvjax_kernels.select_highest.api import select_highest


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
