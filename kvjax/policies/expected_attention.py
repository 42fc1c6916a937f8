"""Expected Attention: what queries yet to come will attend to, if they are like those seen."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.allocation import from_compression_ratio
from kvjax.attention import Asked
from kvjax.policies.numbers import store_count
from kvjax.policies.scored import ScoredPolicy
from kvjax.rope import Rotation
from kvjax.state import Rows

#: Numbers of a tile: what all heads make of some tokens at a time, 4 MB of float32.
_TILE = 2**20


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
        store_count(self, "future", at_least=1, unit="position")
        super().__post_init__()

    @classmethod
    def kvpress(
        cls, *, compression_ratio: float, n_future_positions: int = 512, n_sink: int = 4
    ) -> "ExpectedAttention":
        """Kvpress's ExpectedAttentionPress, with covariance and value norm, its defaults."""
        return cls(budget=from_compression_ratio(compression_ratio), future=n_future_positions, sinks=n_sink)

    def score(self, rows: Rows, asked: Asked) -> Float[Array, "B K S"]:
        """See `ScoredPolicy.score`."""
        logits = expected_logits(rows, *self._future_queries(asked))
        counted = (rows.positions >= self.sinks)[:, :, None]
        attention = jax.nn.softmax(jnp.where(counted, logits, -1e30), axis=-1).mean(2)
        return attention * jnp.linalg.norm(rows.value.astype(jnp.float32), axis=-1)

    def _future_queries(self, asked: Asked) -> tuple[Float[Array, "B N D"], Float[Array, "B N D D"]]:
        """Mean and covariance of the queries of this call, as they will be at the next positions."""
        # The mean rotation over n, n + 1, ... is that over 0, 1, ... after a rotation by n; so the rotated queries
        # are turned back to n = 0 by turning them to minus their position: before RoPE, that is.
        mean, covariance = moments(asked.unrotated, asked.positions >= self.sinks)
        average = self._average_rotation(asked.rope, asked.positions.max(-1) + 1, mean.shape[-1])
        mean = jnp.einsum("bij,bnj->bni", average, mean)
        return mean, jnp.einsum("bij,bnjk,blk->bnil", average, covariance, average)

    def _average_rotation(self, rope: Rotation, start: Array, head_dim: int) -> Float[Array, "B D D"]:
        """The matrix of the mean rotation to `start` and the positions behind it, for each row."""
        unit = jnp.eye(head_dim, dtype=jnp.float32)[None, None]
        tile = tile_tokens(self.future, head_dim * head_dim)

        def add(ahead: Int[Array, " tile"], new: Bool[Array, " tile"], total: Float[Array, "D D"]) -> Array:
            turned = rope.rotate(jnp.broadcast_to(unit, (1, tile, head_dim, head_dim)), ahead[None])
            return total + jnp.where(new[:, None, None], turned[0], 0.0).sum(0)

        # Row h of what is turned is the image of the h-th unit vector, so its transpose is the matrix.
        average = over_tiles(self.future, tile, add, jnp.zeros((head_dim, head_dim), jnp.float32)) / self.future
        first = rope.rotate(jnp.broadcast_to(unit, (len(start), 1, head_dim, head_dim)), start[:, None])
        return jnp.einsum("ri,bhr->bih", average, first[:, 0])


def expected_logits(
    rows: Rows, mean: Float[Array, "B N D"], covariance: Float[Array, "B N D D"]
) -> Float[Array, "B K G S"]:
    """Logarithm of the expected exp(q k) of each token's key k, over a Gaussian of queries q of each query head."""
    batch, kv_heads, slots, _ = rows.kv.shape
    head_dim = mean.shape[-1]
    mean = mean.reshape(batch, kv_heads, -1, head_dim)
    covariance = covariance.reshape(batch, kv_heads, -1, head_dim, head_dim)
    tile = tile_tokens(slots, mean.size)

    def add(tokens: Int[Array, " tile"], new: Bool[Array, " tile"], logits: Float[Array, "B K G S"]) -> Array:
        del new  # A token that comes twice gets the same twice.
        kv = jax.lax.dynamic_slice_in_dim(rows.kv, tokens[0], tile, axis=2)
        key = kv[..., :head_dim].astype(jnp.float32)
        turned = jnp.einsum("bksd,bkgde->bkgse", key, covariance)
        to_mean = jnp.einsum("bksd,bkgd->bkgs", key, mean) / head_dim**0.5
        found = to_mean + jnp.einsum("bkgse,bkse->bkgs", turned, key) / (2 * head_dim)
        return jax.lax.dynamic_update_slice_in_dim(logits, found, tokens[0], axis=3)

    return over_tiles(slots, tile, add, jnp.zeros((*mean.shape[:3], slots), jnp.float32))


def moments(
    query: Float[Array, "B T N D"], counted: Bool[Array, "B T"]
) -> tuple[Float[Array, "B N D"], Float[Array, "B N D D"]]:
    """Mean and covariance of each head's queries that count; float32."""
    batch, length, heads, head_dim = query.shape
    number = jnp.maximum(counted.sum(1, dtype=jnp.float32), 1.0)[:, None, None]
    mean = jnp.where(counted[:, :, None, None], query.astype(jnp.float32), 0.0).sum(1) / number
    tile = tile_tokens(length, mean.size)

    def add(tokens: Int[Array, " tile"], new: Bool[Array, " tile"], total: Float[Array, "B N D D"]) -> Array:
        part = jax.lax.dynamic_slice_in_dim(query, tokens[0], tile, axis=1).astype(jnp.float32)
        here = jax.lax.dynamic_slice_in_dim(counted, tokens[0], tile, axis=1) & new[None]
        centred = jnp.where(here[:, :, None, None], part - mean[:, None], 0.0)
        return total + jnp.einsum("btni,btnj->bnij", centred, centred)

    total = over_tiles(length, tile, add, jnp.zeros((batch, heads, head_dim, head_dim), jnp.float32))
    return mean, total / number[..., None]


def tile_tokens(tokens: int, numbers: int) -> int:
    """Tokens of a tile that has so many float32 numbers a token."""
    return min(tokens, max(_TILE // numbers, 128))


def over_tiles(
    tokens: int,
    tile: int,
    add: Callable[[Int[Array, " tile"], Bool[Array, " tile"], Array], Array],
    total: Array,
) -> Array:
    """The total after `add(indices, new, total)` of every tile; the last one reaches back, where it is not `new`."""

    def step(index: Array, total: Array) -> Array:
        first = jnp.minimum(index * tile, tokens - tile)
        indices = first + jnp.arange(tile, dtype=jnp.int32)
        return add(indices, indices >= index * tile, total)

    number = -(-tokens // tile)
    return step(jnp.int32(0), total) if number == 1 else jax.lax.fori_loop(jnp.int32(0), jnp.int32(number), step, total)
