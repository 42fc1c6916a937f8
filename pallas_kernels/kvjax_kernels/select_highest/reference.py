"""The oracle: a stable sort."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def run(
    scores: Float[Array, "B K S"], counts: Int[Array, "B K"], *, most: int
) -> tuple[Int[Array, "B K C"], Bool[Array, "B K C"]]:
    """See `api.select_highest`."""
    slots = scores.shape[2]
    order = jnp.argsort(-scores, axis=-1, stable=True)[..., :most]
    chosen = jnp.arange(most, dtype=jnp.int32)[None, None] < counts[..., None]
    index = jnp.sort(jnp.where(chosen, order, slots), axis=-1).astype(jnp.int32)
    return jnp.minimum(index, slots - 1), index < slots
