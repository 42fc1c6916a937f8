"""What is compared when tokens are chosen: marks for those that must stay and those that are none."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

#: The score of a token that must be kept, and of a slot that holds none.
PROTECTED, ABSENT = jnp.inf, -jnp.inf

#: The place of NaN, below that of every number.
LOWEST = np.int32(-(2**31))


def protect(
    scores: Float[Array, "B K S"], positions: Int[Array, "B K S"], *, sinks: int, recent: Int[Array, "B K"]
) -> Float[Array, "B K S"]:
    """Marks the first `sinks` positions and the last `recent` tokens of each head as kept, empty slots as absent.

    Tokens of a head are a prefix of its slots, in ascending position. What a token scores lies strictly between the
    marks: infinite scores become the largest finite ones, and NaN counts as the lowest. So no score brings a token
    among those that must stay, or behind a slot that holds none.
    """
    highest = jnp.finfo(scores.dtype).max
    scores = jnp.nan_to_num(scores, nan=-highest, posinf=highest, neginf=-highest)
    held = positions >= 0
    order = jnp.arange(positions.shape[2], dtype=jnp.int32)[None, None]
    last = order >= held.sum(-1, keepdims=True, dtype=jnp.int32) - recent.astype(jnp.int32)[..., None]
    scores = jnp.where((positions < sinks) | last, PROTECTED, scores)
    return jnp.where(held, scores, ABSENT)


def places(scores: jax.Array) -> jax.Array:
    """Integers in the order of float32 `scores` of any shape, equal for equal scores; NaN comes lowest.

    Subnormal numbers are equal to zero, as XLA's comparisons have them on CPU and TPU.
    """
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    size = bits & 0x7FFFFFFF
    smallest_normal, infinite = 0x00800000, 0x7F800000
    signed = jnp.where(bits < 0, -size, size)
    return jnp.where(size > infinite, LOWEST, jnp.where(size < smallest_normal, 0, signed))
