"""Plain JAX: one KV head's scores at a time."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax_kernels.masking import MASKED
from kvjax_kernels.pooled_attention.voting import pooled, voters


@functools.partial(jax.jit, static_argnames=("excluded", "kernel", "pooling", "group_reduce", "reduce"))
def run(
    query: Float[Array, "B W N D"],
    kv: Float[Array, "B K S twoD"],
    query_positions: Int[Array, "B W"],
    key_positions: Int[Array, "B K S"],
    *,
    excluded: int,
    kernel: int,
    pooling: Literal["max", "avg"],
    group_reduce: Literal["mean", "max"],
    reduce: Literal["before_pooling", "after_pooling"],
) -> Float[Array, "B K S"]:
    """See `api.pooled_attention`."""
    batch, _, query_heads, head_dim = query.shape
    kv_heads = kv.shape[1]
    scaled = query.astype(jnp.float32).reshape(batch, -1, kv_heads, query_heads // kv_heads, head_dim)
    scaled = scaled.transpose(2, 0, 3, 1, 4) * head_dim**-0.5
    votes = query_positions >= 0

    # One KV head at a time: [B, G, W, S] lives, never [B, N, W, S].
    def one_head(head: jax.Array) -> jax.Array:
        keys = jax.lax.dynamic_index_in_dim(kv, head, axis=1, keepdims=False)[..., :head_dim].astype(jnp.float32)
        # Fused with their slicing the product takes up to three times as long on CPU.
        keys = jax.lax.optimization_barrier(keys)
        positions = jax.lax.dynamic_index_in_dim(key_positions, head, axis=1, keepdims=False)
        scores = jnp.einsum("bgwd,bsd->bgws", scaled[head], keys)
        seen = (positions[:, None] >= 0) & (positions[:, None] <= query_positions[:, :, None])
        probabilities = jax.nn.softmax(jnp.where(seen[:, None], scores, MASKED), axis=-1)
        probabilities = jnp.where(seen[:, None] & votes[:, None, :, None], probabilities, 0.0)
        attention = probabilities.sum(2) / voters(query_positions)[:, None, None]
        if reduce == "after_pooling":
            return attention
        return attention.mean(1, keepdims=True) if group_reduce == "mean" else attention.max(1, keepdims=True)

    attention = jax.lax.map(one_head, jnp.arange(kv_heads, dtype=jnp.int32)).swapaxes(0, 1)
    return pooled(
        attention, key_positions, excluded=excluded, kernel=kernel, pooling=pooling, group_reduce=group_reduce
    )
