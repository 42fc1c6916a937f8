"""How a layer's heads share their slots by what their tokens are worth."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax_kernels import mark_highest
from kvjax_kernels.pooled_selection.ranks import ABSENT, PROTECTED


def split_shared(scores: Float[Array, "B K S"], counts: Int[Array, "B K"], *, safeguard: float) -> Int[Array, "B K"]:
    """How many tokens each head gets when all heads of a layer choose together (Ada-KV); the total is exact.

    Args:
        scores: of all heads on one scale; `PROTECTED` tokens are taken first, `ABSENT` ones never.
        counts: what each head would get alone; together they get no more than they have.
        safeguard: share of that which every head gets for sure.
    """
    batch, kv_heads, slots = scores.shape
    safe = jnp.floor(counts.astype(jnp.float32) * safeguard + 1e-6).astype(jnp.int32)
    scores = jnp.where(mark_highest(scores, safe) & (scores > ABSENT), PROTECTED, scores)
    flat = scores.reshape(batch, 1, kv_heads * slots)
    total = jnp.minimum(counts.sum(-1, keepdims=True, dtype=jnp.int32), (flat > ABSENT).sum(-1, dtype=jnp.int32))
    return mark_highest(flat, total).reshape(scores.shape).sum(-1, dtype=jnp.int32)
