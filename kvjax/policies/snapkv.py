"""SnapKV: the prompt's last queries vote for what stays."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.allocation import (
    budget_lengths,
    budget_tokens,
    check_budget,
    check_choice,
    check_rows,
    from_compression_ratio,
)
from kvjax.policies.base import Asked, Policy, seen_tokens
from kvjax.scores import highest, pool, protect, window_attention
from kvjax.state import EMPTY, LayerSpec, ModelSpec, Rows, take_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """Keeps, once the prompt is in, the tokens that its last `window` queries attend to, and that window.

    Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv 2404.14469). The defaults are
    the paper's benchmark settings (window 32, max pooling over 7), but for the first `sinks` tokens, which are kept
    too. Differs from the authors' code: KV heads choose, by the mean of their query heads, where the authors keep
    a set (and a copy of the cache) for every query head. Decoded tokens are appended; `extend` compresses anew,
    with the last queries of the new tokens.

    Attributes:
        budget: tokens kept per KV head, sinks and window included; a float in (0, 1) is a fraction of the prompt.
        window: queries that vote; their own tokens are kept.
        kernel: width of the pooling along the tokens, odd.
        pooling: "max", or "avg" (authors' code, kvpress).
        group_reduce: over the query heads of a KV head, "mean" or "max".
        group_order: reduce "before_pooling", or "after_pooling" (kvpress); for averages of means it is the same.
        sinks: first tokens that are kept whatever their score; 0 in the paper.
    """

    budget: int | float
    window: int = 32
    kernel: int = 7
    pooling: Literal["max", "avg"] = "max"
    group_reduce: Literal["mean", "max"] = "mean"
    group_order: Literal["before_pooling", "after_pooling"] = "before_pooling"
    sinks: int = 4

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"`window` must be at least 1 token, got {self.window}.")
        if self.sinks < 0:
            raise ValueError(f"`sinks` must not be negative, got {self.sinks}.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"`kernel` must be odd and positive, got {self.kernel}.")
        check_choice("pooling", self.pooling, ("max", "avg"))
        check_choice("group_reduce", self.group_reduce, ("mean", "max"))
        check_choice("group_order", self.group_order, ("before_pooling", "after_pooling"))
        budget = check_budget(self.budget, at_least=self.sinks + self.window, what="`sinks` + `window`")
        object.__setattr__(self, "budget", budget)

    @classmethod
    def paper(cls, *, budget: int | float) -> "SnapKV":
        """The article's benchmark settings: window 32, max pooling over 7, no sinks of their own."""
        return cls(budget=budget, sinks=0)

    @classmethod
    def authors(cls, *, budget: int | float) -> "SnapKV":
        """The defaults of the authors' code: window 32, average pooling over 5, no sinks of their own."""
        return cls(budget=budget, sinks=0, kernel=5, pooling="avg")

    @classmethod
    def kvpress(cls, *, compression_ratio: float, window_size: int = 64, kernel_size: int = 5) -> "SnapKV":
        """Kvpress's SnapKVPress."""
        return cls(
            budget=from_compression_ratio(compression_ratio),
            window=window_size,
            kernel=kernel_size,
            pooling="avg",
            group_order="after_pooling",
            sinks=0,
        )

    def check_lengths(self, lengths: np.ndarray) -> None:
        """See `Policy.check_lengths`."""
        check_rows(self.budget, lengths, at_least=self.sinks + self.window, what="`sinks` + `window`")

    def kept_tokens(self, model: ModelSpec, max_length: int) -> list[tuple[int, ...]]:
        """See `Policy.kept_tokens`."""
        return [(budget_tokens(self.budget, max_length),) * model.num_kv_heads] * model.num_layers

    def compress(self, spec: LayerSpec, rows: Rows, asked: Asked) -> Rows:
        """See `Policy.compress`."""
        budget = budget_lengths(self.budget, seen_tokens(rows), max_length=spec.max_length)
        scores = protect(self.score(rows, asked), rows.positions, sinks=self.sinks, recent=self.window)
        index, chosen = highest(scores, jnp.minimum(budget, rows.lengths), most=max(spec.kept))
        return take_rows(rows, index, chosen)

    def score(self, rows: Rows, asked: Asked) -> Float[Array, "B K S"]:
        """The pooled attention that each token gets from the last `window` queries."""
        query, positions = last_queries(asked, self.window)
        after = self.group_order == "after_pooling"
        scores = window_attention(
            query, positions, rows.key, rows.positions, group_reduce="none" if after else self.group_reduce
        )
        order = jnp.arange(rows.positions.shape[2])[None, None]
        voted_on = order < rows.lengths[..., None] - self.window
        scores = pool(scores, voted_on, kernel=self.kernel, pooling=self.pooling)
        return scores.mean(2) if self.group_reduce == "mean" else scores.max(2)


def last_queries(asked: Asked, count: int) -> tuple[Float[Array, "B W N D"], Int[Array, "B W"]]:
    """The last `count` queries of each row, and their positions, `EMPTY` where a row has fewer."""
    length = asked.positions.shape[1]
    tokens = (asked.positions != EMPTY).sum(-1, dtype=jnp.int32)
    index = tokens[:, None] - count + jnp.arange(count)[None]
    inside = jnp.clip(index, 0, length - 1)
    query = jnp.take_along_axis(asked.query, inside[:, :, None, None], axis=1)
    positions = jnp.take_along_axis(asked.positions, inside, axis=1)
    return query, jnp.where(index < 0, EMPTY, positions)
