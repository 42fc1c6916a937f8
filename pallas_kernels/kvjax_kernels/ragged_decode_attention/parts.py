"""What the kernels give, attention over parts of each head's tokens, and how it becomes one attention."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax_kernels.masking import MASKED
from kvjax_kernels.ragged_decode_attention.api import DecodeAttention, head_starts


class Parts(NamedTuple):
    """Attention of each query head over P disjoint parts of its tokens; float32, G = N / K.

    Attributes:
        output: [B, K, P, G, D], normalised within the part; zeros where it saw no token.
        log_sum_exp: [B, K, P, G], natural, of the scaled scores; -1e30 where it saw no token.
        scores: [B, K, G, C], the scaled score of each token, or None; anything past a head's length.
        origins: [B, K], the slot of the first column of `scores`; None where it is the head's first slot.
    """

    output: Float[Array, "B K P G D"]
    log_sum_exp: Float[Array, "B K P G"]
    scores: Float[Array, "B K G C"] | None = None
    origins: Int[Array, "B K"] | None = None


def combine(
    parts: Parts,
    query: Float[Array, "B N D"],
    lengths: Int[Array, "B K"],
    *,
    slots: int,
    segments: tuple[int, ...] | None,
    starts: Int[Array, "B K"] | None,
    own_key: Float[Array, "B K D"] | None,
    own_value: Float[Array, "B K D"] | None,
    scale: float,
) -> DecodeAttention:
    """Merges the parts and the asking token by their log-sum-exps; see `api.ragged_decode_attention`."""
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
    largest = log_sum_exps.max(axis=2, keepdims=True)
    weights = jnp.where(log_sum_exps > MASKED / 2, jnp.exp(log_sum_exps - largest), 0.0)
    total = weights.sum(2)
    sees_nothing = total == 0
    safe = jnp.where(sees_nothing, 1.0, total)
    merged = (output * weights[..., None]).sum(2) / safe[..., None]
    log_sum_exp = jnp.where(sees_nothing, MASKED, largest[:, :, 0] + jnp.log(safe))
    attention, own_attention = None, None
    if parts.scores is not None:
        attention = _by_slot(parts, log_sum_exp, lengths, slots=slots, segments=segments, starts=starts)
        own_attention = jnp.zeros((batch, kv_heads), jnp.float32)
        if own_key is not None:
            own_attention = (weights[:, :, -1] / safe).sum(-1)
    return DecodeAttention(
        output=merged.reshape(batch, query_heads, head_dim),
        log_sum_exp=log_sum_exp.reshape(batch, query_heads),
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
    starts: Int[Array, "B K"] | None,
) -> Float[Array, "B S"]:
    """Each slot's probability, summed over its group's query heads; zeros in empty slots."""
    scores, origins = parts.scores, parts.origins
    assert scores is not None
    columns = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, None]
    if starts is None:
        assert segments is not None
        starts = jnp.broadcast_to(jnp.asarray(head_starts(segments), jnp.int32)[None], lengths.shape)
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
