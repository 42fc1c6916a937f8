"""`ragged_decode_attention`: checks arguments and chooses an implementation."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax_kernels.dispatch import run
from kvjax_kernels.ragged_decode_attention.types import DecodeAttention
from kvjax_kernels.split_rows import SplitRows, head_starts


def ragged_decode_attention(
    query: Float[Array, "B N D"],
    kv: Float[Array, "B S twoD"] | SplitRows,
    lengths: Int[Array, "B K"],
    *,
    segments: tuple[int, ...] | None = None,
    starts: Int[Array, "B K"] | None = None,
    own_key: Float[Array, "B K D"] | None = None,
    own_value: Float[Array, "B K D"] | None = None,
    scale: float | None = None,
    sink_query: Float[Array, "B N D"] | None = None,
    sinks: int = 0,
    token_attention: bool = False,
    implementation: str | None = None,
) -> DecodeAttention:
    """Attends one query token a row to the first `lengths` rows of each KV head's segment, and to itself.

    Args:
        query: rotated queries; N is a multiple of K, consecutive heads share a KV head.
        kv: cached rows, key then value; the KV heads' segments lie one after another along S. Or the same taken apart
            by `split_rows`, which only "xla" and "reference" read.
        lengths: tokens held by each head; slots past it may hold anything, NaN included.
        segments: slots of each KV head, where all rows have the same; their sum is S.
        starts: first slot of each KV head, where every row has its own. One of `segments` and `starts`.
        own_key: the rotated key of the token that asks, which is not in `kv`; None to leave it out.
        own_value: its value.
        scale: factor of the scores, 1 / sqrt(D) by default.
        sink_query: queries rotated for another distance, used for the first `sinks` slots of each segment; only
            with `segments`.
        sinks: how many; 0 without `sink_query`.
        token_attention: whether each token's summed probability is wanted.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None picks by platform.

    Raises:
        ValueError: shapes that do not fit each other, or an unknown implementation.
        NotImplementedError: the named implementation cannot do this.
    """
    batch, query_heads, head_dim = query.shape
    kv_heads = lengths.shape[1]
    if (segments is None) == (starts is None):
        raise ValueError("one of `segments` and `starts` must be given, got both or neither.")
    if isinstance(kv, SplitRows):
        _check_split(kv, segments, head_dim)
    elif kv.shape[-1] != 2 * head_dim:
        raise ValueError(f"`kv` rows must hold key and value, 2 * {head_dim} wide, got {kv.shape[-1]}.")
    elif segments is not None and sum(segments) != kv.shape[1]:
        raise ValueError(f"`segments` must add up to the {kv.shape[1]} slots of `kv`, got {segments}.")
    if (segments is not None and len(segments) != kv_heads) or lengths.shape[0] != batch:
        heads = kv_heads if segments is None else len(segments)
        raise ValueError(f"`lengths` must be [{batch}, {heads}], got {list(lengths.shape)}.")
    if query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads do not group over {kv_heads} KV heads.")
    if (sink_query is None) != (sinks == 0):
        raise ValueError(f"`sink_query` and `sinks` go together, got sinks = {sinks}.")
    if sink_query is not None and segments is None:
        raise ValueError("`sink_query` needs `segments`, got `starts`.")
    if (own_key is None) != (own_value is None):
        raise ValueError("`own_key` and `own_value` go together.")
    if starts is None:
        starts = jnp.broadcast_to(jnp.asarray(head_starts(segments or ()), jnp.int32)[None], lengths.shape)
    return run(
        "ragged_decode_attention",
        implementation,
        query,
        kv,
        lengths,
        segments=segments,
        starts=starts,
        own_key=own_key,
        own_value=own_value,
        scale=float(head_dim) ** -0.5 if scale is None else scale,
        sink_query=sink_query,
        sinks=sinks,
        token_attention=token_attention,
    )


def _check_split(rows: SplitRows, segments: tuple[int, ...] | None, head_dim: int) -> None:
    if segments is None:
        raise ValueError("`kv` that is split needs `segments`, got `starts`.")
    sizes = list(dict.fromkeys(segments))
    shapes = [(*key.shape[1:], *value.shape[1:]) for key, value in zip(rows.keys, rows.values, strict=True)]
    expected = [(n := segments.count(size), head_dim, size, n, size, head_dim) for size in sizes]
    if shapes != expected:
        raise ValueError(f"`kv` must be split by `segments`, {segments}, got arrays of {shapes}.")
