"""H2O: heavy hitters, the tokens with the most attention in all, and the recent ones."""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.allocation import check_choice, from_compression_ratio
from kvjax.attention import Asked
from kvjax.policies.numbers import store_count
from kvjax.policies.scored import ScoredPolicy
from kvjax.state import EMPTY, Rows
from kvjax_kernels import column_sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class H2O(ScoredPolicy):
    """Keeps the tokens with the largest accumulated attention, and the most recent ones; evicts at every step.

    Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (arXiv
    2306.14048). A token's score is the attention that it has had from all queries so far, summed over its group's
    query heads; when a head is full, the lowest outside sinks and recent tokens goes. Differs from the authors'
    code: KV heads choose, where the authors keep a set for every query head, which breaks under GQA; and the first
    `sinks` tokens stay. The prompt's scores take a second pass over its keys, never an n x n matrix.

    Attributes:
        recent_tokens: last tokens that stay; None is half of what the head keeps (the paper).
        normalise: "sum" (the paper), or "mean" over the queries that could see the token (kvpress's "observed
            attention"), which favours recent tokens where the sum favours old ones.
        budget: see `ScoredPolicy`.
        sinks: see `ScoredPolicy`; 0 in the paper.
        allocation: see `ScoredPolicy`.
        evict: see `ScoredPolicy`; "decode" is the method.
    """

    recent_tokens: int | None = None
    normalise: Literal["sum", "mean"] = "sum"
    evict: Literal["prompt", "decode"] = "decode"

    needs_log_sum_exp: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.recent_tokens is not None:
            store_count(self, "recent_tokens", at_least=0)
        check_choice("normalise", self.normalise, ("sum", "mean"))
        super().__post_init__()

    @classmethod
    def paper(cls, *, budget: int | float) -> "H2O":
        """Half heavy hitters, half recent tokens, no sinks of their own."""
        return cls(budget=budget, sinks=0)

    @classmethod
    def kvpress(cls, *, compression_ratio: float) -> "H2O":
        """Kvpress's ObservedAttentionPress: mean attention, no recent window, once after the prompt."""
        return cls(
            budget=from_compression_ratio(compression_ratio),
            sinks=0,
            recent_tokens=0,
            normalise="mean",
            evict="prompt",
        )

    @property
    def fewest(self) -> tuple[int, str]:
        """See `ScoredPolicy.fewest`."""
        if self.recent_tokens is None:
            # Half of the budget is recent: it must hold the sinks in its other half.
            return 2 * self.sinks, "twice `sinks`"
        return self.sinks + self.recent_tokens, "`sinks` + `recent_tokens`"

    def recent(self, counts: Int[Array, "B K"]) -> Int[Array, "B K"]:
        """See `ScoredPolicy.recent`."""
        return counts // 2 if self.recent_tokens is None else jnp.full_like(counts, self.recent_tokens)

    def score(self, rows: Rows, asked: Asked) -> Float[Array, "B K S"]:
        """See `ScoredPolicy.score`. What was remembered, and the attention from the queries of this call."""
        assert asked.log_sum_exp is not None
        sums = column_sums(
            asked.query,
            rows.kv.astype(asked.query.dtype),
            asked.log_sum_exp,
            asked.positions,
            rows.positions,
            implementation=asked.implementation_of("column_sums"),
        )
        if rows.scores is not None:
            return rows.scores + sums
        if self.evict == "prompt" and self.normalise == "mean":
            # Nothing is remembered: the mean is over the queries of this call.
            return sums / jnp.maximum(voters(asked.positions, rows.positions), 1).astype(jnp.float32)
        return sums

    def rank(
        self, scores: Float[Array, "B K S"], positions: Int[Array, "B K S"], newest: Int[Array, "B"]
    ) -> Float[Array, "B K S"]:
        """See `ScoredPolicy.rank`. The mean is over all queries since the token came."""
        if self.normalise == "sum" or self.evict == "prompt":
            return scores
        age = newest[:, None, None] - jnp.where(positions == EMPTY, newest[:, None, None], positions)
        return scores / (age.astype(jnp.float32) + 1.0)

    def step(
        self,
        scores: Float[Array, "B S"],
        attention: Float[Array, "B S"],
        own_attention: Float[Array, "B K"],
        key: Float[Array, "B K D"],
    ) -> tuple[Float[Array, "B S"], Float[Array, "B K"]]:
        """See `ScoredPolicy.step`. The newest token's score is the attention that it gives itself."""
        del key
        return scores + attention, own_attention


def voters(asked: Int[Array, "B T"], positions: Int[Array, "B K S"]) -> Int[Array, "B K S"]:
    """Number of a call's queries that could see each token: those at its position or later.

    Args:
        asked: positions of the queries, ascending without gaps, then `EMPTY` for pads.
        positions: of the tokens.
    """
    newest = asked.max(-1)
    first_asked = newest - (asked != EMPTY).sum(-1, dtype=asked.dtype) + 1
    newest, first_asked = newest[:, None, None], first_asked[:, None, None]
    return jnp.maximum(newest + 1 - jnp.maximum(positions, first_asked), 0)
