"""Expected Attention: what queries yet to come will attend to, if they are like those seen."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.allocation import check_count, from_compression_ratio
from kvjax.attention import Asked
from kvjax.policies.scored import ScoredPolicy
from kvjax.rope import Rotation
from kvjax.state import Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedAttention(ScoredPolicy):
    """Keeps the tokens with the largest expected attention times the norm of their values.

    As kvpress's ExpectedAttentionPress: queries are taken as a Gaussian with the mean and covariance of those seen
    (before RoPE, without the first `sinks`), turned by the average rotation of the next `future` positions. Without
    a mean over many queries there is no expectation, so it chooses after a prompt or a turn only.

    Attributes:
        future: positions ahead over which the rotation is averaged.
        budget: see `ScoredPolicy`.
        sinks: see `ScoredPolicy`; their queries do not count, and are very different.
        allocation: see `ScoredPolicy`.
        evict: "prompt" only.
    """

    future: int = 512

    no_decode_because: ClassVar[str | None] = "it expects from the mean of many queries, and a step has one"

    def __post_init__(self) -> None:
        check_count("future", self.future, at_least=1, unit="position")
        super().__post_init__()

    @classmethod
    def kvpress(
        cls, *, compression_ratio: float, n_future_positions: int = 512, n_sink: int = 4
    ) -> "ExpectedAttention":
        """Kvpress's ExpectedAttentionPress, with covariance and value norm, its defaults."""
        return cls(budget=from_compression_ratio(compression_ratio), future=n_future_positions, sinks=n_sink)

    def score(self, rows: Rows, asked: Asked) -> Float[Array, "B K S"]:
        """See `ScoredPolicy.score`."""
        mean, covariance = self._future_queries(asked)
        batch, _, head_dim = mean.shape
        kv_heads = rows.key.shape[1]
        mean = mean.reshape(batch, kv_heads, -1, head_dim)
        covariance = covariance.reshape(batch, kv_heads, -1, head_dim, head_dim)
        key = rows.key.astype(jnp.float32)
        logits = jnp.einsum("bksd,bkgd->bkgs", key, mean) / head_dim**0.5
        turned = jnp.einsum("bksd,bkgde->bkgse", key, covariance)
        logits = logits + jnp.einsum("bkgse,bkse->bkgs", turned, key) / (2 * head_dim)
        counted = (rows.positions >= self.sinks)[:, :, None]
        attention = jax.nn.softmax(jnp.where(counted, logits, -1e30), axis=-1).mean(2)
        return attention * jnp.linalg.norm(rows.value.astype(jnp.float32), axis=-1)

    def _future_queries(self, asked: Asked) -> tuple[Float[Array, "B N D"], Float[Array, "B N D D"]]:
        """Mean and covariance of the queries of this call, as they will be at the next positions."""
        # The mean rotation over n, n + 1, ... is that over 0, 1, ... after a rotation by n; so the rotated queries
        # are turned back to n = 0 by turning them to minus their position: before RoPE, that is.
        query = asked.unrotated.astype(jnp.float32)
        counted = (asked.positions >= self.sinks)[:, :, None, None]
        number = jnp.maximum(counted.sum(1, keepdims=True, dtype=jnp.float32), 1.0)
        mean = jnp.where(counted, query, 0.0).sum(1, keepdims=True) / number
        centred = jnp.where(counted, query - mean, 0.0)
        covariance = jnp.einsum("btni,btnj->bnij", centred, centred) / number[:, 0, :, :, None].reshape(-1, 1, 1, 1)
        average = self._average_rotation(asked.rope, asked.positions.max(-1) + 1, query.shape[-1])
        mean = jnp.einsum("bij,bnj->bni", average, mean[:, 0])
        return mean, jnp.einsum("bij,bnjk,blk->bnil", average, covariance, average)

    def _average_rotation(self, rope: Rotation, start: Array, head_dim: int) -> Float[Array, "B D D"]:
        """The matrix of the mean rotation to `start` and the positions behind it, for each row."""
        unit = jnp.eye(head_dim, dtype=jnp.float32)
        ahead = jnp.arange(self.future, dtype=jnp.int32)[None]
        turned = rope.rotate(jnp.broadcast_to(unit[None, None], (1, self.future, head_dim, head_dim)), ahead)
        # Row h of `turned` is the image of the h-th unit vector, so its transpose is the matrix.
        average = turned.mean(1)
        first = rope.rotate(jnp.broadcast_to(unit[None, None], (len(start), 1, head_dim, head_dim)), start[:, None])
        return jnp.einsum("ri,bhr->bih", average[0], first[:, 0])
