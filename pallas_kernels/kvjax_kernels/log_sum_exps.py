"""How attention over disjoint sets of keys becomes one: pieces are weighted by their log-sum-exps."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax_kernels.masking import MASKED


class Weights(NamedTuple):
    """What merges pieces: (outputs * `pieces`) summed over them, / `total`.

    Attributes:
        pieces: weight of each piece, 0 where it saw nothing.
        total: their sum; 1 where no piece saw anything.
        log_sum_exp: of all pieces; -1e30 where none saw anything.
    """

    pieces: Float[Array, "..."]
    total: Float[Array, "..."]
    log_sum_exp: Float[Array, "..."]


def weights(log_sum_exps: Float[Array, "..."], axis: int) -> Weights:
    """The weights of pieces that lie along an axis, which the sums have no more."""
    largest = log_sum_exps.max(axis, keepdims=True)
    pieces = jnp.where(log_sum_exps > MASKED / 2, jnp.exp(log_sum_exps - largest), 0.0)
    total = pieces.sum(axis)
    sees_nothing = total == 0
    total = jnp.where(sees_nothing, 1.0, total)
    return Weights(pieces, total, jnp.where(sees_nothing, MASKED, largest.squeeze(axis) + jnp.log(total)))
