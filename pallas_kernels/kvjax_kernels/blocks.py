"""How plain JAX cuts heads, queries and keys into tiles of scores."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax_kernels.devices import platform

_SIDE = 256
# A CPU's products are faster with more rows, as long as the tile stays in its caches: 4 MB of float32.
_LARGE_SIDE = 512
_CPU_SCORES = 2**20


class Tile(NamedTuple):
    """The scores that one step computes, of every query head in the KV heads' groups.

    Attributes:
        heads: KV heads, of one or several rows of the batch; a divisor of all of them.
        queries: tokens that ask.
        keys: tokens that are asked.
    """

    heads: int
    queries: int
    keys: int


def choose_tile(heads: int, group: int, queries: int, keys: int, count: Callable[[int], int]) -> Tile:
    """The tile for the platform: all heads at once, or on a CPU as many as its caches hold.

    Args:
        heads: KV heads of all rows of the batch.
        group: query heads to a KV head.
        queries: queries of a head.
        keys: keys of a head.
        count: how many tiles with sides of so many tokens there are to compute.
    """
    if platform() != "cpu":
        return Tile(heads, min(_SIDE, queries), min(_SIDE, keys))

    def area(side: int) -> int:
        return min(side, queries) * min(side, keys)

    # Large tiles compute more of what nobody sees: an eighth more costs less than they gain.
    large = group * area(_LARGE_SIDE) <= _CPU_SCORES and (
        8 * count(_LARGE_SIDE) * area(_LARGE_SIDE) <= 9 * count(_SIDE) * area(_SIDE)
    )
    side = _LARGE_SIDE if large else _SIDE
    most = max(_CPU_SCORES // (group * area(side)), 1)
    together = next(number for number in range(min(most, heads), 0, -1) if heads % number == 0)
    return Tile(together, min(side, queries), min(side, keys))


def pad_to(x: jax.Array, axis: int, multiple: int, *, fill: float) -> jax.Array:
    """Pads one axis at its end to a multiple."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths, constant_values=fill)


def query_tiles(query: Float[Array, "B T N D"], kv_heads: int, tile: Tile) -> Float[Array, "parts blocks heads R D"]:
    """Whole blocks of queries; those of a KV head's group are R = N / K * `tile.queries` rows of one matrix."""
    batch, length, _, head_dim = query.shape
    blocks = length // tile.queries
    split = query.reshape(batch, blocks, tile.queries, kv_heads, -1, head_dim).transpose(0, 3, 1, 4, 2, 5)
    return split.reshape(-1, tile.heads, blocks, split.shape[3] * tile.queries, head_dim).swapaxes(1, 2)
