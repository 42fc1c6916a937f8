"""Plain JAX's attention over all slots that some heads have: the products' scores in, the attention out."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax_kernels.masking import MASKED
from kvjax_kernels.split_rows import of_heads


class Asking(NamedTuple):
    """What asks, for some KV heads; M queries each.

    Attributes:
        query: [B, K, M, D].
        sink_query: like `query`, or None.
        own_key: [B, K, M, D], the asking token's key for each query, or None.
        own_value: its value.
    """

    query: Float[Array, "B K M D"]
    sink_query: Float[Array, "B K M D"] | None
    own_key: Float[Array, "B K M D"] | None
    own_value: Float[Array, "B K M D"] | None

    @classmethod
    def of(
        cls,
        query: Float[Array, "B N D"],
        sink_query: Float[Array, "B N D"] | None,
        own_key: Float[Array, "B K D"] | None,
        own_value: Float[Array, "B K D"] | None,
        *,
        kv_heads: int,
    ) -> "Asking":
        """What asks all KV heads."""
        batch, query_heads, head_dim = query.shape
        shape = (batch, kv_heads, query_heads // kv_heads, head_dim)
        return cls(
            query.reshape(shape),
            None if sink_query is None else sink_query.reshape(shape),
            None if own_key is None else jnp.broadcast_to(own_key[:, :, None], shape),
            None if own_value is None else jnp.broadcast_to(own_value[:, :, None], shape),
        )

    def of_heads(self, heads: tuple[int, ...]) -> "Asking":
        """What asks some of the KV heads."""
        return self.mapped(lambda x: of_heads(x, heads))

    def mapped(self, change: Callable[[Array], Array]) -> "Asking":
        """All that there is, changed."""
        query, *others = (None if x is None else change(x) for x in self)
        assert query is not None
        return Asking(query, *others)


class Attended(NamedTuple):
    """The attention of some KV heads' queries; float32.

    Attributes:
        output: [B, K, M, D].
        log_sum_exp: [B, K, M].
        probabilities: [B, K, M, S], of the slots.
        own: [B, K, M], of the asking token.
    """

    output: Float[Array, "B K M D"]
    log_sum_exp: Float[Array, "B K M"]
    probabilities: Float[Array, "B K M S"]
    own: Float[Array, "B K M"]


def attend(
    asking: Asking,
    scores: Float[Array, "B K M S"],
    to_sinks: Float[Array, "B K M sinks"] | None,
    values: Float[Array, "B K S width"],
    valid: Bool[Array, "B K R S"],
    *,
    scale: float,
) -> Attended:
    """Softmax and the weighted values.

    Args:
        asking: the queries.
        scores: of every slot, not scaled.
        to_sinks: the same of the first slots by the sink queries, which count instead.
        values: of every slot: values, or whole kv rows, of which the last D are taken.
        valid: slots that the queries see, for each (R = M) or for all (R = 1).
        scale: factor of the scores.
    """
    query, _, own_key, own_value = asking
    head_dim = query.shape[-1]
    if to_sinks is not None:
        scores = jax.lax.dynamic_update_slice(scores, to_sinks, (0, 0, 0, 0))
    scores = jnp.where(valid, scores * scale, MASKED)
    largest = scores.max(axis=-1)
    own_score = None
    if own_key is not None:
        own_score = (query.astype(jnp.float32) * own_key.astype(jnp.float32)).sum(-1) * scale
        largest = jnp.maximum(largest, own_score)
    # Far below any real score, exp(MASKED - largest) is 0; where nothing is seen at all, it would be 1.
    sees_nothing = largest == MASKED
    weights = jnp.exp(scores - jnp.where(sees_nothing, 0.0, largest)[..., None])
    total = weights.sum(-1)
    own_weight = jnp.zeros_like(total)
    if own_score is not None:
        own_weight = jnp.exp(own_score - largest)
        total = total + own_weight
    total = jnp.where(sees_nothing, 1.0, total)

    def weighted(rows: jax.Array) -> jax.Array:
        return product("bkms,bksd->bkmd", weights, rows)[..., -head_dim:]

    # An empty slot may hold NaN, and 0 * NaN is NaN. Clearing the empty slots first copies the cache, so it is
    # done only when the plain product shows that it has to be.
    output = weighted(values)
    output = jax.lax.cond(
        jnp.isfinite(output).all(),
        lambda: output,
        lambda: weighted(jnp.where((scores != MASKED).any(2)[..., None], values, jnp.zeros((), values.dtype))),
    )
    if own_value is not None:
        output = output + own_weight[..., None] * own_value.astype(jnp.float32)
    # Divided at last, where there is less to divide.
    output = output / total[..., None]
    log_sum_exp = jnp.where(sees_nothing, MASKED, largest + jnp.log(total))
    return Attended(output, log_sum_exp, weights / total[..., None], own_weight / total)


def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """In the cache's dtype, `b`'s, whatever the model's: casting the cache would copy it."""
    return jnp.einsum(subscripts, a.astype(b.dtype), b, preferred_element_type=jnp.float32)
