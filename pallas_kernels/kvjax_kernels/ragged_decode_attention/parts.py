"""How attention over parts of each head's tokens, which the kernels give, becomes one attention."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax_kernels.log_sum_exps import weights as merging
from kvjax_kernels.ragged_decode_attention.types import DecodeAttention, Parts

#: Why kernels take no `SplitRows`.
APART = "it reads rows of key and value, and these are split (see `split_rows`)"


def combined(
    attend_parts: Callable[..., Parts],
    query: Float[Array, "B N D"],
    kv: Float[Array, "B S twoD"],
    lengths: Int[Array, "B K"],
    *,
    segments: tuple[int, ...] | None,
    starts: Int[Array, "B K"],
    own_key: Float[Array, "B K D"] | None,
    own_value: Float[Array, "B K D"] | None,
    scale: float,
    token_attention: bool,
    **settings: Any,
) -> DecodeAttention:
    """Attends by a kernel, and merges its parts and the asking token; see `api.ragged_decode_attention`."""
    where: dict[str, Any] = {"segments": segments, "starts": starts}
    parts = attend_parts(query, kv, lengths, **where, scale=scale, scores=token_attention, **settings)
    batch, query_heads, head_dim = query.shape
    kv_heads = lengths.shape[1]
    group = query_heads // kv_heads
    output, log_sum_exps = parts.output, parts.log_sum_exp
    if own_key is not None and own_value is not None:
        grouped = query.astype(jnp.float32).reshape(batch, kv_heads, group, head_dim)
        own_score = (grouped * own_key.astype(jnp.float32)[:, :, None]).sum(-1) * scale
        own = jnp.broadcast_to(own_value.astype(jnp.float32)[:, :, None, None], (batch, kv_heads, 1, group, head_dim))
        output = jnp.concatenate([output, own], axis=2)
        log_sum_exps = jnp.concatenate([log_sum_exps, own_score[:, :, None]], axis=2)
    weights = merging(log_sum_exps, 2)
    merged = (output * weights.pieces[..., None]).sum(2) / weights.total[..., None]
    attention, own_attention = None, None
    if parts.scores is not None:
        attention = _by_slot(parts, weights.log_sum_exp, lengths, slots=kv.shape[1], **where)
        own_attention = jnp.zeros((batch, kv_heads), jnp.float32)
        if own_key is not None:
            own_attention = (weights.pieces[:, :, -1] / weights.total).sum(-1)
    return DecodeAttention(
        output=merged.reshape(batch, query_heads, head_dim),
        log_sum_exp=weights.log_sum_exp.reshape(batch, query_heads),
        token_attention=attention,
        own_attention=own_attention,
    )


def _by_slot(
    parts: Parts,
    log_sum_exp: Float[Array, "B K G"],
    lengths: Int[Array, "B K"],
    *,
    slots: int,
    segments: tuple[int, ...] | None,
    starts: Int[Array, "B K"],
) -> Float[Array, "B S"]:
    """Each slot's probability, summed over its group's query heads; zeros in empty slots."""
    scores, origins = parts.scores, parts.origins
    assert scores is not None
    columns = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, None]
    first = jnp.zeros_like(starts) if origins is None else starts - origins
    held = (columns >= first[..., None]) & (columns < (first + lengths)[..., None])
    probabilities = jnp.exp(jnp.where(held[:, :, None], scores - log_sum_exp[..., None], -jnp.inf)).sum(2)
    if segments is not None and origins is None:
        if len(set(segments)) == 1:
            return probabilities[:, :, : segments[0]].reshape(lengths.shape[0], slots)
        # Not a gather, which is slow on TPU.
        return jnp.concatenate([probabilities[:, head, :size] for head, size in enumerate(segments)], axis=1)
    place = jnp.arange(slots, dtype=jnp.int32)[None, None] - starts[..., None]
    holds = (place >= 0) & (place < lengths[..., None])
    owner = holds.argmax(1).astype(jnp.int32)
    column = jnp.take_along_axis(place + first[..., None], owner[:, None], axis=1)[:, 0]
    index = owner * probabilities.shape[-1] + jnp.clip(column, 0, probabilities.shape[-1] - 1)
    flat = probabilities.reshape(lengths.shape[0], -1)
    return jnp.where(holds.any(1), jnp.take_along_axis(flat, index, axis=1), 0.0)
