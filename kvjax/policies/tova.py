"""TOVA: evict the token that the newest query attends to least."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.allocation import check_choice, from_compression_ratio
from kvjax.attention import Asked
from kvjax.policies.base import last_queries
from kvjax.policies.numbers import store_count
from kvjax.policies.scored import ScoredPolicy
from kvjax.state import Rows
from kvjax_kernels import pooled_attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class TOVA(ScoredPolicy):
    """Keeps the tokens that the newest query attends to; evicts at every step.

    Oren et al., "Transformers are Multi-State RNNs" (arXiv 2401.06104). Differs from the paper: KV heads choose
    independently, by the mean of their query heads; the first `sinks` and last `recent_tokens` stay.

    Attributes:
        recent_tokens: last tokens that stay.
        heads: "kv_head", each chooses; or "all", one set by the mean of all query heads (kvpress).
        budget: see `ScoredPolicy`.
        sinks: see `ScoredPolicy`; 0 in the paper.
        allocation: see `ScoredPolicy`.
        evict: see `ScoredPolicy`; "decode" is the method.
    """

    recent_tokens: int = 8
    heads: Literal["kv_head", "all"] = "kv_head"
    evict: Literal["prompt", "decode"] = "decode"

    def __post_init__(self) -> None:
        store_count(self, "recent_tokens", at_least=0)
        check_choice("heads", self.heads, ("kv_head", "all"))
        if self.heads == "all" and self.evict == "decode":
            raise ValueError(
                '`heads="all"` cannot have `evict="decode"`: KV heads hold their tokens in slots of their own.'
            )
        super().__post_init__()

    @classmethod
    def paper(cls, *, budget: int | float) -> "TOVA":
        """No sinks, and no recent token but the newest."""
        return cls(budget=budget, sinks=0, recent_tokens=1)

    @classmethod
    def kvpress(cls, *, compression_ratio: float) -> "TOVA":
        """Kvpress's TOVAPress: one set for all heads, once after the prompt."""
        budget = from_compression_ratio(compression_ratio)
        return cls(budget=budget, sinks=0, recent_tokens=1, heads="all", evict="prompt")

    @property
    def fewest(self) -> tuple[int, str]:
        """See `ScoredPolicy.fewest`."""
        return self.sinks + self.recent_tokens, "`sinks` + `recent_tokens`"

    def score(self, rows: Rows, asked: Asked) -> Float[Array, "B K S"]:
        """See `ScoredPolicy.score`. The attention that the last query gives."""
        query, positions = last_queries(asked, 1)
        scores = pooled_attention(
            query,
            rows.kv,
            positions,
            rows.positions,
            implementation=asked.implementation_of("pooled_attention"),
        )
        if self.heads == "all":
            scores = jnp.broadcast_to(scores.mean(1, keepdims=True), scores.shape)
        return scores

    def step(
        self,
        scores: Float[Array, "B S"],
        attention: Float[Array, "B S"],
        own_attention: Float[Array, "B K"],
        key: Float[Array, "B K D"],
    ) -> tuple[Float[Array, "B S"], Float[Array, "B K"]]:
        """See `ScoredPolicy.step`. Only the newest query counts."""
        del scores, key
        return attention, own_attention
