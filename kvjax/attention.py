"""Attention as policies need it: pieces that are merged by their log-sum-exps."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax_kernels.masking import MASKED


def merge(
    output: Float[Array, "*shape D"],
    log_sum_exp: Float[Array, "*shape"],
    other_output: Float[Array, "*shape D"],
    other_log_sum_exp: Float[Array, "*shape"],
) -> tuple[Float[Array, "*shape D"], Float[Array, "*shape"]]:
    """Attention over two disjoint sets of keys from the attention over each; float32.

    A piece that saw nothing has a log-sum-exp of -1e30 and counts for nothing.
    """
    largest = jnp.maximum(log_sum_exp, other_log_sum_exp)
    weight, other_weight = jnp.exp(log_sum_exp - largest), jnp.exp(other_log_sum_exp - largest)
    weight = jnp.where(log_sum_exp <= MASKED / 2, 0.0, weight)
    other_weight = jnp.where(other_log_sum_exp <= MASKED / 2, 0.0, other_weight)
    total = jnp.maximum(weight + other_weight, jnp.finfo(jnp.float32).tiny)
    merged = output * (weight / total)[..., None] + other_output * (other_weight / total)[..., None]
    return merged, jnp.where(weight + other_weight > 0, largest + jnp.log(total), MASKED)


def merge_current(
    output: Float[Array, "B N D"],
    log_sum_exp: Float[Array, "B N"],
    query: Float[Array, "B N D"],
    key: Float[Array, "B K D"],
    value: Float[Array, "B K D"],
) -> tuple[Float[Array, "B N D"], Float[Array, "B N"]]:
    """Adds the token that asks to the attention over the cached ones; float32."""
    group = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(x.astype(jnp.float32), group, axis=1) for x in (key, value))
    own_score = (query.astype(jnp.float32) * key).sum(-1) * query.shape[-1] ** -0.5
    return merge(output, log_sum_exp, value, own_score)
