"""SnapKV: the prompt's last queries vote for what stays."""

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Array, Float

from kvjax.allocation import check_choice, from_compression_ratio
from kvjax.attention import Asked
from kvjax.policies.base import last_queries
from kvjax.policies.numbers import store_count
from kvjax.policies.scored import ScoredPolicy
from kvjax.state import Rows
from kvjax_kernels import pooled_attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapKV(ScoredPolicy):
    """Keeps, once the prompt is in, the tokens that its last `window` queries attend to, and that window.

    Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv 2404.14469). The defaults are
    the paper's benchmark settings (window 32, max pooling over 7), but for the first `sinks` tokens, which are kept
    too. Differs from the authors' code: KV heads choose, by the mean of their query heads, where the authors keep
    a set (and a copy of the cache) for every query head. `extend` compresses anew, with the last queries of the new
    tokens. With `evict="decode"`, which is kvjax's own, the vote goes on: at every step the scores move by
    1 / `window` towards the attention that the tokens get, an average with the memory of a window.

    Attributes:
        window: queries that vote; their own tokens are kept.
        kernel: width of the pooling along the tokens, odd.
        pooling: "max", or "avg" (authors' code, kvpress).
        group_reduce: over the query heads of a KV head, "mean" or "max".
        group_order: reduce "before_pooling", or "after_pooling" (kvpress); for averages of means it is the same.
        budget: see `ScoredPolicy`.
        sinks: see `ScoredPolicy`; 0 in the paper.
        allocation: see `ScoredPolicy`.
        evict: see `ScoredPolicy`.
    """

    window: int = 32
    kernel: int = 7
    pooling: Literal["max", "avg"] = "max"
    group_reduce: Literal["mean", "max"] = "mean"
    group_order: Literal["before_pooling", "after_pooling"] = "before_pooling"

    def __post_init__(self) -> None:
        store_count(self, "window", at_least=1)
        if isinstance(self.kernel, int | np.integer) and (self.kernel < 1 or self.kernel % 2 == 0):
            raise ValueError(f"`kernel` must be odd and positive, got {self.kernel}.")
        store_count(self, "kernel", at_least=1)
        check_choice("pooling", self.pooling, ("max", "avg"))
        check_choice("group_reduce", self.group_reduce, ("mean", "max"))
        check_choice("group_order", self.group_order, ("before_pooling", "after_pooling"))
        super().__post_init__()

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

    @property
    def fewest(self) -> tuple[int, str]:
        """See `ScoredPolicy.fewest`."""
        return self.sinks + self.window, "`sinks` + `window`"

    def score(self, rows: Rows, asked: Asked) -> Float[Array, "B K S"]:
        """See `ScoredPolicy.score`. The pooled attention that each token gets from the last queries."""
        query, positions = last_queries(asked, self.window)
        scores = pooled_attention(
            query,
            rows.kv,
            positions,
            rows.positions,
            # The window itself is not voted on; where the cache evicts while decoding, it starts from nothing.
            excluded=self.window,
            kernel=self.kernel,
            pooling=self.pooling,
            group_reduce=self.group_reduce,
            reduce=self.group_order,
            implementation=asked.implementation_of("pooled_attention"),
        )
        # On the scale of what a step adds: the attention of a whole group.
        return scores * (query.shape[2] // rows.kv.shape[1]) if self.evict == "decode" else scores

    def step(
        self,
        scores: Float[Array, "B S"],
        attention: Float[Array, "B S"],
        own_attention: Float[Array, "B K"],
        key: Float[Array, "B K D"],
    ) -> tuple[Float[Array, "B S"], Float[Array, "B K"]]:
        """See `ScoredPolicy.step`."""
        del key
        share = 1.0 / self.window
        return (1.0 - share) * scores + share * attention, share * own_attention
