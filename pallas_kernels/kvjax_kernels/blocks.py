"""How plain JAX cuts queries and keys into tiles."""

import jax
import jax.numpy as jnp

# Tiles of 256 by 256 keep the scores and keys of a group in a core's cache.
_QUERY_BLOCK = 256
_KEY_BLOCK = 256


def block_sizes(queries: int, keys: int) -> tuple[int, int]:
    """The tile's sides for so many queries and keys."""
    return min(_QUERY_BLOCK, queries), min(_KEY_BLOCK, keys)


def pad_to(x: jax.Array, axis: int, multiple: int, *, fill: float) -> jax.Array:
    """Pads one axis at its end to a multiple."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths, constant_values=fill)
