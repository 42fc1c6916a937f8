"""Knorm: keys of small norm are attended to most."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.allocation import from_compression_ratio
from kvjax.attention import Asked
from kvjax.policies.numbers import store_count
from kvjax.policies.scored import ScoredPolicy
from kvjax.state import Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knorm(ScoredPolicy):
    """Keeps the tokens whose keys have the smallest L2 norm: no attention is looked at.

    Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (arXiv 2406.11430).
    Differs from the paper: the first `sinks` and last `recent_tokens` stay.

    Attributes:
        recent_tokens: last tokens that stay.
        budget: see `ScoredPolicy`.
        sinks: see `ScoredPolicy`; 0 in the paper.
        allocation: see `ScoredPolicy`.
        evict: see `ScoredPolicy`.
    """

    recent_tokens: int = 8

    def __post_init__(self) -> None:
        store_count(self, "recent_tokens", at_least=0)
        super().__post_init__()

    @classmethod
    def kvpress(cls, *, compression_ratio: float) -> "Knorm":
        """Kvpress's KnormPress."""
        return cls(budget=from_compression_ratio(compression_ratio), sinks=0, recent_tokens=0)

    @property
    def fewest(self) -> tuple[int, str]:
        """See `ScoredPolicy.fewest`."""
        return self.sinks + self.recent_tokens, "`sinks` + `recent_tokens`"

    def score(self, rows: Rows, asked: Asked) -> Float[Array, "B K S"]:
        """See `ScoredPolicy.score`."""
        del asked
        return -jnp.linalg.norm(rows.key.astype(jnp.float32), axis=-1)

    def step(
        self,
        scores: Float[Array, "B S"],
        attention: Float[Array, "B S"],
        own_attention: Float[Array, "B K"],
        key: Float[Array, "B K D"],
    ) -> tuple[Float[Array, "B S"], Float[Array, "B K"]]:
        """See `ScoredPolicy.step`. A key's norm does not change."""
        del attention, own_attention
        return scores, -jnp.linalg.norm(key.astype(jnp.float32), axis=-1)
